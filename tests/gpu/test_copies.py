"""The CUDA copier on a GPU: the same checks as on the processor, and the order of streams that only a GPU has."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.block.layout import KVLayout
from kvcache.codec.codec import codec
from kvcache.codec.quantised import narrow
from kvcache.transfer.cpu import CpuCopier
from kvcache.transfer.cuda.copier import CopyPath, CudaCopier
from kvcache.transfer.cuda.quantise import Format, QuantisedPages
from tests.gpu.gpu_pages import GpuPages, StreamGate, cupy
from tests.transfer.test_copier import FUSED, HND, NHD, WHOLE_PAGE, Engine, buffers_for, engine, engines

pytestmark = pytest.mark.gpu

WAYS: list[CopyPath | None] = ["direct", "staged", "mapped", None]
ways = pytest.mark.parametrize("way", WAYS, ids=lambda way: way or "chosen")


@pytest.fixture(scope="module")
def made() -> Iterator[CudaCopier]:
    """One for all: making it measures."""
    copier = CudaCopier(0)
    yield copier
    copier.close()


@pytest.fixture
def copier(made: CudaCopier, way: CopyPath | None) -> CudaCopier:
    made.way = way
    return made


def fresh() -> int:
    """A seed of its own for each run; pytest shows it where a test fails."""
    seed = secrets.randbelow(1 << 32)
    print(f"seed {seed}")
    return seed


def check(copier: CudaCopier, e: Engine, ids: list[int], shift: int, *, pinned: bool = True) -> None:
    """A gather into poisoned buffers, then a scatter of random bytes, beside what numpy makes of them."""
    board = GpuPages.of(e)
    whole, buffers = buffers_for([e.pages.block_bytes] * len(ids), shift)
    expected_whole, expected = buffers_for([e.pages.block_bytes] * len(ids), shift)
    for page, buffer in zip(ids, expected, strict=True):
        buffer[:] = e.payload(page)
    if pinned:
        copier.pinned.add(memoryview(whole))
    copy = copier.gather(board.pages, ids, buffers)
    assert copy.wait(60)
    assert copy.done
    np.testing.assert_array_equal(whole, expected_whole)
    np.testing.assert_array_equal(board.now(), e.memory)

    ids = list(dict.fromkeys(ids))
    whole[:] = np.random.default_rng(len(ids)).integers(0, 256, len(whole), dtype=np.uint8)
    for page, buffer in zip(ids, buffers, strict=False):
        e.put(page, bytes(buffer))
    source = whole.copy()
    assert copier.scatter(board.pages, ids, buffers[: len(ids)]).wait(60)
    if pinned:
        copier.pinned.remove(memoryview(whole))
    np.testing.assert_array_equal(board.now(), e.memory)  # the gaps and the other pages too
    np.testing.assert_array_equal(whole, source)


@ways
@given(data=st.data(), e=engines(), shift=st.integers(0, 7))
def test_arbitrary_pages_copy_exactly(
    made: CudaCopier, way: CopyPath | None, data: st.DataObject, e: Engine, shift: int
) -> None:
    made.way = way
    ids = data.draw(st.lists(st.integers(0, e.pages.pages - 1), min_size=1, max_size=8))
    check(made, e, ids, shift, pinned=data.draw(st.booleans()))


@ways
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("axes", [NHD, HND, FUSED, WHOLE_PAGE], ids=["nhd", "hnd", "fused", "whole_page"])
@pytest.mark.parametrize("apart", [(), ("layer", "kv")], ids=["one", "all_apart"])
def test_large_copies_are_exact(copier: CudaCopier, dtype: str, axes: tuple[str, ...], apart: tuple[str, ...]) -> None:
    layout = KVLayout.mha(layers=70, kv_heads=2, head_dim=64, dtype=dtype)
    e = engine(layout, 0, layout.whole[0], 16, axes=axes, apart=apart, seed=fresh())
    check(copier, e, list(np.random.default_rng(1).permutation(16))[:13], 0)


@ways
def test_the_same_bytes_as_the_cpu(copier: CudaCopier) -> None:
    """Blocks of 2 MiB, as large models have them, by the compiled copier of the processor and by this one."""
    layout = KVLayout.mha(layers=32, kv_heads=8, head_dim=128)
    e = engine(layout, 0, layout.whole[0], 20, axes=HND, apart=("layer",), seed=fresh())
    board, ids = GpuPages.of(e), [3, 17, 0, 11]
    ours, theirs = (np.full(len(ids) * e.pages.block_bytes, 0xA5, np.uint8) for _ in range(2))
    views = [[memoryview(a)[i * len(a) // 4 : (i + 1) * len(a) // 4] for i in range(4)] for a in (ours, theirs)]
    copier.pinned.add(memoryview(ours))
    assert copier.gather(board.pages, ids, views[0]).wait(60)
    copier.pinned.remove(memoryview(ours))
    CpuCopier().gather(e.pages, ids, views[1])
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("way", ["mapped", "staged"])
@pytest.mark.parametrize("form", ["fp8", "int8"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("head_dim", [128, 20, 3])
def test_quantised_bytes_equal_the_codecs(copier: CudaCopier, form: Format, dtype: str, head_dim: int) -> None:
    """The codec's bytes, bit for bit, out and back; of numbers over the whole range that the bound covers."""
    layout = KVLayout.mha(layers=33, kv_heads=3, head_dim=head_dim, dtype=dtype, block_tokens=40)
    e = engine(layout, 0, layout.whole[0], 5, axes=NHD)
    rng = np.random.default_rng(fresh())
    count = len(e.memory) // (4 if dtype == "fp32" else 2)
    most = 10 if dtype == "fp16" else 90
    values = rng.standard_normal(count) * np.exp2(rng.integers(-most, most, -(-count // 64)).repeat(64)[:count])
    words = narrow(values.astype(np.float32), dtype).view(np.uint8)
    e.memory[: len(words)] = words
    board, ids = GpuPages.of(e), [4, 0, 3]
    quantised, twin = QuantisedPages(form, board.pages), codec(form)
    whole, buffers = buffers_for([quantised.payload_bytes] * 3, 16)
    copier.pinned.add(memoryview(whole))
    assert copier.gather(board.pages, ids, buffers, quantised=form).wait(60)
    for page, buffer in zip(ids, buffers, strict=True):
        theirs = twin.encode(memoryview(e.payload(page)), layout, 0, layout.whole[0])
        assert quantised.sound(buffer) == (theirs is not None)
        assert theirs is None or bytes(buffer) == bytes(theirs)
    assert all(quantised.sound(buffer) for buffer in buffers)
    assert copier.scatter(board.pages, [1, 2, 0], buffers, quantised=form).wait(60)
    copier.pinned.remove(memoryview(whole))
    for page, buffer in zip([1, 2, 0], buffers, strict=True):
        decoded = memoryview(bytearray(e.pages.block_bytes))
        twin.decode(buffer, decoded, layout, 0, layout.whole[0])
        e.put(page, bytes(decoded))
    np.testing.assert_array_equal(board.now(), e.memory)


@given(data=st.data(), e=engines())
def test_pages_copy_within_the_pool(made: CudaCopier, data: st.DataObject, e: Engine) -> None:
    board = GpuPages.of(e)
    ids = data.draw(st.permutations(range(e.pages.pages)))
    half = len(ids) // 2
    for source, target in zip(ids[:half], ids[half:], strict=False):
        e.put(target, e.payload(source))
    assert made.copy_pages(board.pages, ids[:half], ids[half : 2 * half]).wait(60)
    np.testing.assert_array_equal(board.now(), e.memory)


@ways
class TestOrder:
    """With the engine's stream held by a gate: what must wait waits, what must not does not."""

    @pytest.fixture
    def held(self, copier: CudaCopier) -> Iterator[tuple[Any, Any, Any, list[memoryview]]]:
        layout = KVLayout.mha(layers=8, kv_heads=8, head_dim=128)
        board = GpuPages.of(engine(layout, 0, layout.whole[0], 16, axes=NHD))
        whole, buffers = buffers_for([board.pages.block_bytes] * 8, 16)
        copier.pinned.add(memoryview(whole))
        gate, opened, compute = StreamGate(), StreamGate(), cupy.cuda.Stream(non_blocking=True)
        # What is compiled, loaded or allocated for the first time may wait for all that runs: not behind the gate then.
        assert copier.gather(board.pages, range(8), buffers).wait(60)
        assert copier.scatter(board.pages, range(8), buffers).wait(60)
        with compute:
            board.memory ^= np.uint8(0)
            copies = [board.memory.copy() for _ in range(8)]
        opened.open()
        opened.close_on(compute)
        compute.synchronize()
        del copies
        whole[:] = 0xA5
        yield board, gate, compute, buffers
        gate.open()
        compute.synchronize()
        copier.pinned.remove(memoryview(whole))

    def test_a_store_waits_for_the_engines_compute_stream(self, copier: CudaCopier, held: Any) -> None:
        board, gate, compute, buffers = held
        gate.close_on(compute)
        with compute:
            board.memory ^= np.uint8(0xFF)
        copy = copier.gather(board.pages, range(8), buffers, after=copier.mark(compute.ptr))
        assert not copy.done
        assert not copy.wait(0.01)
        gate.open()
        assert copy.wait(60)
        board.e.memory ^= np.uint8(0xFF)
        assert [bytes(b) for b in buffers] == [board.e.payload(page) for page in range(8)]

    def test_a_store_does_not_wait_for_later_work(self, copier: CudaCopier, held: Any) -> None:
        board, gate, compute, buffers = held
        after = copier.mark(compute.ptr)
        gate.close_on(compute)
        assert copier.gather(board.pages, range(8), buffers, after=after).wait(5)
        assert [bytes(b) for b in buffers] == [board.e.payload(page) for page in range(8)]

    def test_wait_layer_returns_after_the_layers_copy(self, copier: CudaCopier, held: Any) -> None:
        board, gate, compute, buffers = held
        for i, buffer in enumerate(buffers):
            buffer[:] = np.random.default_rng(i).bytes(len(buffer))
        engine_stream = cupy.cuda.Stream(non_blocking=True)
        gate.close_on(engine_stream)  # the copy cannot begin before
        copy = copier.scatter(board.pages, range(8), buffers, after=copier.mark(engine_stream.ptr))
        assert not copy.done
        seen = []
        for layer in range(8):
            copy.block_stream(compute.ptr, layer)
            with compute:
                seen.append(board.memory.copy())
        gate.open()
        compute.synchronize()
        for page, buffer in enumerate(buffers):
            board.e.put(page, bytes(buffer))
        mine = self.places(board)
        for layer, memory in enumerate(seen):
            found = cupy.asnumpy(memory)
            np.testing.assert_array_equal(found[mine[layer]], board.e.memory[mine[layer]])
        assert copy.wait_layer(3, 60)
        assert copy.wait(60)

    @staticmethod
    def places(board: Any) -> list[np.ndarray[Any, Any]]:
        """Of each layer, which bytes of the memory belong to it."""
        kept = board.e.memory.copy()
        found = []
        for views in board.e.views:
            board.e.memory[:] = 0
            for view in views:
                view[...] = np.iinfo(view.dtype).max
            found.append(board.e.memory == 0xFF)
        board.e.memory[:] = kept
        return found


def test_pages_of_torch_tensors_copy_exactly(made: CudaCopier) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch is built without CUDA here")
    from kvcache.transfer.pages import GroupPages

    layout = KVLayout.mha(layers=2, kv_heads=4, head_dim=64)
    layers = [torch.randn(2, 9, 16, 4, 64, dtype=torch.bfloat16, device="cuda:0") for _ in range(2)]
    pages = GroupPages.from_tensors(layout, layers, axes=("kv", "page", "token", "head", "dim"))
    whole, buffers = buffers_for([pages.block_bytes] * 3, 0)
    made.pinned.add(memoryview(whole))
    stream = torch.cuda.current_stream().cuda_stream
    assert made.gather(pages, [8, 1, 5], buffers, after=made.mark(stream)).wait(60)
    for page, buffer in zip([8, 1, 5], buffers, strict=True):
        expected = torch.stack([layer[:, page] for layer in layers]).view(torch.uint8).cpu().numpy()
        assert bytes(buffer) == expected.tobytes()
    assert made.scatter(pages, [0, 2, 3], buffers, after=made.mark(stream)).wait(60)
    made.pinned.remove(memoryview(whole))
    for to, page in zip([0, 2, 3], [8, 1, 5], strict=True):
        assert all(torch.equal(layer[:, to], layer[:, page]) for layer in layers)


def test_unpinnable_memory_is_reported_by_cuda(made: CudaCopier) -> None:
    from kvcache.errors import StoreError

    memory = memoryview(bytearray(1 << 20))
    made.pinned.add(memory)
    with pytest.raises(StoreError, match=r"1 MiB of host memory cannot be pinned for cuda:0: .*AlreadyRegistered"):
        made.pinned.add(memory)
    made.pinned.remove(memory)
