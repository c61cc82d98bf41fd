"""Keys and records once more, written from docs/spec/key.md and docs/spec/record.md alone.

Nothing of the package is imported here. Slow and plain on purpose: this is what the package is compared with, and what
made the vectors.
"""

from __future__ import annotations

import hashlib
import hmac
import struct

import xxhash

CHUNK = 262_144


def u16(n):
    return n.to_bytes(2, "little")


def u32(n):
    return n.to_bytes(4, "little")


def u64(n):
    return n.to_bytes(8, "little")


def sha(data):
    return hashlib.sha256(data).digest()


# key.md


def encode(value):
    kind = type(value)
    if value is None:
        return b"N"
    if kind is bool:
        return b"T" if value else b"F"
    if kind is int:
        digits = str(value).encode("ascii")
        return b"i" + u64(len(digits)) + digits
    if kind is float:
        return b"f" + struct.pack("<d", value)
    if kind is str:
        utf8 = value.encode("utf-8")
        return b"s" + u64(len(utf8)) + utf8
    if kind is bytes:
        return b"b" + u64(len(value)) + value
    if kind in {list, tuple}:
        return b"l" + u64(len(value)) + b"".join(encode(item) for item in value)
    if kind is dict:
        names = sorted(value, key=lambda name: name.encode("utf-8"))
        return b"m" + u64(len(names)) + b"".join(encode(name) + encode(value[name]) for name in names)
    raise TypeError(kind)


def namespace_id(fields):
    return sha(b"kvcache namespace 1\n" + encode(fields))


def extras_bytes(pairs):
    return b"".join(bytes([len(tag)]) + tag + u32(len(data)) + data for tag, data in pairs)


def chain(namespace, block_tokens, ids, extras=()):
    """`extras`: one sequence of pairs a block, as many as there are."""
    signatures, parent = [], namespace
    for block in range(len(ids) // block_tokens):
        of_block = ids[block * block_tokens : (block + 1) * block_tokens]
        behind = extras_bytes(extras[block]) if block < len(extras) else b""
        parent = sha(parent + b"".join(map(u32, of_block)) + behind)
        signatures.append(parent)
    return signatures


def bind(namespace, digests):
    return [sha(namespace + digest) for digest in digests]


def sglang_pages(page_tokens, ids):
    digests, before = [], b""
    for page in range(len(ids) // page_tokens):
        before = sha(before + b"".join(map(u32, ids[page * page_tokens : (page + 1) * page_tokens])))
        digests.append(before)
    return digests


# record.md


def up(size, to):
    return (size + to - 1) // to * to


def header_area(payload_bytes):
    return up(512 + 8 * (up(payload_bytes, CHUNK) // CHUNK), 4096)


def xxh3(data):
    return xxhash.xxh3_64(data, seed=0).intdigest()


def sums(payload):
    return b"".join(u64(xxh3(payload[at : at + CHUNK])) for at in range(0, len(payload), CHUNK))


def field(tag, value):
    return u16(tag) + u32(len(value)) + value


def header(
    payload,
    *,
    namespace,
    signature,
    group,
    shard,
    codec,
    decoded,
    write_id,
    fields,
    version=1,
    magic=b"KVCR",
    reserved=0,
    stored=None,
    sum_of_sums=None,
):
    """`fields`: (tag, value) pairs as they are to stand; field 2, where it is missing, goes to its place."""
    if all(tag != 2 for tag, _ in fields):
        fields = sorted([*fields, (2, sums(payload))])
    tagged = b"".join(field(tag, value) for tag, value in fields)
    of_payload = next((value for tag, value in fields if tag == 2), b"")
    fixed = magic + u16(version) + u16(group) + b"".join(map(u16, shard)) + codec.ljust(8, b"\0")
    fixed += namespace + signature + u64(len(payload) if stored is None else stored) + u64(decoded) + u64(write_id)
    fixed += u64(xxh3(of_payload) if sum_of_sums is None else sum_of_sums) + u32(len(tagged)) + u32(reserved)
    assert len(fixed) == 128
    return fixed + u64(xxh3(fixed + tagged)) + tagged


def keyed_digest(key, head, payload, fields):
    """`fields`: as for `header`."""
    known = dict(fields)
    whole = b"".join(field(tag, known[tag]) for tag in (7, 0x8008) if tag in known)
    return hmac.new(key, head[4:112] + known.get(1, b"") + whole + payload, "sha256").digest()


def padded(head, payload, decoded):
    return head.ljust(header_area(decoded), b"\0") + payload.ljust(up(len(payload), 4096), b"\0")


# docs/spec/redis.md


def redis_values(prefix, payload, *, namespace, signature, group, shard, write_id, part_bytes):
    """Key to (whether the header stands there, first byte of the payload, end)."""
    layers, heads = f"{shard[0]}-{shard[1]}", f"{shard[2]}-{shard[3]}"
    name = f"{prefix}:k1r1:{namespace.hex()[:32]}:{signature.hex()[:32]}:{group}:{layers}-{heads}"
    values = {name: (True, 0, min(part_bytes, len(payload)))}
    for number in range(1, -(-len(payload) // part_bytes)):
        start = number * part_bytes
        values[f"{name}:{write_id:016x}:{number}"] = (False, start, min(start + part_bytes, len(payload)))
    return values
