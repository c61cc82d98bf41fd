"""`zstd`: a lossless codec. It stores each byte position of the elements as its own plane, coded by entropy.

Keys and values hardly repeat, so a search for matches finds nothing and costs most of the time. The exponent bytes take
few values and compress; the mantissa bytes are noise. The codec therefore writes one frame for each byte position, with
Zstandard parameters that almost skip the match search. On the keys and values of a model this is three times as fast as
Zstandard's level 1, and saves a little more (`benchmarks/codec.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcache.block.layout import DTYPE_BYTES, KVLayout, Shard
from kvcache.errors import ConfigError


class Zstd:
    """The codec. The constructor raises ConfigError where the library is missing."""

    name = "zstd"
    error_bound = 0.0
    varies = True

    def __init__(self) -> None:
        self._library = library()
        parameter = self._library.CompressionParameter
        self._options = {
            parameter.strategy: self._library.Strategy.fast,
            parameter.window_log: 17,
            parameter.hash_log: 6,
            parameter.min_match: 7,
        }

    def check(self, layout: KVLayout) -> None:
        """Accept every layout."""

    def encode(self, payload: memoryview, layout: KVLayout, group: int, shard: Shard) -> memoryview:
        compress: Callable[..., bytes] = self._library.compress
        words = _words(payload, layout, group)
        planes = [(words >> 8 * byte).astype(np.uint8) for byte in range(words.itemsize)]
        frames = [compress(plane.data, options=self._options) for plane in planes]
        return memoryview(_lengths(words.itemsize).pack(*map(len, frames)) + b"".join(frames))

    def decode(self, stored: memoryview, payload: memoryview, layout: KVLayout, group: int, shard: Shard) -> None:
        words = _words(payload, layout, group)
        form = _lengths(words.itemsize)
        if len(stored) < form.size:
            raise ValueError(f"{len(stored)} bytes stored: expected at least {form.size}")
        lengths = form.unpack_from(stored)
        if form.size + sum(lengths) != len(stored):
            raise ValueError(f"{len(stored)} bytes stored: expected {form.size} and frames of {lengths}")
        at = form.size
        words[:] = 0
        for byte, length in enumerate(lengths):
            plane = self._plane(stored[at : at + length], words.size)
            words |= plane.astype(words.dtype) << 8 * byte
            at += length

    def _plane(self, frame: memoryview, size: int) -> NDArray[np.uint8]:
        """Decompress a plane of exactly `size` bytes. Never allocates more, whatever length the frame declares."""
        decompressor = self._library.ZstdDecompressor()
        try:
            plane: bytes = decompressor.decompress(frame, max_length=size)
        except self._library.ZstdError as error:
            raise ValueError(f"a frame of {len(frame)} bytes: {error}") from None
        if len(plane) != size or not decompressor.eof or decompressor.unused_data:
            raise ValueError(f"a frame of {len(frame)} bytes that does not end with the {size} bytes of its plane")
        return np.frombuffer(plane, np.uint8)


def library() -> ModuleType:
    """Return `compression.zstd` of Python 3.14, or its backport. Raises ConfigError where neither is installed."""
    try:
        from compression import zstd  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        try:
            from backports import zstd
        except ImportError:
            raise ConfigError(
                "codec = 'zstd': its library is not installed; pip install 'kvcache-tiers[zstd]'"
            ) from None
    return zstd  # type: ignore[no-any-return, unused-ignore]


def _words(payload: memoryview, layout: KVLayout, group: int) -> NDArray[Any]:
    """Return the payload as elements; as bytes where its size is no multiple of an element's, as in opaque groups."""
    size = DTYPE_BYTES[layout.groups[group].dtype]
    return np.frombuffer(payload, np.dtype(f"<u{1 if len(payload) % size else size}"))


def _lengths(count: int) -> Struct:
    return Struct(f"<{count}I")
