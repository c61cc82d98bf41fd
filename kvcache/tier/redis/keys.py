"""Keys of records and owners, the identity in a record's first bytes, and the owners of namespaces.

`docs/spec/redis.md` is the specification.
"""

from __future__ import annotations

import re
from binascii import hexlify
from collections.abc import Iterator, Sequence
from struct import Struct, pack

from kvcache.block.layout import Shard
from kvcache.block.namespace import OWNER_BYTES, Owner
from kvcache.block.record import FIXED_BYTES, KEY_BYTES, MAGIC, PARENT, VERSION, Address
from kvcache.errors import ConfigError, LayoutError
from kvcache.tier.redis.cluster import Topology, ask_all
from kvcache.tier.redis.connect import RefusedError
from kvcache.tier.redis.wire import ErrorReply, RespConnection


def scan_keys(wire: RespConnection, pattern: bytes) -> Iterator[bytes]:
    """Yield the keys that match a pattern, some of them twice (SCAN).

    Raises:
        RefusedError: The server refused, and the keys so far are not all.
    """
    cursor = b"0"
    while True:
        wire.extend_deadline()
        reply = wire.ask(b"SCAN", cursor, b"MATCH", pattern, b"COUNT", b"1000")
        if not isinstance(reply, list):
            raise RefusedError(f"SCAN: {reply}")
        cursor, names = reply
        yield from names
        if cursor == b"0":
            return


# Key names
#
# PREFIX:k1r1:NAMESPACE:KEY:GROUP:SHARD                a record, or the first part of a long one
# PREFIX:k1r1:NAMESPACE:KEY:GROUP:SHARD:WRITE:NUMBER   a further part of the record with this write id
# PREFIX:k1r1:NAMESPACE:owner                          the owner of the namespace

KEY_VERSION = 1
KEY_FORMAT = f"k{KEY_VERSION}r{VERSION}"
HEAD_BYTES = FIXED_BYTES + 6 + 32
"""The fixed part of a header and its first field, which is the parent where the writer knew it."""

_START = Struct("<4sHH8s")
_SIZES = Struct("<QQQ")  # stored, decoded, write id
_PARENT = pack("<HI", PARENT, 32)  # the first bytes of a parent field
_PREFIX = re.compile(r"[A-Za-z0-9._:-]{1,64}")


class KeyNames:
    """The key names under one prefix.

    `cluster` puts the record's name in braces, so that a Redis Cluster keeps all parts of a record on one server.
    """

    def __init__(self, prefix: str, *, cluster: bool = False) -> None:
        if not _PREFIX.fullmatch(prefix):
            raise ConfigError(f"redis.prefix = {prefix!r}: expected 1 to 64 letters, digits or characters of ._:-")
        self.prefix = prefix
        self._start = f"{prefix}:{KEY_FORMAT}:{'{' if cluster else ''}"
        self._end = "}" if cluster else ""
        self.pattern = f"{self._start}*".encode()

        self.owners = f"{self._start}*:owner{self._end}".encode()

    def owner(self, namespace: bytes) -> bytes:
        """Return the key that holds the owner of a namespace."""
        return f"{self._start}{namespace[:16].hex()}:owner{self._end}".encode()

    def record(self, address: Address) -> bytes:
        return self.records([address])[0]

    def records(self, addresses: Sequence[Address]) -> list[bytes]:
        names = []
        namespace, group, shard = b"", -1, None
        start = end = b""
        for address in addresses:
            if address.namespace != namespace or address.shard is not shard or address.group != group:
                namespace, group, shard = address.namespace, address.group, address.shard
                part_of = f"{shard.first_layer}-{shard.end_layer}-{shard.first_head}-{shard.end_head}"
                start = f"{self._start}{namespace[:16].hex()}:".encode()
                end = f":{group}:{part_of}{self._end}".encode()
            names.append(start + hexlify(address.signature[:KEY_BYTES]) + end)
        return names

    def is_record(self, name: bytes) -> bool:
        """Return whether this is the key of a record, not of a further part."""
        start = self._start.encode()
        return name.startswith(start) and name.count(b":", len(start)) == 3

    def is_part(self, name: bytes) -> bool:
        """Return whether this is the key of a further part of a record."""
        start = self._start.encode()
        return name.startswith(start) and name.count(b":", len(start)) == 5

    def namespace_pattern(self, namespace: bytes) -> bytes:
        """Return the SCAN pattern of all keys of a namespace."""
        return f"{self._start}{namespace[:16].hex()}:*".encode()


def popularity_keys(prefix: str, namespace: bytes) -> list[bytes]:
    """Return the two keys of a namespace's popularity: the use counts of its chains, and the chains."""
    name = f"{prefix}:h1:{{{namespace[:16].hex()}}}".encode()
    return [name + b":heat", name + b":chains"]


def part_key(record: bytes, write_id: int, number: int) -> bytes:
    """Return the key of part `number` of a long record, from 1; part 0 is under the record's own key."""
    return b"%b:%016x:%d" % (record, write_id, number)


# The first HEAD_BYTES of a value


def looks_like_record(head: bytes) -> bool:
    """Return whether a record of any version may begin with these bytes."""
    return len(head) >= FIXED_BYTES and head.startswith(MAGIC)


def is_head_of(head: bytes, address: Address) -> bool:
    """Return whether this is the head of the address's record; parents are compared where both are known."""
    return are_heads_of([head], [address])[0]


def are_heads_of(heads: Sequence[bytes], addresses: Sequence[Address]) -> list[bool]:
    """Return `is_head_of` for each pair. Addresses in a row mostly share group and shard, so these are packed once."""
    found = []
    group, shard, start = -1, None, b""
    for head, address in zip(heads, addresses, strict=True):
        if address.shard is not shard or address.group != group:
            group, shard = address.group, address.shard
            start = _START.pack(MAGIC, VERSION, group, shard.pack())
        same = head[24:88] == address.namespace + address.signature and head[:16] == start
        if same and head[FIXED_BYTES + 6 : HEAD_BYTES] != address.parent:
            same = not address.parent or parent_of(head) == b""
        found.append(same)
    return found


def parent_of(head: bytes) -> bytes:
    return head[FIXED_BYTES + 6 : HEAD_BYTES] if head[FIXED_BYTES : FIXED_BYTES + 6] == _PARENT else b""


def address_of(head: bytes) -> Address | None:
    """Return the address in a record's head; None where it cannot be read."""
    if not looks_like_record(head):
        return None
    _, version, group, shard = _START.unpack_from(head)
    if version != VERSION:
        return None
    try:
        return Address(head[24:56], head[56:88], parent_of(head), group, Shard.unpack(shard))
    except LayoutError:
        return None


def stored_bytes_of(head: bytes) -> int:
    return int(_SIZES.unpack_from(head, 88)[0])


def write_id_of(head: bytes) -> int:
    return int(_SIZES.unpack_from(head, 88)[2])


def header_bytes_of(head: bytes) -> int:
    """Return the used length of the header that begins with these bytes."""
    return FIXED_BYTES + int.from_bytes(head[120:124], "little")


# Owners of namespaces: one key each, so that an erase by tenant or salt finds the namespaces.


def record_owner(nodes: Topology, names: KeyNames, namespace: bytes, owner: Owner) -> None:
    """Store the owner of a namespace. Raises OSError where the server does not answer, or refuses."""
    name = names.owner(namespace)
    for pool, *_ in nodes.partition([name], None):
        if isinstance(
            answers := pool.run(lambda wire: wire.ask(b"SET", name, namespace + owner.pack()), None), ErrorReply
        ):
            raise RefusedError(f"SET: {answers}")


def read_owners(nodes: Topology, names: KeyNames) -> dict[bytes, Owner] | None:
    """Return the owner of each namespace; None where a server does not answer, or refuses."""

    def every(wire: RespConnection) -> list[bytes]:
        return [wire.ask(b"GET", name) for name in list(scan_keys(wire, names.owners))]

    answers = ask_all(nodes, every)
    if answers is None:
        return None
    values = [
        value for some in answers for value in some if isinstance(value, bytes) and len(value) == 32 + OWNER_BYTES
    ]
    return {value[:32]: owner for value in values if (owner := Owner.read(value[32:])) is not None}
