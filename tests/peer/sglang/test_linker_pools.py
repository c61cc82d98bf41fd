"""The linker on pools that SGLang describes itself: every byte of every one of them comes back, or nothing is promised.

Kernels that fill them need a GPU; here they hold random bytes.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcache.errors import ConfigError
from tests.peer.sglang.cache_stack import make_linker, params_of
from tests.peer.sglang.device_pools import make

KEYS = [hashlib.sha256(bytes([number])).hexdigest() for number in range(12)]

pytestmark = pytest.mark.usefixtures("sglang_in_process")


def fill(buffers: list[torch.Tensor]) -> None:
    made = torch.Generator().manual_seed(5)
    for buffer in buffers:
        buffer.view(torch.uint8).copy_(
            torch.randint(0, 255, buffer.view(torch.uint8).shape, generator=made, dtype=torch.uint8)
        )


def places(*pages: int, size: int) -> torch.Tensor:
    return torch.cat([torch.arange(page * size, (page + 1) * size) for page in pages])


def transfer(name: str, keys: list[str], at: torch.Tensor | None = None, policy: str = "all_pages") -> Any:
    from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

    return PoolTransfer(name=PoolName(name), keys=keys, device_indices=at, hit_policy=PoolHitPolicy(policy))


def store(linker: Any, transfers: list[Any]) -> None:
    assert linker.offload(transfers)
    end = time.monotonic() + 30
    while not linker.num_completed_offloads():
        assert time.monotonic() < end
        time.sleep(0.002)
    assert linker.pop_completed_offload()


def load(linker: Any, transfers: list[Any]) -> bool:
    assert linker.load("r", transfers)
    return bool(linker.finish_layer_wise_loading(linker.start_layer_wise_loading()))


def test_an_indexer_is_loaded_with_its_keys(tmp_path: Path) -> None:
    pools = make("dsa", torch.bfloat16)
    latents, indexer = pools.kv.kv_buffer, pools.kv.index_k_with_scale_buffer
    fill([*latents, *indexer])
    linker = make_linker(tmp_path, pools)
    assert set(linker._pools) == {"kv", "indexer"}
    store(linker, [transfer("kv", KEYS[:6], places(*range(1, 7), size=pools.page))])
    assert linker.lookup("r", [transfer("kv", KEYS)]) == [1, 2, 3, 4, 5, 6]

    def held(first: int) -> list[torch.Tensor]:
        at = places(*range(first, first + 6), size=pools.page)
        return [*(buffer[at].clone() for buffer in latents), *(buffer[first : first + 6].clone() for buffer in indexer)]

    before = held(1)
    assert load(linker, [transfer("kv", KEYS[:6], places(*range(20, 26), size=pools.page))])
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(held(20), before, strict=True))
    linker._handles["indexer"].clear()
    assert linker.lookup("r", [transfer("kv", KEYS)]) == [], "keys without their indexer are a wrong answer"
    linker.close()


def test_a_state_is_loaded_at_the_end_of_its_prefix(tmp_path: Path) -> None:
    pools = make("mamba", torch.bfloat16)
    cache = pools.requests.mamba_pool.mamba_cache
    states = [*cache.conv, cache.temporal]  # (layer, slot, ...)
    fill([*pools.kv.full_kv_pool.kv_buffer, *states])
    linker = make_linker(tmp_path, pools)
    assert set(linker._pools) == {"kv", "mamba"}
    for first, end, slot in ((0, 4, 3), (4, 9, 5)):  # two nodes of a tree, each with the state at its end
        state = transfer("mamba", KEYS[end - 1 : end], torch.tensor([slot]), "trailing_pages")
        store(linker, [transfer("kv", KEYS[first:end], places(*range(first + 1, end + 1), size=pools.page)), state])

    def promised(keys: list[str]) -> list[int]:
        ends: list[int] = linker.lookup(
            "r", [transfer("kv", keys), transfer("mamba", keys[-1:], None, "trailing_pages")]
        )
        return ends

    assert promised(KEYS[:11]) == [4, 9]
    assert promised(KEYS[:3]) == []
    assert promised(KEYS[:6]) == [4]
    wanted = [state[:, 3].clone() for state in states]
    latents = [buffer[places(*range(1, 5), size=pools.page)].clone() for buffer in pools.kv.full_kv_pool.kv_buffer]
    state = transfer("mamba", KEYS[3:4], torch.tensor([9]), "trailing_pages")
    assert load(linker, [transfer("kv", KEYS[:4], places(*range(30, 34), size=pools.page)), state])
    assert all(
        torch.equal(state[:, 9].view(torch.uint8), was.view(torch.uint8))
        for state, was in zip(states, wanted, strict=True)
    )
    for buffer, was in zip(pools.kv.full_kv_pool.kv_buffer, latents, strict=True):
        assert torch.equal(buffer[places(*range(30, 34), size=pools.page)].view(torch.uint8), was.view(torch.uint8))
    linker.close()


@pytest.mark.parametrize(
    ("kind", "drafts", "why"),
    [
        ("mamba with mha", (), "plain MLA pool"),
        ("mha", (object(),), "does not support the direct"),
        ("swa", (object(),), "does not support the direct"),
    ],
    ids=["states and keys", "drafts", "windows and drafts"],
)
def test_an_undescribed_pool_is_refused(kind: str, drafts: Any, why: str, tmp_path: Path) -> None:
    pools = make(kind, torch.bfloat16)
    params = replace(params_of(pools), sidecar_draft_device_pools=drafts)
    with pytest.raises(ConfigError, match=rf"{why}.*use the storage backend"):
        make_linker(tmp_path, pools, params=params)


def test_separate_scales_are_refused(tmp_path: Path) -> None:
    pools = make("mha", torch.bfloat16)
    pools.kv.k_scale_buffer = [torch.zeros(1)]
    with pytest.raises(ConfigError, match=r"scales.*use the storage backend"):
        make_linker(tmp_path, pools)
