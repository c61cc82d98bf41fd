"""The contract of a copier (`kvcache/transfer/copier.py`), as a suite for authors of another one.

    class TestMine(CopierContract):
        def make(self):
            return MyCopier()

        def place(self, layout):       # where pages are not this process's memory
            return MyPages(layout)

The suite compares pages with numpy's indexing, element by element.
"""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from numpy.typing import NDArray

from kvcache.block.layout import CANONICAL_ORDERS, KVLayout
from kvcache.errors import LayoutError
from kvcache.transfer.copier import Copier
from kvcache.transfer.pages import GroupPages

PAGES = 9
ORDERS = list(permutations(CANONICAL_ORDERS["mha"]))
AXES = ("kv", "page", "token", "head", "dim")


class CpuPages:
    """Pages in this process's memory: (layer, kv, page, token, head, dim)."""

    def __init__(self, layout: KVLayout) -> None:
        g = layout.groups[0]
        self.values: NDArray[np.float32] = np.zeros(
            (g.layers, 2, PAGES, layout.block_tokens, g.kv_heads, g.head_dim), np.float32
        )
        self.described = GroupPages.from_tensors(layout, list(self.values), axes=AXES)

    def write(self, values: NDArray[np.float32]) -> None:
        self.values[...] = values

    def read(self) -> NDArray[np.float32]:
        values: NDArray[np.float32] = self.values.copy()
        return values


class CopierContract:
    """Implement `make`, and `place` where the pages are elsewhere."""

    def make(self) -> Copier:
        raise NotImplementedError("give your copier: see kvcache.testing.CopierContract")

    def place(self, layout: KVLayout) -> CpuPages:
        return CpuPages(layout)

    @pytest.fixture
    def copier(self) -> Copier:
        return self.make()

    def layout(self, order: tuple[str, ...] = ORDERS[0]) -> KVLayout:
        return KVLayout.mha(layers=3, kv_heads=2, head_dim=4, dtype="fp32", block_tokens=5, order=order)

    @pytest.mark.parametrize("order", ORDERS, ids="-".join)
    def test_elements_stand_in_the_order_of_the_layout(self, copier: Copier, order: tuple[str, ...]) -> None:
        layout = self.layout(order)
        pages, ids = self.place(layout), [7, 0, 3]
        values = np.random.default_rng(1).standard_normal(pages.read().shape, np.float32)
        pages.write(values)
        buffers = [memoryview(bytearray(layout.block_bytes())) for _ in ids]
        assert copier.gather(pages.described, ids, buffers, after=copier.mark()).wait(30)
        turned = [CANONICAL_ORDERS["mha"].index(axis) for axis in order]
        for page, buffer in zip(ids, buffers, strict=True):
            assert bytes(buffer) == values[:, :, page].transpose(turned).tobytes()
        pages.write(np.zeros_like(values))
        copy = copier.scatter(pages.described, ids, buffers, after=copier.mark())
        assert all(copy.wait_layer(layer, 30) for layer in range(3))
        assert copy.wait(30)
        assert copy.done
        expected = np.zeros_like(values)
        expected[:, :, ids] = values[:, :, ids]
        np.testing.assert_array_equal(pages.read(), expected, "other pages were touched, or these were not filled")

    def test_nothing_to_copy_is_done(self, copier: Copier) -> None:
        pages = self.place(self.layout())
        for copy in (copier.gather(pages.described, [], []), copier.scatter(pages.described, [], [])):
            assert copy.wait(30)
            assert copy.done

    @pytest.mark.parametrize("page", [-1, PAGES])
    def test_a_page_that_is_none_is_refused_and_nothing_is_touched(self, copier: Copier, page: int) -> None:
        layout = self.layout()
        pages = self.place(layout)
        buffers = [memoryview(bytearray(b"\xee" * layout.block_bytes())) for _ in range(2)]
        for call in (copier.gather, copier.scatter):
            with pytest.raises(LayoutError, match="page ids"):
                call(pages.described, [0, page], buffers)
        assert not pages.read().any()
        assert set(bytes(buffers[0])) == {0xEE}

    def test_buffers_that_do_not_fit_are_refused(self, copier: Copier) -> None:
        layout = self.layout()
        pages = self.place(layout)
        whole = memoryview(bytearray(layout.block_bytes()))
        for ids, buffers in (([0], [whole[:-4]]), ([0, 1], [whole]), ([0], [memoryview(bytearray(2 * len(whole)))])):
            with pytest.raises(LayoutError):
                copier.gather(pages.described, ids, buffers)
            with pytest.raises(LayoutError):
                copier.scatter(pages.described, ids, buffers)
        with pytest.raises(LayoutError, match="read-only"):
            copier.gather(pages.described, [0], [whole.toreadonly()])
        assert copier.scatter(pages.described, [0], [whole.toreadonly()]).wait(30)
