"""The contract of a codec: payload bytes to fewer bytes and back.

`decode(encode(payload))` is the payload, exactly where `error_bound` is 0, else with no element off by more than
`error_bound` times the largest magnitude of its scale group. The name stands in every record it made: eight ASCII
characters at most. A lossy codec is never chosen silently.
"""

from __future__ import annotations

from typing import Protocol

from kvcache.block.layout import KVLayout, Shard
from kvcache.errors import ConfigError


class Codec(Protocol):
    name: str
    error_bound: float

    def encode(self, payload: memoryview, layout: KVLayout, group: int, shard: Shard) -> memoryview: ...

    def decode(self, stored: memoryview, payload: memoryview, layout: KVLayout, group: int, shard: Shard) -> None:
        """Fill `payload`; ValueError where `stored` is not what `encode` makes."""


class Raw:
    """The bytes as they are: the naive codec, and the default. Copies nothing on the way out."""

    name = "raw"
    error_bound = 0.0

    def encode(self, payload: memoryview, layout: KVLayout, group: int, shard: Shard) -> memoryview:
        return payload

    def decode(self, stored: memoryview, payload: memoryview, layout: KVLayout, group: int, shard: Shard) -> None:
        if len(stored) != len(payload):
            raise ValueError(f"{len(stored)} bytes stored: expected {len(payload)}")
        payload[:] = stored


CODECS: dict[str, type[Codec]] = {"raw": Raw}


def codec(name: str) -> Codec:
    """The codec of that name; ConfigError for one that is not there."""
    if name not in CODECS:
        raise ConfigError(f"codec = {name!r}: no such codec; there is {', '.join(CODECS)}")
    return CODECS[name]()
