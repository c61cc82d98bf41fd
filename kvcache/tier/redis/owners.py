"""Whose the namespaces in a server are: a key each, so that what is a tenant's can be found by whoever is told to."""

from __future__ import annotations

from kvcache.block.owner import OWNER_BYTES, Owner
from kvcache.tier.redis.name import Names
from kvcache.tier.redis.nodes import Nodes, ask
from kvcache.tier.redis.wire import Wire


def note(nodes: Nodes, names: Names, namespace: bytes, owner: Owner) -> None:
    """OSError where the server does not answer."""
    name = names.owner(namespace)
    for pool, *_ in nodes.divide([name], None):
        pool.run(lambda wire: wire.ask(b"SET", name, namespace + owner.pack()), None)


def find(nodes: Nodes, names: Names) -> dict[bytes, Owner] | None:
    """None where a server does not answer."""

    def every(wire: Wire) -> list[bytes]:
        found: list[bytes] = []
        cursor = b"0"
        while True:
            wire.renew()
            reply = wire.ask(b"SCAN", cursor, b"MATCH", names.owners, b"COUNT", b"1000")
            if not isinstance(reply, list):
                return found
            cursor = reply[0]
            found += [wire.ask(b"GET", name) for name in reply[1]]
            if cursor == b"0":
                return found

    told = ask(nodes, every)
    if told is None:
        return None
    values = [value for some in told for value in some if isinstance(value, bytes) and len(value) == 32 + OWNER_BYTES]
    return {value[:32]: owner for value in values if (owner := Owner.read(value[32:])) is not None}
