"""The learned state of the eviction policy, saved beside the first drive's store and loaded at start.

The file `policy` has a line that names the format, a line with the SHA-256 of the rest, a line of JSON, then rows. The
JSON has the counts that the policy uses: `reused`, and as `forgotten` all blocks last seen waiting, cached or as
ghosts. It also has the cost classes of the records on the drive, so that quotas hold before an engine connects. For
every policy it has the time of the last use of recent namespaces. The rows have the use count and age of single blocks
and ghosts (`Index.kept`). Blocks on the drive continue with theirs, other rows become ghosts, and blocks without a row
count as seen until then.

The file is written every SAVE_INTERVAL_S in which there was a request, a minute later for each MiB of its size, and at
the end. A kill loses the changes since. A file that is damaged, of another version or of another policy is ignored and
counted; the policy then starts without evidence.
"""

from __future__ import annotations

import json
import os
import threading
from base64 import b64decode, b64encode
from contextlib import suppress
from hashlib import sha256
from math import isfinite, prod
from struct import Struct
from typing import Any
from zlib import compress, decompressobj

import numpy as np
from numpy.typing import NDArray

from kvcache.cache.context import CacheContext
from kvcache.errors import INVALID_DATA
from kvcache.evict.policy import AGE_EDGES, Policy
from kvcache.log import logger

FILE_NAME = "policy"
FORMAT = b"kvcache policy 2\n"
SAVE_INTERVAL_S = 60.0
MAX_COUNT = 1 << 48
MAX_JSON_BYTES = 64 << 10
"""Without the rows; further places are left out. The store's own overhead has space for it."""
MAX_ROWS = 1 << 21
"""Rows of 8 bytes: cached blocks, then the newest ghosts."""

LAST_USE, MAX_NAMESPACES = Struct("<32sd"), 256
"""A namespace and the time of its last use; the most recent ones are saved, at most this many."""

_log = logger("kvcache.policy_state")


class PolicyState:
    """Saves and loads the state. `directory`: where the file is; None saves nothing."""

    def __init__(self, context: CacheContext, directory: str | None) -> None:
        self._path = None if directory is None else os.path.join(directory, FILE_NAME)
        self._directory, self._index, self._cost_classes = directory, context.index, context.cost_classes
        self._usage_log, self._counters, self._os_env = context.usage_log, context.counters, context.os_env
        self._submit = context.background.submit
        self._due = context.os_env.clock.now() + SAVE_INTERVAL_S
        self._writing = threading.Lock()

    def load(self) -> None:
        """Load the state at start, before any request. Never raises: a cache works without it."""
        if self._path is None:
            return
        try:
            file = self._os_env.disk.open(self._path)
        except OSError:
            return  # no file yet, or a drive fault that others report
        try:
            data = bytearray(min(file.size(), MAX_JSON_BYTES + 8 * MAX_ROWS + 64))
            got = file.read(0, [memoryview(data)]) if data else 0
            result = self._take(bytes(data[:got]))
        except OSError as error:
            result = "failed"
            _log.warning("%s: %s; the policy starts without evidence", self._path, error.strerror or error)
        finally:
            file.close()
        self._counters.add("policy_states", result=result)

    def restore(self, data: bytes) -> None:
        """Load the state that an earlier process handed over, if no file is configured."""
        if self._path is None:
            self._counters.add("policy_states", result=self._take(data))

    def _take(self, data: bytes) -> str:
        form, _, rest = data.partition(b"\n")
        checksum, _, body = rest.partition(b"\n")
        if form + b"\n" != FORMAT:
            return "foreign"
        if sha256(body).hexdigest().encode() != checksum:
            _log.warning("%s is damaged; the policy starts without evidence", self._path or FILE_NAME)
            return "damaged"
        try:
            state, _, rows = body.partition(b"\n")
            state_fields = json.loads(state)
            used = list(LAST_USE.iter_unpack(b64decode(state_fields.get("used", ""))))
            if not all(isfinite(last) for _, last in used):
                raise ValueError("invalid time")
            self._usage_log.restore(used)
            if [state_fields.get(name) for name in ("policy", "bounds", "gaps", "edges")] != _policy_shape(
                self._index.policy
            ):
                return "foreign"
            shape = self._index.evidence().reused.shape
            reused, forgotten = (
                _unpack_counts(state_fields["reused"], shape),
                _unpack_counts(state_fields["forgotten"], shape),
            )
            if rows:
                self._index.import_state(rows)
                forgotten = np.maximum(forgotten - self._index.evidence().waiting, 0)  # these wait as rows of their own
            self._cost_classes.restore(state_fields["kinds"])
            self._index.learn(reused, forgotten)
        except INVALID_DATA as error:  # intact, but written by another version
            _log.warning(
                "%s has another format (%s); the policy starts without evidence",
                self._path or FILE_NAME,
                type(error).__name__,
            )
            return "foreign"
        return "read"

    def used(self) -> None:
        """Note that a request began; saves the state if that is due."""
        if self._path is None or self._os_env.clock.now() < self._due:
            return
        self._due = self._os_env.clock.now() + SAVE_INTERVAL_S
        with suppress(RuntimeError):  # the cache is being closed
            self._submit(self.save)

    def save(self) -> None:
        """Write the file; it gets its name once it is complete and durable. Never raises."""
        if self._path is None:
            return
        try:
            with self._writing:
                self._write(self._path)
            result = "written"
        except OSError as error:
            result = "failed"
            _log.debug("%s was not written: %s", self._path, error)
        self._counters.add("policy_states", result=result)

    def _write(self, path: str) -> None:
        disk, temporary = self._os_env.disk, f"{path}.tmp"
        file = disk.open(temporary, create=True)
        try:
            parts = self._parts(waiting=True)
            size = sum(map(len, parts))
            self._due = max(self._due, self._os_env.clock.now() + SAVE_INTERVAL_S * (1 + size // (1 << 20)))
            file.truncate(0)
            file.write(0, [memoryview(part) for part in parts])
            file.sync()
        finally:
            file.close()
        disk.rename(temporary, path)
        disk.sync_directory(str(self._directory))

    def export(self, *, waiting: bool = True) -> bytes:
        """The contents of the file.

        Not `waiting`: without waiting blocks, for a process that gets them in another way.
        """
        return b"".join(self._parts(waiting=waiting))

    def _parts(self, *, waiting: bool) -> list[bytes]:
        """The parts of the file, rows last.

        Rows are never copied: other threads would wait while Python copies 16 MiB.
        """
        policy, evidence = self._index.policy, self._index.evidence()
        state_fields: dict[str, Any] = {
            **dict(zip(("policy", "bounds", "gaps", "edges"), _policy_shape(policy), strict=True)),
            "reused": _pack_counts(evidence.reused),
            "forgotten": _pack_counts(evidence.forgotten + (evidence.waiting if waiting else 0)),
            "used": b64encode(b"".join(LAST_USE.pack(*row) for row in self._usage_log.export(MAX_NAMESPACES))).decode(),
            "kinds": [],
        }
        max_bytes = MAX_JSON_BYTES - len(json.dumps(state_fields)) - 128
        state_fields["kinds"] = self._cost_classes.export(max_bytes)
        state = json.dumps(state_fields, separators=(",", ":")).encode() + b"\n"
        rows = self._index.export_state(MAX_ROWS) if waiting else b""
        checksum = sha256(state)
        checksum.update(rows)
        return [FORMAT, checksum.hexdigest().encode() + b"\n", state, rows]


def _policy_shape(policy: Policy) -> list[Any]:
    return [policy.name, list(policy.bounds), list(policy.gaps), list(AGE_EDGES)]


def _pack_counts(counts: NDArray[np.int64]) -> str:
    return b64encode(compress(counts.astype("<i8").tobytes())).decode()


def _unpack_counts(packed: str, shape: tuple[int, ...]) -> NDArray[np.int64]:
    """Raises ValueError if these are not counts of this shape."""
    size = 8 * prod(shape)
    data = decompressobj().decompress(b64decode(packed), size + 1)
    if len(data) != size:
        raise ValueError(f"{len(data)} bytes of counts: expected {size}")
    counts = np.frombuffer(data, "<i8").astype(np.int64).reshape(shape)
    if (counts < 0).any() or (counts > MAX_COUNT).any():
        raise ValueError("a negative or oversized count")
    return counts
