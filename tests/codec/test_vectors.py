"""The vectors of `docs/spec/codec.md`, and a second decoder written from that page alone, an element at a time."""

from __future__ import annotations

import re
import struct
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from kvcache.block.layout import KVLayout
from kvcache.codec.codec import codec
from tests.codec.payloads import payload

PAGE = Path(__file__).parents[2] / "docs" / "spec" / "codec.md"
LAYOUT = KVLayout.mha(layers=1, kv_heads=1, head_dim=4, block_tokens=2)
WHOLE = LAYOUT.groups[0].whole


def vector(name: str) -> bytes:
    found = re.search(rf"```hex {name}\n([0-9a-f\n]+)```", PAGE.read_text(encoding="utf-8"))
    assert found is not None, f"no vector {name} on the page"
    return bytes.fromhex(found[1])


def decoded(name: str, stored: bytes) -> bytes:
    into = memoryview(bytearray(LAYOUT.block_bytes()))
    codec(name).decode(memoryview(stored), into, LAYOUT, 0, WHOLE)
    return bytes(into)


def test_the_payload_equals_its_description() -> None:
    values = np.zeros(LAYOUT.shape())
    values[0, 0, :, 0] = [[1, -2, 0.5, 0], [3, -0.0078125, 0.0001, -0.0]]
    assert bytes(payload(values, "bf16")) == vector("payload")


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_encoding_and_decoding_equal_the_vectors(name: str) -> None:
    made = codec(name).encode(memoryview(vector("payload")), LAYOUT, 0, WHOLE)
    assert made is not None
    assert bytes(made) == vector(name)
    assert decoded(name, vector(name)) == vector(f"payload-of-{name}")


def test_a_reader_makes_the_payload_of_the_frames() -> None:
    assert decoded("zstd", vector("zstd")) == vector("payload")


def number(name: str, code: int) -> Fraction:
    if name == "int8":
        return Fraction(code - 256 if code > 127 else code)
    exponent, mantissa = code >> 3 & 15, code & 7
    size = Fraction(mantissa, 512) if exponent == 0 else Fraction(8 + mantissa, 8) * Fraction(2) ** (exponent - 7)
    return -size if code >> 7 else size


def nearest_bf16(number: Fraction, sign: int) -> bytes:
    """By trying all of them: bf16 is the upper half of binary32."""
    if number == 0:
        return struct.pack("<H", sign << 15)
    words = [word | sign << 15 for word in range(0x7F80)]
    values = [(abs(Fraction(struct.unpack("<f", struct.pack("<I", w << 16))[0]) - number), w & 1, w) for w in words]
    return struct.pack("<H", min(values)[2])


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_a_decoder_written_from_the_page_agrees(name: str) -> None:
    stored = vector(name)
    out = b""
    for i, code in enumerate(stored[8:]):
        (scale,) = struct.unpack_from("<f", stored, 4 * (i // 8))  # K, then V; 8 elements each
        product = Fraction(scale) * number(name, code)
        (rounded,) = struct.unpack("<f", struct.pack("<f", float(product)))
        out += nearest_bf16(Fraction(rounded), code >> 7 if rounded else (code >> 7 if name == "fp8" else 0))
    assert out == vector(f"payload-of-{name}")
