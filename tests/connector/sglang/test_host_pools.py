"""Pages of SGLang's pools as blocks: every layout, type and rank, byte for byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvcache.connector.sglang.host_pools import MHA_ORDERS, MLA_ORDERS, Ranks, describe_pool, is_logical
from kvcache.errors import LayoutError
from kvcache.transfer.cpu import CpuCopier, ReferenceCopier
from tests.connector.sglang.fake_host_pools import (
    LogicalPoolHost,
    MHATokenToKVPoolHost,
    MLATokenToKVPoolHost,
    StatePoolHost,
)

COPIERS = (CpuCopier(), ReferenceCopier())


def gather(described: Any, page: int, copier: Any = COPIERS[0]) -> bytes:
    taken = b""
    for there in described.pages:
        payload = bytearray(there.block_bytes)
        copier.gather(there, [page], [memoryview(payload)]).wait()
        taken += bytes(payload)
    return taken


def scatter(described: Any, page: int, payload: bytes, copier: Any = COPIERS[0]) -> None:
    at = 0
    for there in described.pages:
        copier.scatter(there, [page], [memoryview(payload)[at : at + there.block_bytes]]).wait()
        at += there.block_bytes


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("copier", COPIERS, ids=["native", "plain"])
@pytest.mark.parametrize("layout", MHA_ORDERS)
def test_an_mha_page_round_trips(layout: str, copier: Any) -> None:
    pool = MHATokenToKVPoolHost(layout)
    pool.fill(1)
    own, shared = describe_pool(pool, Ranks()), describe_pool(pool, Ranks(), canonical=True)
    for page in range(pool.page_num):
        assert gather(own, page, copier) == raw(pool.flat(page)), "its own order is that of its flat pages"
        assert gather(shared, page, copier) == raw(pool.page(page))
    kept = gather(own, 2, copier)
    before = [raw(pool.page(page)) for page in range(pool.page_num)]
    scatter(own, 5, kept, copier)
    assert [raw(pool.page(page)) for page in range(pool.page_num)] == [*before[:5], before[2]]


@pytest.mark.parametrize("layout", MLA_ORDERS)
def test_an_mla_page_round_trips(layout: str) -> None:
    pool = MLATokenToKVPoolHost(layout)
    pool.fill(2)
    own, shared = describe_pool(pool, Ranks(1, 2)), describe_pool(pool, Ranks(), canonical=True)
    assert own.shards == shared.shards, "every rank has all of a latent"
    for page in range(pool.page_num):
        assert gather(own, page) == raw(pool.flat(page))
        assert gather(shared, page) == raw(pool.page(page))


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_each_dtype_round_trips(dtype: Any) -> None:
    pool = MHATokenToKVPoolHost("page_first", dtype=dtype)
    pool.fill(3)
    assert gather(describe_pool(pool, Ranks()), 4) == raw(pool.flat(4))


def test_all_pool_layouts_share_one_payload_order() -> None:
    layouts = {name: describe_pool(MHATokenToKVPoolHost(name), Ranks(), canonical=True).layout for name in MHA_ORDERS}
    assert len(set(layouts.values())) == 1
    assert len({describe_pool(MHATokenToKVPoolHost(name), Ranks()).layout for name in MHA_ORDERS}) == 3


def test_a_rank_is_a_shard_of_one_layout() -> None:
    pool = MHATokenToKVPoolHost("page_first_direct")
    told = [describe_pool(pool, Ranks(tp, 2, pp, 2)) for tp in range(2) for pp in range(2)]
    assert len({each.layout for each in told}) == 1
    assert [(s.first_layer, s.end_layer, s.first_head, s.end_head) for each in told for s in each.shards] == [
        (0, 3, 0, 2),
        (3, 6, 0, 2),
        (0, 3, 2, 4),
        (3, 6, 2, 4),
    ]
    [group] = told[0].layout.groups
    assert (group.layers, group.kv_heads) == (6, 4)


def test_an_unknown_pool_is_described_by_its_pieces() -> None:
    pool, other = StatePoolHost(), StatePoolHost()
    pool.fill(4)
    described = describe_pool(pool, Ranks(1, 2))
    assert [group.opaque_bytes for group in described.layout.groups] == [2 * 96, 2 * 64]
    for page in range(pool.page_num):
        assert gather(described, page) == raw(pool.page(page))
        scatter(describe_pool(other, Ranks(1, 2)), page, gather(described, page))
    assert torch.equal(pool.conv, other.conv)
    assert torch.equal(pool.ssm, other.ssm)
    with pytest.raises(LayoutError, match="share_across_engines = false"):
        describe_pool(pool, Ranks(), canonical=True)


def test_a_pool_without_description_is_refused() -> None:
    class Uneven(StatePoolHost):
        def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
            addresses, sizes = super().get_page_buffer_meta(indices)
            return [address + 8 * (int(indices[0]) == 5) for address in addresses], sizes

    class Silent(StatePoolHost):
        def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
            return [], []

    for pool in (Uneven(), Silent()):
        with pytest.raises(LayoutError, match=type(pool).__name__):
            describe_pool(pool, Ranks())


def test_a_logical_pool_has_no_payload() -> None:
    assert is_logical(LogicalPoolHost())
    assert not is_logical(MHATokenToKVPoolHost("page_first"))
    assert not is_logical(StatePoolHost())


@pytest.mark.parametrize("make", [MHATokenToKVPoolHost, MLATokenToKVPoolHost])
def test_flat_pages_are_stored_unchanged(make: Any) -> None:
    pool = make("page_first")
    pool.fill(5)
    described = describe_pool(pool, Ranks())
    flat = torch.stack([pool.flat(page).view(torch.uint8) for page in (4, 1)])
    [pages] = described.flat(flat, 2)
    for i in range(2):
        payload = bytearray(pages.block_bytes)
        CpuCopier().gather(pages, [i], [memoryview(payload)]).wait()
        assert bytes(payload) == raw(flat[i])
