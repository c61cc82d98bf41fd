"""The contract of a codec, for every one there is."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import kvcache
from kvcache.block.layout import KVLayout
from kvcache.codec.codec import CODECS, codec

LAYOUT = KVLayout.mha(layers=2, kv_heads=2, head_dim=8, dtype="fp32", block_tokens=4)
WHOLE = LAYOUT.groups[0].whole


def payload(seed: int) -> memoryview:
    return memoryview(bytearray(np.random.default_rng(seed).standard_normal(256).astype(np.float32).tobytes()))


@pytest.mark.parametrize("name", CODECS)
def test_what_is_decoded_is_what_was_encoded_within_the_bound(name: str) -> None:
    made = codec(name)
    for seed in range(8):
        before = payload(seed)
        kept = bytes(before)
        after = memoryview(bytearray(b"\xff" * len(before)))
        made.decode(made.encode(before, LAYOUT, 0, WHOLE), after, LAYOUT, 0, WHOLE)
        assert bytes(before) == kept, "encoding changed its input"
        if made.error_bound == 0:
            assert bytes(after) == kept
        else:
            was, now = np.frombuffer(kept, np.float32), np.frombuffer(after, np.float32)
            assert np.abs(was - now).max() <= made.error_bound * np.abs(was).max()


@pytest.mark.parametrize("name", CODECS)
def test_bytes_of_another_length_are_refused(name: str) -> None:
    made = codec(name)
    stored = made.encode(payload(0), LAYOUT, 0, WHOLE)
    into = memoryview(bytearray(1024))
    for wrong in (stored[:-1], memoryview(bytes(stored) + b"x"), stored[:0]):
        with pytest.raises(ValueError, match="bytes"):
            made.decode(wrong, into, LAYOUT, 0, WHOLE)


@pytest.mark.parametrize("name", CODECS)
def test_any_number_of_threads_may_use_one(name: str) -> None:
    made = codec(name)
    alone = [bytes(made.encode(payload(seed), LAYOUT, 0, WHOLE)) for seed in range(32)]

    def work(seed: int) -> tuple[bytes, bytes]:
        stored = made.encode(payload(seed), LAYOUT, 0, WHOLE)
        after = memoryview(bytearray(1024))
        made.decode(stored, after, LAYOUT, 0, WHOLE)
        again = made.encode(after, LAYOUT, 0, WHOLE)
        return bytes(stored), bytes(again)

    with ThreadPoolExecutor(4) as pool:
        for seed, (stored, again) in enumerate(pool.map(work, range(32))):
            assert stored == alone[seed]
            assert made.error_bound or again == stored


def test_a_name_is_short_enough_for_the_record() -> None:
    assert all(0 < len(name.encode("ascii")) <= 8 and codec(name).name == name for name in CODECS)


def test_a_codec_that_is_not_there_is_refused() -> None:
    with pytest.raises(kvcache.ConfigError, match="'kivi': no such codec; there is raw"):
        codec("kivi")
