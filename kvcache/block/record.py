"""The encoding of a block as a record: a header, then its payload. `docs/spec/record.md` specifies the bytes.

    seal          write the header of a payload in place
    read_header   parse an untrusted header
    verify        check that a record is that of an address, complete and unchanged

A record has one of two forms. Padded (host slots, NVMe): header and payload fill multiples of 4,096 bytes, fixed by the
decoded size. Cut: each has exactly its used length. The meaningful bytes of both forms are the same.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Any

from xxhash import xxh3_64, xxh3_64_intdigest

from kvcache.block.layout import Shard
from kvcache.errors import KVCacheError, LayoutError

# Addresses: the name under which a tier stores a record, and the identity that a reader compares.

KEY_BYTES = 16
NAME_BYTES = KEY_BYTES + 2 + 8


@dataclass(frozen=True, slots=True)
class Address:
    """The identity of one record: key, group and shard find it; namespace, signature and parent prove it.

    `parent` is the signature of the previous block: the namespace id for the first block, empty where it is unknown.
    Namespace, signature and parent are 32 raw bytes.
    """

    namespace: bytes
    signature: bytes
    parent: bytes
    group: int
    shard: Shard

    @property
    def key(self) -> bytes:
        """16 bytes, the start of the signature."""
        return self.signature[:KEY_BYTES]

    @property
    def name(self) -> bytes:
        """26 bytes that tiers index by: key, group as little-endian uint16, shard."""
        return self.key + self.group.to_bytes(2, "little") + self.shard.pack()


MAGIC = b"KVCR"
VERSION = 1
ALIGNMENT = 4096
CHUNK_BYTES = 256 << 10
FIXED_BYTES = 136

PARENT, CHUNK_SUMS, TOKEN_IDS, EXTRAS, KEYED_DIGEST, COST, EXPIRY = range(1, 8)
EXPIRY_BYTES = 8
ENCRYPTION = 0x8008
ENCRYPTION_BYTES = 36
"""Key id, nonce and tag: see `kvcache/block/cipher.py`."""
REQUIRED_FIELD_BIT = 0x8000
"""Bit of a field's tag: a reader that does not know the field cannot use the record."""

_FIXED = Struct("<4sHH8s8s32s32sQQQQII")
_SUM = Struct("<Q")
_FIELD = Struct("<HI")

Payload = memoryview | Sequence[memoryview]
"""The stored bytes, in one piece or several. Bytes after the stored length are padding and are ignored."""


class RecordError(KVCacheError):
    """The bytes are not the expected record.

    `check` names the first check that failed: short, magic, version, header_sum, field, namespace, address, signature,
    parent, length, codec, payload_sum. `foreign`: this reader cannot interpret the record, so the tier keeps it.
    """

    def __init__(self, check: str, text: str, *, foreign: bool = False) -> None:
        super().__init__(text)
        self.check = check
        self.foreign = foreign


@dataclass(frozen=True, slots=True)
class Header:
    """A parsed header. `fields` holds raw bytes by tag; `header_bytes` is the used length."""

    address: Address
    codec: str
    stored_bytes: int
    decoded_bytes: int
    write_id: int
    payload_sum: int
    fields: Mapping[int, bytes]
    header_bytes: int

    @property
    def chunk_sums(self) -> bytes:
        """XXH3-64 of each 256 KiB of the stored bytes, little-endian uint64, so that a part can be checked alone."""
        return self.fields[CHUNK_SUMS]


def header_area(payload_bytes: int) -> int:
    """Return the bytes before the payload in the padded form, for a decoded payload of this size."""
    return _pad(512 + _SUM.size * _chunks(payload_bytes))


def record_bytes(payload_bytes: int) -> int:
    """Return the bytes of a whole record in the padded form."""
    return header_area(payload_bytes) + _pad(payload_bytes)


def new_write_id() -> int:
    """Return 64 random bits that distinguish one write of an address from the next."""
    return secrets.randbits(64)


def seal(
    header: memoryview,
    payload: Payload,
    address: Address,
    *,
    stored_bytes: int,
    decoded_bytes: int | None = None,
    codec: str = "raw",
    write_id: int | None = None,
    fields: Mapping[int, bytes] | None = None,
) -> int:
    """Write the header of a payload; return its used length. The rest of `header` becomes zero.

    Parent and chunk sums are added from address and payload. Optional fields that do not fit into `header` are left
    out, higher tags first.

    Args:
        decoded_bytes: `stored_bytes` where not given.
        write_id: a new one where not given.

    Raises:
        RecordError: a required field or the chunk sums do not fit, or the payload is shorter than `stored_bytes`.
    """
    area = header.cast("B")
    sums = chunk_sums(payload, stored_bytes)
    wanted = {**(fields or {}), CHUNK_SUMS: sums}
    if address.parent:
        wanted[PARENT] = address.parent
    packed = _pack_fields(wanted, len(area) - FIXED_BYTES)
    decoded_bytes = stored_bytes if decoded_bytes is None else decoded_bytes
    write_id = new_write_id() if write_id is None else write_id
    fixed = fixed_part(address, codec, stored_bytes, decoded_bytes, write_id, xxh3_64_intdigest(sums), len(packed))
    used = FIXED_BYTES + len(packed)
    area[:used] = fixed + _SUM.pack(_header_sum(fixed, packed)) + packed
    area[used:] = bytes(len(area) - used)
    return used


def fixed_part(
    address: Address,
    codec: str,
    stored_bytes: int,
    decoded_bytes: int,
    write_id: int,
    payload_sum: int = 0,
    fields_bytes: int = 0,
) -> bytes:
    """Return the first 128 bytes of a header."""
    return _FIXED.pack(
        MAGIC,
        VERSION,
        address.group,
        address.shard.pack(),
        _pack_codec(codec),
        address.namespace,
        address.signature,
        stored_bytes,
        decoded_bytes,
        write_id,
        payload_sum,
        fields_bytes,
        0,
    )


def with_field(head: bytes, header: Header, tag: int, body: bytes) -> bytes:
    """Return the used header of the same record with one field added or replaced."""
    packed = _pack_fields({**header.fields, tag: body}, 1 << 20)
    fixed = head[: _FIXED.size - 8] + len(packed).to_bytes(4, "little") + bytes(4)
    return fixed + _SUM.pack(_header_sum(fixed, packed)) + packed


def expires_ms(fields: Mapping[int, bytes]) -> int:
    """Return when a record with these fields expires, in milliseconds since 1970; 0 for never."""
    return int.from_bytes(fields.get(EXPIRY, b""), "little")


def expiry_field(end_ms: int) -> dict[int, bytes]:
    """Return the field for an expiry in milliseconds since 1970; none for 0."""
    return {EXPIRY: end_ms.to_bytes(EXPIRY_BYTES, "little")} if end_ms else {}


def pack_tagged(fields: Mapping[int, bytes], tags: Sequence[int]) -> bytes:
    """Return those of these fields that are present, each with tag and length, as in a header."""
    return b"".join(_FIELD.pack(tag, len(fields[tag])) + fields[tag] for tag in tags if tag in fields)


def read_header(buf: Any) -> Header:
    """Parse the header at the start of a bytes-like object.

    Raises:
        RecordError: it is not a complete, sound header.
    """
    view = memoryview(buf).cast("B")
    if view[:4] != MAGIC[: len(view)]:
        raise RecordError("magic", f"magic {bytes(view[:4])!r}: expected {MAGIC!r}")
    if len(view) < FIXED_BYTES:
        raise RecordError("short", f"a header of {len(view)} bytes: expected at least {FIXED_BYTES}")
    # copied once, so that the checked bytes are the parsed ones even if another process writes meanwhile
    fixed = bytes(view[: _FIXED.size])
    (_, version, group, shard, codec, namespace, signature, stored, decoded, write_id, payload_sum, size, reserved) = (
        _FIXED.unpack(fixed)
    )
    if version != VERSION:
        raise RecordError("version", f"version {version}: this reader knows {VERSION}", foreign=True)
    if size > len(view) - FIXED_BYTES:
        raise RecordError("short", f"fields of {size} bytes: {len(view) - FIXED_BYTES} are there")
    packed = bytes(view[FIXED_BYTES : FIXED_BYTES + size])
    if _SUM.unpack_from(view, _FIXED.size)[0] != _header_sum(fixed, packed):
        raise RecordError("header_sum", "the header's checksum does not match its bytes")
    if reserved:
        raise RecordError("field", f"reserved bytes hold {reserved}: expected zero")
    fields = _unpack_fields(packed)
    if len(fields.get(CHUNK_SUMS, b"-")) != _SUM.size * _chunks(stored):
        raise RecordError("field", f"chunk sums are missing or do not fit {stored} stored bytes")
    if xxh3_64_intdigest(fields[CHUNK_SUMS]) != payload_sum:
        raise RecordError("field", "the payload's checksum is not that of the chunk sums")
    parent = fields.get(PARENT, b"")
    if len(parent) not in (0, 32):
        raise RecordError("field", f"a parent of {len(parent)} bytes: expected 32")
    if len(fields.get(EXPIRY, bytes(EXPIRY_BYTES))) != EXPIRY_BYTES:
        raise RecordError("field", f"an expiry of {len(fields[EXPIRY])} bytes: expected {EXPIRY_BYTES}")
    try:
        address = Address(namespace, signature, parent, group, Shard.unpack(shard))
    except LayoutError as error:
        raise RecordError("address", str(error)) from None
    return Header(
        address=address,
        codec=_unpack_codec(codec),
        stored_bytes=stored,
        decoded_bytes=decoded,
        write_id=write_id,
        payload_sum=payload_sum,
        fields=fields,
        header_bytes=FIXED_BYTES + size,
    )


def verify(
    header_buf: Any,
    payload: Payload,
    address: Address,
    *,
    decoded_bytes: int | None = None,
    codecs: Collection[str] | None = None,
) -> Header:
    """Return the header of a record after checking that it belongs to `address` and is unchanged since `seal`.

    Args:
        address: its parent is compared where both sides have one.
        decoded_bytes: the size to which the reader will decode; not checked where not given.
        codecs: the codecs that the reader has; not checked where not given.

    Raises:
        RecordError: a check failed.
    """
    header = read_header(header_buf)
    found = header.address
    if found.namespace != address.namespace:
        raise RecordError("namespace", f"namespace {found.namespace.hex()}: expected {address.namespace.hex()}")
    if found.name != address.name:
        raise RecordError("address", f"address {found.name.hex()}: expected {address.name.hex()}")
    if found.signature != address.signature:
        raise RecordError("signature", f"signature {found.signature.hex()}: expected {address.signature.hex()}")
    if found.parent and address.parent and found.parent != address.parent:
        raise RecordError("parent", f"parent {found.parent.hex()}: expected {address.parent.hex()}")
    if decoded_bytes is not None and header.decoded_bytes != decoded_bytes:
        raise RecordError("length", f"{header.decoded_bytes} decoded bytes: expected {decoded_bytes}")
    if codecs is not None and header.codec not in codecs:
        raise RecordError("codec", f"codec {header.codec!r}: this reader has {', '.join(codecs)}", foreign=True)
    if chunk_sums(payload, header.stored_bytes) != header.chunk_sums:
        raise RecordError("payload_sum", "the payload's checksum does not match its bytes")
    return header


def chunk_sums(payload: Payload, stored_bytes: int, fill: Callable[[memoryview], None] | None = None) -> bytes:
    """Return XXH3-64 of each 256 KiB of the first `stored_bytes` bytes.

    Args:
        fill: called with each part before it is summed, to write its bytes; they are then still in the processor's
            cache.

    Raises:
        RecordError: the payload has fewer bytes.
    """
    pieces = [payload] if isinstance(payload, memoryview) else payload
    pieces = [piece.cast("B") for piece in pieces]
    there = sum(map(len, pieces))
    if there < stored_bytes:
        raise RecordError("length", f"{stored_bytes} stored bytes: {there} are there")
    sums: list[int] = []
    at, state = 0, xxh3_64()
    for part in _parts(pieces, stored_bytes):
        end = at + len(part)
        whole = end % CHUNK_BYTES == 0 or end == stored_bytes
        if fill is not None:
            fill(part)
        if whole and at % CHUNK_BYTES == 0:  # most chunks: a chunk in one piece needs no state
            sums.append(xxh3_64_intdigest(part))
        else:
            state.update(part)
            if whole:
                sums.append(state.intdigest())
                state.reset()
        at = end
    return b"".join(map(_SUM.pack, sums))


def _parts(pieces: Sequence[memoryview], total: int) -> Iterator[memoryview]:
    """Yield the first `total` bytes, cut at the ends of pieces and chunks."""
    done = 0
    for piece in pieces:
        at = 0
        while at < len(piece) and done < total:
            step = min(len(piece) - at, total - done, CHUNK_BYTES - done % CHUNK_BYTES)
            yield piece[at : at + step]
            at += step
            done += step


def _pack_fields(fields: Mapping[int, bytes], area_bytes: int) -> bytes:
    """Return fields in ascending order of tag: the required ones, then as many others as fit."""
    sizes = {tag: _FIELD.size + len(body) for tag, body in fields.items()}
    kept = [tag for tag in fields if tag == CHUNK_SUMS or tag & REQUIRED_FIELD_BIT]
    area_bytes -= sum(sizes[tag] for tag in kept)
    if not all(0 < tag <= 0xFFFF for tag in fields):
        raise RecordError("field", f"tags {sorted(fields)}: expected 1 to {0xFFFF}")
    if area_bytes < 0:
        raise RecordError("short", f"a header area {-area_bytes} bytes too small for the fields that it must hold")
    for tag in sorted(fields.keys() - kept):
        if sizes[tag] <= area_bytes:
            kept.append(tag)
            area_bytes -= sizes[tag]
    return pack_tagged(fields, sorted(kept))


def _unpack_fields(packed: bytes) -> dict[int, bytes]:
    fields: dict[int, bytes] = {}
    at, last = 0, 0
    while at < len(packed):
        if at + _FIELD.size > len(packed):
            raise RecordError("field", f"{len(packed) - at} bytes behind the last field")
        tag, size = _FIELD.unpack_from(packed, at)
        at += _FIELD.size
        if size > len(packed) - at:
            raise RecordError("field", f"field {tag:#06x} of {size} bytes: {len(packed) - at} are there")
        if tag <= last:
            raise RecordError("field", f"field {tag:#06x} behind {last:#06x}: expected ascending tags, each once")
        if tag & REQUIRED_FIELD_BIT and (tag, size) != (ENCRYPTION, ENCRYPTION_BYTES):
            raise RecordError("field", f"field {tag:#06x}: this reader does not know it, and must", foreign=True)
        fields[tag] = packed[at : at + size]
        at += size
        last = tag
    return fields


def _pack_codec(codec: str) -> bytes:
    name = codec.encode(errors="replace")
    if not (_is_codec(name) and codec.isascii()):
        raise RecordError("codec", f"codec {codec!r}: expected 1 to 8 printable ASCII characters")
    return name


def _unpack_codec(padded: bytes) -> str:
    name = padded.rstrip(b"\0")
    if not _is_codec(name):
        raise RecordError("codec", f"codec {padded!r}: expected 1 to 8 printable ASCII characters", foreign=True)
    return name.decode("ascii")


def _is_codec(name: bytes) -> bool:
    return 1 <= len(name) <= 8 and all(0x20 < byte < 0x7F for byte in name)


def _header_sum(fixed: bytes, fields: bytes) -> int:
    state = xxh3_64(fixed)
    state.update(fields)
    return state.intdigest()


def _chunks(size: int) -> int:
    return -(-size // CHUNK_BYTES)


def _pad(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
