"""Tables of packs: read from each, or for many of them from one object where somebody left copies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgpack
from xxhash import xxh3_64_digest

from kvcache.block.record import RecordError
from kvcache.tier.counters import Counters
from kvcache.tier.object.bucket import Bucket, Listed, RefusedError, TakenError
from kvcache.tier.object.name import Names, Place
from kvcache.tier.object.pack import Table, read_table, table_bytes

HEAD_BYTES = 16 << 10
"""Read of a pack to learn its table: that of 170 records."""
WORTH_COPYING = 64
"""Packs that had to be read singly, from which on copies are left for the next."""
COPIES_BYTES = 64 << 20
"""Of copies, at most."""
AT_ONCE = 512
"""Tables that are read in one call, which has its own time."""


@dataclass(slots=True, eq=False)
class Pack:
    path: str
    mark: str
    table: Table


class Tables:
    def __init__(self, bucket: Bucket, names: Names, counters: Counters) -> None:
        self.bucket, self.names, self.counters = bucket, names, counters

    def of(self, path: str, deadline: float | None, head: bytes | None = None) -> Table | None:
        """That of a pack, `head` being its first bytes where they are there; None where it has none that can be read,
        or one that belongs elsewhere: whoever can write there may copy a folder. OSError where the store did not
        answer."""
        try:
            if head is None:
                head = self.bucket.get(path, deadline, end=HEAD_BYTES)
            if head is not None and (end := table_bytes(head)) > len(head):
                head = self.bucket.get(path, deadline, end=end)
            if head is None:
                return None
            table = read_table(head)
        except RecordError as error:
            self.counters.add("foreign" if error.foreign else "damaged")
            return None
        place = Place(table.namespace, table.group, table.shard)
        if not self.names.bears(path, place, table.rows[0].signature):
            self.counters.add("foreign")
            return None
        return table

    def copies(self, namespace: bytes) -> Copies:
        return Copies(self, namespace)


class Copies:
    """The catalogue of a namespace, read once it is worth it; and how many tables it had not."""

    def __init__(self, tables: Tables, namespace: bytes) -> None:
        self._tables = tables
        self._path = tables.names.catalogue(namespace)
        self._copies: dict[str, tuple[str, bytes]] | None = None
        self._singly = 0

    @property
    def worth_leaving(self) -> bool:
        return self._singly >= WORTH_COPYING

    def read(self, listed: Sequence[Listed]) -> Iterator[Pack]:
        """Those of these that are packs of the namespace."""
        if len(listed) >= WORTH_COPYING and self._copies is None:
            self._copies = self._load()
        singly: list[Listed] = []
        for each in listed:
            copy = (self._copies or {}).get(each.path)
            table = self._tables.of(each.path, None, copy[1]) if copy is not None and copy[0] == each.mark else None
            if table is None or table.size_bytes != each.size:
                singly.append(each)
            else:
                yield Pack(each.path, each.mark, table)
        self._singly += len(singly)
        for first in range(0, len(singly), AT_ONCE):
            some = singly[first : first + AT_ONCE]
            heads = self._tables.bucket.heads([each.path for each in some], HEAD_BYTES, None)
            for each, begin in zip(some, heads, strict=True):
                table = self._tables.of(each.path, None, begin) if begin is not None else None
                if table is not None:
                    yield Pack(each.path, each.mark, table)

    def _load(self) -> dict[str, tuple[str, bytes]]:
        """By path, mark and table of a pack, as somebody saw them: never to be believed for another mark."""
        data = self._tables.bucket.get(self._path, None, end=COPIES_BYTES + 1) or b""
        if not 8 <= len(data) <= COPIES_BYTES or xxh3_64_digest(data[8:]) != data[:8]:
            return {}
        try:
            return {str(path): (str(mark), bytes(table)) for path, mark, table in msgpack.unpackb(data[8:])}
        except Exception:  # noqa: BLE001  whoever can write there may write anything
            self._tables.counters.add("damaged")
            return {}

    def leave(self, packs: Sequence[Pack]) -> None:
        """As many as there is room for."""
        copies, size = [], 0
        for pack in packs:
            size += len(pack.path) + len(pack.mark) + pack.table.table_bytes + 32  # at least what msgpack adds
            if pack.mark and size <= COPIES_BYTES:
                copies.append((pack.path, pack.mark, pack.table.pack()))
        data = msgpack.packb(copies)
        try:
            self._tables.bucket.put(self._path, [memoryview(xxh3_64_digest(data) + data)], None, create=False)
        except (RefusedError, TakenError, TimeoutError):
            self._tables.counters.add("catalogue_left_out")
