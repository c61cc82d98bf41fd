"""The contract of a codec: payload bytes to fewer bytes and back.

`decode(encode(payload))` is the payload, exactly where `error_bound` is 0, else with no element off by more than
`error_bound` times the largest magnitude of its scale group (`kvcache/codec/quantised.py`). The name stands in every
record it made: eight ASCII characters at most. A lossy codec is never chosen silently. What each makes of a payload is
specified byte by byte in `docs/spec/codec.md`.

A codec has no state: any thread may call it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvcache.block.layout import KVLayout, Shard
from kvcache.codec.quantised import Fp8, Int8
from kvcache.codec.zstd import Zstd
from kvcache.errors import ConfigError


class Codec(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def error_bound(self) -> float: ...
    @property
    def varies(self) -> bool:
        """Whether payloads of one size are encoded to different sizes."""

    def check(self, layout: KVLayout) -> None:
        """ConfigError, beginning with `codec = 'name'`, where it cannot serve every group of this layout."""

    def encode(self, payload: memoryview, layout: KVLayout, group: int, shard: Shard) -> memoryview | None:
        """None where it cannot keep its bound for this payload, which then stays as it is. `payload` may be returned
        itself; else the bytes are the caller's own."""

    def decode(self, stored: memoryview, payload: memoryview, layout: KVLayout, group: int, shard: Shard) -> None:
        """Fill `payload`; ValueError where `stored` is not what `encode` makes."""


class Raw:
    """The bytes as they are: the naive codec, and the default. Copies nothing on the way out."""

    name = "raw"
    error_bound = 0.0
    varies = False

    def check(self, layout: KVLayout) -> None:
        """Serves every layout."""

    def encode(self, payload: memoryview, layout: KVLayout, group: int, shard: Shard) -> memoryview:
        return payload

    def decode(self, stored: memoryview, payload: memoryview, layout: KVLayout, group: int, shard: Shard) -> None:
        if len(stored) != len(payload):
            raise ValueError(f"{len(stored)} bytes stored: expected {len(payload)}")
        payload[:] = stored


CODECS: dict[str, Callable[[], Codec]] = {"raw": Raw, "zstd": Zstd, "fp8": Fp8, "int8": Int8}


def codec(name: str) -> Codec:
    """The codec of that name; ConfigError for one that is not there."""
    if name not in CODECS:
        raise ConfigError(f"codec = {name!r}: no such codec; there is {', '.join(CODECS)}")
    return CODECS[name]()


def codecs() -> dict[str, Codec]:
    """Every codec that can be used here, by name: those whose library is missing are left out."""
    available: dict[str, Codec] = {}
    for name in CODECS:
        try:
            available[name] = codec(name)
        except ConfigError:
            continue
    return available
