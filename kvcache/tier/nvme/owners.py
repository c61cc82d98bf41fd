"""Whose the namespaces of a store are: a file `owners` with a row a namespace, each with its checksum. What is torn or
damaged of it is as if it were not there."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import suppress

from xxhash import xxh3_64_digest

from kvcache.block.namespace import OWNER_BYTES, Owner
from kvcache.tier.nvme.directory import Directory

NAME = "owners"
_ROW = 32 + OWNER_BYTES


class Owners:
    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._known: dict[bytes, Owner] | None = None

    def all(self) -> Mapping[bytes, Owner]:
        with self._lock:
            return dict(self._load())

    def note(self, namespace: bytes, owner: Owner) -> None:
        """OSError where it could not be kept."""
        with self._lock:
            if self._load().get(namespace) != owner:
                self._write({**self._load(), namespace: owner})

    def forget(self, namespace: bytes) -> None:
        with self._lock:
            if namespace in self._load():
                self._write({name: owner for name, owner in self._load().items() if name != namespace})

    def _load(self) -> dict[bytes, Owner]:
        if self._known is None:
            self._known, data = {}, b""
            with suppress(OSError):
                data = bytes(self._directory.read(NAME))
            for at in range(0, len(data), _ROW + 8):
                row, said = data[at : at + _ROW], data[at + _ROW : at + _ROW + 8]
                owner = Owner.read(row[32:])
                if owner is not None and xxh3_64_digest(row) == said:
                    self._known[row[:32]] = owner
        return self._known

    def _write(self, rows: dict[bytes, Owner]) -> None:
        packed = (namespace + owner.pack() for namespace, owner in rows.items())
        self._directory.write(NAME, [b"".join(row + xxh3_64_digest(row) for row in packed)])
        self._known = rows
