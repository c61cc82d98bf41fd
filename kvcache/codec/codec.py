"""The contract of a codec: payload bytes to fewer bytes and back.

`decode(encode(payload))` equals the payload where `error_bound` is 0. Else each element differs by at most
`error_bound` times the largest magnitude of its scale group (`kvcache/codec/quantised.py`). Each record holds its
codec's name, at most eight ASCII characters. Only a setting selects a lossy codec. `docs/spec/codec.md` specifies the
encoded bytes.

Thread safety: a codec has no state; any thread may call it.
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
        """Whether payloads of one size encode to different sizes."""

    def check(self, layout: KVLayout) -> None:
        """Raise ConfigError, beginning with `codec = 'name'`, where a group of this layout is unsupported."""

    def encode(self, payload: memoryview, layout: KVLayout, group: int, shard: Shard) -> memoryview | None:
        """Return the encoded bytes; None where the bound cannot be kept, and the caller stores the payload unencoded.

        The result may be `payload` itself. Otherwise the caller owns it.
        """

    def decode(self, stored: memoryview, payload: memoryview, layout: KVLayout, group: int, shard: Shard) -> None:
        """Fill `payload` from `stored`. Raises ValueError where `encode` cannot have made `stored`."""


class Raw:
    """The payload unchanged: the naive codec, and the default. `encode` makes no copy."""

    name = "raw"
    error_bound = 0.0
    varies = False

    def check(self, layout: KVLayout) -> None:
        """Accept every layout."""

    def encode(self, payload: memoryview, layout: KVLayout, group: int, shard: Shard) -> memoryview:
        return payload

    def decode(self, stored: memoryview, payload: memoryview, layout: KVLayout, group: int, shard: Shard) -> None:
        if len(stored) != len(payload):
            raise ValueError(f"{len(stored)} bytes stored: expected {len(payload)}")
        payload[:] = stored


CODECS: dict[str, Callable[[], Codec]] = {"raw": Raw, "zstd": Zstd, "fp8": Fp8, "int8": Int8}


def codec(name: str) -> Codec:
    """Return the codec of that name. Raises ConfigError for an unknown one."""
    if name not in CODECS:
        raise ConfigError(f"codec = {name!r}: expected one of {', '.join(CODECS)}")
    return CODECS[name]()


def codecs() -> dict[str, Codec]:
    """Return every usable codec by name, without those whose library is missing."""
    available: dict[str, Codec] = {}
    for name in CODECS:
        try:
            available[name] = codec(name)
        except ConfigError:
            continue
    return available
