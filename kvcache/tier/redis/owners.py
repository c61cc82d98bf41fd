"""Whose the namespaces in a server are: a key each, so that what is a tenant's can be found by whoever is told to."""

from __future__ import annotations

from kvcache.block.namespace import OWNER_BYTES, Owner
from kvcache.tier.redis.endpoint import RefusedError
from kvcache.tier.redis.keys import scanned
from kvcache.tier.redis.name import Names
from kvcache.tier.redis.nodes import Nodes, ask
from kvcache.tier.redis.wire import Wire, Wrong


def note(nodes: Nodes, names: Names, namespace: bytes, owner: Owner) -> None:
    """OSError where the server does not answer, or refuses."""
    name = names.owner(namespace)
    for pool, *_ in nodes.divide([name], None):
        if isinstance(told := pool.run(lambda wire: wire.ask(b"SET", name, namespace + owner.pack()), None), Wrong):
            raise RefusedError(f"SET: {told}")


def find(nodes: Nodes, names: Names) -> dict[bytes, Owner] | None:
    """None where a server does not answer, or refuses."""

    def every(wire: Wire) -> list[bytes]:
        return [wire.ask(b"GET", name) for name in list(scanned(wire, names.owners))]

    told = ask(nodes, every)
    if told is None:
        return None
    values = [value for some in told for value in some if isinstance(value, bytes) and len(value) == 32 + OWNER_BYTES]
    return {value[:32]: owner for value in values if (owner := Owner.read(value[32:])) is not None}
