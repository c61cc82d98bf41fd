"""The keys that a server has."""

from __future__ import annotations

from collections.abc import Iterator

from kvcache.tier.redis.endpoint import RefusedError
from kvcache.tier.redis.wire import Wire


def scanned(wire: Wire, pattern: bytes) -> Iterator[bytes]:
    """Those that match; SCAN may tell of one twice. RefusedError where the server refuses: what came is not all."""
    cursor = b"0"
    while True:
        wire.renew()
        reply = wire.ask(b"SCAN", cursor, b"MATCH", pattern, b"COUNT", b"1000")
        if not isinstance(reply, list):
            raise RefusedError(f"SCAN: {reply}")
        cursor, names = reply
        yield from names
        if cursor == b"0":
            return
