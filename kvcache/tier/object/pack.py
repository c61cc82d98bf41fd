"""A pack: records of one chain in one object, behind a table with the offset of each record.

A store takes about as long for 100 KiB as for 8 MiB, so records that are written together share an object. Readers
build their index from the tables; no state outside the packs has to be right. See `docs/spec/object.md`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from struct import Struct
from typing import NamedTuple

from xxhash import xxh3_64

from kvcache.block.layout import Shard
from kvcache.block.record import Address, RecordError, expires_ms, read_header
from kvcache.errors import LayoutError

MAGIC = b"KVCP"
VERSION = 1
_HEAD = Struct("<4sHH8sII32s")
_SUM = Struct("<Q")
HEAD_BYTES = _HEAD.size + _SUM.size
_ROW = Struct("<32s32sQQQQ")
MAX_ROWS = 1 << 16
"""Most rows of a table. The bound keeps one pack, by any writer, to a small part of a process's index of a store."""
UNKNOWN = bytes(32)
"""A parent that the writer did not know."""


class Row(NamedTuple):
    """A record's place in its pack, and its metadata."""

    signature: bytes
    parent: bytes  # empty where unknown
    at: int
    size: int
    write_id: int
    expires_ms: int  # since 1970; 0: never


@dataclass(frozen=True, slots=True)
class Table:
    """The table at the beginning of a pack."""

    namespace: bytes
    group: int
    shard: Shard
    rows: tuple[Row, ...]

    @property
    def table_bytes(self) -> int:
        return HEAD_BYTES + _ROW.size * len(self.rows)

    @property
    def size_bytes(self) -> int:
        """The size of the whole pack."""
        return self.rows[-1].at + self.rows[-1].size

    def address(self, row: Row) -> Address:
        return Address(self.namespace, row.signature, row.parent, self.group, self.shard)

    def pack(self) -> bytes:
        rows = b"".join(
            _ROW.pack(r.signature, r.parent or UNKNOWN, r.at, r.size, r.write_id, r.expires_ms) for r in self.rows
        )
        head = _HEAD.pack(MAGIC, VERSION, self.group, self.shard.pack(), len(self.rows), 0, self.namespace)
        return head + _SUM.pack(_sum(head, rows)) + rows


def table_bytes(head: bytes) -> int:
    """Return the length of the table that begins with these bytes. Raises RecordError where no table does."""
    if not head.startswith(MAGIC):
        raise RecordError("magic", f"magic {head[:4]!r}: expected {MAGIC!r}")
    if len(head) < HEAD_BYTES:
        raise RecordError("short", f"{len(head)} bytes: a pack begins with {HEAD_BYTES}")
    _, version, _, _, count, _, _ = _HEAD.unpack_from(head)
    if version != VERSION:
        raise RecordError("version", f"version {version}: this reader knows {VERSION}", foreign=True)
    if count > MAX_ROWS:
        raise RecordError("field", f"a table of {count} rows: at most {MAX_ROWS} are read", foreign=True)
    return HEAD_BYTES + _ROW.size * int(count)


def read_table(data: bytes) -> Table:
    """Return the table at the beginning of these bytes. Raises RecordError for a short or damaged one."""
    end = table_bytes(data[:HEAD_BYTES])
    if len(data) < end or end == HEAD_BYTES:
        raise RecordError("short", f"a table of {end} bytes: {len(data)} are there")
    head, rows = data[: _HEAD.size], data[HEAD_BYTES:end]
    if _SUM.unpack_from(data, _HEAD.size)[0] != _sum(head, rows):
        raise RecordError("header_sum", "the table's checksum does not match its bytes")
    _, _, group, shard, _, reserved, namespace = _HEAD.unpack(head)
    if reserved:
        raise RecordError("field", f"reserved bytes hold {reserved}: expected zero")
    found, at = [], end
    for signature, parent, begin, size, write_id, expiry in _ROW.iter_unpack(rows):
        if begin != at or not size:
            raise RecordError("length", f"a record of {size} bytes at {begin}: expected one at {at}")
        found.append(Row(signature, b"" if parent == UNKNOWN else parent, begin, size, write_id, expiry))
        at += size
    try:
        return Table(namespace, group, Shard.unpack(shard), tuple(found))
    except LayoutError as error:
        raise RecordError("address", str(error)) from None


@dataclass(frozen=True, slots=True)
class PackRecord:
    """A record in its cut form, to be written to a pack. `pieces` refer to the caller's memory."""

    i: int  # its number in the batch
    address: Address
    pieces: Sequence[memoryview]  # the used length of the header, then the payload

    @property
    def size(self) -> int:
        return sum(map(len, self.pieces))


def build_pack(records: Sequence[PackRecord]) -> tuple[Table, list[memoryview]]:
    """Return a pack's table and the bytes of its object in pieces. All records share namespace, group and shard."""
    first = records[0].address
    at, rows = HEAD_BYTES + _ROW.size * len(records), []
    for record in records:
        header = read_header(record.pieces[0])
        address = record.address if record.address.parent else header.address
        rows.append(Row(address.signature, address.parent, at, record.size, header.write_id, expires_ms(header.fields)))
        at += record.size
    table = Table(first.namespace, first.group, first.shard, tuple(rows))
    return table, [memoryview(table.pack()), *(piece for record in records for piece in record.pieces)]


def _sum(head: bytes, rows: bytes) -> int:
    state = xxh3_64(head)
    state.update(rows)
    return state.intdigest()
