"""The contract of a codec (`kvcache/codec/codec.py`), as a suite for authors of another one.

class TestMine(CodecContract):
    def make(self):
        return MyCodec()
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kvcache.block.layout import KVLayout
from kvcache.codec.codec import Codec

LAYOUT = KVLayout.mha(layers=2, kv_heads=2, head_dim=8, dtype="fp32", block_tokens=4)
WHOLE = LAYOUT.groups[0].whole
SIZE = LAYOUT.block_bytes()


def payload(seed: int) -> memoryview:
    values = np.random.default_rng(seed).standard_normal(SIZE // 4).astype(np.float32)
    return memoryview(bytearray(values.tobytes()))


def encoded(codec: Codec, whole: memoryview) -> memoryview:
    stored = codec.encode(whole, LAYOUT, 0, WHOLE)
    assert stored is not None, "plain numbers have to be encoded"
    return stored


class CodecContract:
    """Implement `make`."""

    def make(self) -> Codec:
        raise NotImplementedError("give your codec: see kvcache.testing.CodecContract")

    @pytest.fixture
    def codec(self) -> Codec:
        return self.make()

    def test_its_name_fits_into_a_record(self, codec: Codec) -> None:
        assert 0 < len(codec.name.encode("ascii")) <= 8
        codec.check(LAYOUT)

    def test_what_is_decoded_is_what_was_encoded_within_the_bound(self, codec: Codec) -> None:
        for seed in range(8):
            before = payload(seed)
            kept = bytes(before)
            after = memoryview(bytearray(b"\xff" * len(before)))
            codec.decode(encoded(codec, before), after, LAYOUT, 0, WHOLE)
            assert bytes(before) == kept, "encoding changed its input"
            if codec.error_bound == 0:
                assert bytes(after) == kept
            else:
                was, now = np.frombuffer(kept, np.float32), np.frombuffer(after, np.float32)
                assert np.abs(was - now).max() <= codec.error_bound * np.abs(was).max()

    def test_payloads_of_one_size_are_of_one_size_unless_it_says_otherwise(self, codec: Codec) -> None:
        sizes = {len(encoded(codec, payload(seed))) for seed in range(8)}
        assert codec.varies or len(sizes) == 1

    def test_bytes_of_another_length_are_refused(self, codec: Codec) -> None:
        stored = encoded(codec, payload(0))
        into = memoryview(bytearray(SIZE))
        for wrong in (stored[:-1], memoryview(bytes(stored) + b"x"), stored[:0]):
            with pytest.raises(ValueError, match="bytes"):
                codec.decode(wrong, into, LAYOUT, 0, WHOLE)

    def test_any_number_of_threads_may_use_one(self, codec: Codec) -> None:
        alone = [bytes(encoded(codec, payload(seed))) for seed in range(32)]

        def work(seed: int) -> tuple[bytes, bytes]:
            stored = encoded(codec, payload(seed))
            after = memoryview(bytearray(SIZE))
            codec.decode(stored, after, LAYOUT, 0, WHOLE)
            return bytes(stored), bytes(encoded(codec, after))

        with ThreadPoolExecutor(4) as pool:
            for seed, (stored, again) in enumerate(pool.map(work, range(32))):
                assert stored == alone[seed]
                assert codec.error_bound or again == stored
