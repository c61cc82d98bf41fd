"""The digest chain of the compiled core against hashlib, block by block."""

from __future__ import annotations

from array import array
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache import native
from kvcache.block.chain import bind_signatures_reference

pytestmark = pytest.mark.skipif(not native.built, reason="the compiled core was not built")

PARENT = bytes(range(32))


def chain(parent: bytes, tokens: Any, block_tokens: int, extras: list[bytes] | None = None) -> bytes:
    signatures = []
    for i in range(len(tokens) // block_tokens):
        block = np.asarray(tokens[i * block_tokens : (i + 1) * block_tokens], "<u4").tobytes()
        parent = sha256(parent + block + (extras[i] if extras else b"")).digest()
        signatures.append(parent)
    return b"".join(signatures)


@pytest.mark.parametrize("plain", [False, True], ids=["fastest", "plain"])
class TestChain:
    @given(
        parent=st.binary(min_size=32, max_size=32),
        tokens=st.lists(st.integers(0, 2**32 - 1), max_size=90),
        block_tokens=st.integers(1, 40),
        data=st.data(),
    )
    def test_is_hashlib_s(
        self, plain: bool, parent: bytes, tokens: list[int], block_tokens: int, data: st.DataObject
    ) -> None:
        count = len(tokens) // block_tokens
        extras = data.draw(st.none() | st.lists(st.binary(max_size=150), min_size=count, max_size=count))
        given_tokens = np.array(tokens, np.uint32)
        signatures = native.core.digest_chain(parent, given_tokens, block_tokens, extras, plain=plain)
        assert signatures == chain(parent, given_tokens, block_tokens, extras)

    @pytest.mark.parametrize("extra", range(65))
    def test_every_length_of_padding(self, plain: bool, extra: int) -> None:
        """With extras, then without, then with: what stood in the message before must not show."""
        tokens = np.arange(48, dtype=np.uint32)
        extras = [b"\xff" * extra, b"", b"\xee" * (64 - extra)]
        assert native.core.digest_chain(PARENT, tokens, 16, extras, plain=plain) == chain(PARENT, tokens, 16, extras)

    @given(space=st.binary(min_size=32, max_size=32), signatures=st.lists(st.binary(min_size=32, max_size=32)))
    def test_signatures_are_bound_one_by_one(self, plain: bool, space: bytes, signatures: list[bytes]) -> None:
        packed = b"".join(signatures)
        bound = native.core.bind_signatures(space, packed, plain=plain)
        assert (
            bound
            == bind_signatures_reference(space, packed)
            == b"".join(sha256(space + s).digest() for s in signatures)
        )

    def test_threads_do_not_meet(self, plain: bool) -> None:
        prompts = [np.arange(i, i + 4096, dtype=np.uint32) for i in range(8)]
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda t: native.core.digest_chain(PARENT, t, 16, plain=plain), prompts))
        assert found == [chain(PARENT, t, 16) for t in prompts]


@pytest.mark.parametrize(
    "tokens",
    [
        np.arange(32, dtype=np.uint32),
        np.arange(32, dtype="<u4"),
        np.arange(32, dtype=np.uint32).reshape(4, 8),
        array("I", range(32)),
        memoryview(array("I", range(32))),
    ],
    ids=["numpy", "little_endian", "two_dimensions", "array", "memoryview"],
)
def test_buffers_of_uint32(tokens: Any) -> None:
    assert native.core.digest_chain(PARENT, tokens, 16) == chain(PARENT, np.arange(32), 16)


def test_no_full_block() -> None:
    assert native.core.digest_chain(PARENT, np.arange(15, dtype=np.uint32), 16) == b""


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ((b"short", np.zeros(16, np.uint32), 16), ValueError, "a parent of 5 bytes: expected 32"),
        ((PARENT, np.zeros(16, np.uint32), 0), ValueError, "block_tokens = 0"),
        ((PARENT, np.zeros(16, np.int32), 16), TypeError, "format 'i': expected unsigned 32-bit"),
        ((PARENT, np.zeros(16, np.float32), 16), TypeError, "format 'f'"),
        ((PARENT, np.zeros(16, np.uint64), 16), TypeError, "expected unsigned 32-bit"),
        ((PARENT, np.zeros(16, ">u4"), 16), TypeError, "format '>I'"),
        ((PARENT, bytes(64), 16), TypeError, "format 'B'"),
        ((PARENT, [1, 2, 3], 16), TypeError, "bytes-like"),
        ((PARENT, np.zeros(32, np.uint32)[::2], 16), ValueError, "contiguous"),
        ((PARENT, np.zeros(32, np.uint32), 16, [b""]), ValueError, "1 extras: expected one for each of the 2 full"),
    ],
)
def test_what_is_refused(arguments: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        native.core.digest_chain(*arguments)


@pytest.mark.parametrize("values", [[1, 2, 3], (7, 0, 2**32 - 1), [], [2**30 - 1, 2**30, 2**31]])
def test_token_ids_of_lists(values: Any) -> None:
    assert native.core.token_ids(values) == np.array(values, np.uint32).tobytes()


@pytest.mark.parametrize("values", [[-1], [2**32], [2**64], [True], [1.0], [np.int64(1)], [None], range(3), "12", {1}])
def test_token_ids_of_anything_else(values: Any) -> None:
    assert native.core.token_ids(values) is None


def test_populate() -> None:
    import mmap

    memory = mmap.mmap(-1, 40 << 20)
    memory[5] = 7
    native.core.populate(memory)
    assert memory[5] == 7
    assert memory[:5] == bytes(5)
    with pytest.raises(BufferError):
        native.core.populate(bytes(10))
