"""The backend as SGLang's controller calls it, where a model has pools beside the first, or none of its own."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcache.connector.sglang.host_pools import Ranks, describe_pool
from kvcache.errors import LayoutError, ModelError
from tests.connector.sglang.fake_host_pools import (
    LogicalPoolHost,
    MHATokenToKVPoolHost,
    MLATokenToKVPoolHost,
    StatePoolHost,
)
from tests.engine import tiny_model

pytestmark = pytest.mark.usefixtures("sglang_in_process")


def chain(count: int) -> list[str]:
    keys = [hashlib.sha256(b"first").hexdigest()]
    while len(keys) < count:
        keys.append(hashlib.sha256(bytes.fromhex(keys[-1])).hexdigest())
    return keys


def backend(place: Path, anchor: Any, side: dict[str, Any] | None = None, **named: Any) -> Any:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName

    from kvcache.connector.sglang import KVCacheStorage

    ours = named.pop("ours", {})
    nvme = {"path": str(place / "nvme"), "capacity_bytes": 64 << 20, "min_free_bytes": 0}
    given = {"revision": "1", "host": {"capacity_bytes": 8 << 20}, "nvme": nvme, "control": {"enabled": False}} | ours
    config = HiCacheStorageConfig(
        **{
            "tp_rank": 0,
            "tp_size": 1,
            "pp_rank": 0,
            "pp_size": 1,
            "attn_cp_rank": 0,
            "attn_cp_size": 1,
            "is_mla_model": False,
            "enable_storage_metrics": True,
            "is_page_first_layout": True,
            "model_name": "tiny",
            "extra_config": {"kvcache": given, **named.pop("extra", {})},
        }
        | named
    )
    made = KVCacheStorage(config, {})
    made.register_mem_pool_host(anchor)
    for name, pool in ({"kv": anchor} | (side or {})).items():
        made.register_mem_host_pool_v2(pool, PoolName(name))
    made.on_host_pools_registered()
    return made


def at(*pages: int, tokens: int = 4) -> torch.Tensor:
    return torch.cat([torch.arange(page * tokens, (page + 1) * tokens) for page in pages])


def transfer(name: str, keys: list[str], places: torch.Tensor | None = None, policy: str = "all_pages") -> Any:
    from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

    return PoolTransfer(name=PoolName(name), keys=keys, host_indices=places, hit_policy=PoolHitPolicy(policy))


def test_a_page_is_a_hit_only_with_all_its_pools(tmp_path: Path) -> None:
    anchor, indexer = MHATokenToKVPoolHost("page_first", pages=16), MHATokenToKVPoolHost("page_first", pages=16, dim=4)
    anchor.fill(1)
    indexer.fill(2)
    store, keys = backend(tmp_path, anchor, {"indexer": indexer}), chain(8)
    assert store.batch_set_v1(keys, at(*range(8))) == [True] * 8
    ask = [transfer("indexer", keys)]
    nothing = store.batch_exists_v2(keys, ask)
    assert (nothing.kv_hit_pages, nothing.restorable_prefix_pages) == (0, [])
    assert store.batch_exists(keys) == 8
    assert store.batch_set_v2([transfer("indexer", keys[:5], at(*range(5)))]) == {"indexer": [True] * 5}
    some = store.batch_exists_v2(keys, ask)
    assert (some.kv_hit_pages, some.extra_pool_hit_pages) == (5, {"kv": 8, "indexer": 5})
    wanted = indexer.page(3).clone()
    assert store.batch_get_v2([transfer("indexer", keys[:6], at(*range(8, 14)))]) == {"indexer": [True] * 5 + [False]}
    assert torch.equal(indexer.page(11), wanted)
    store.close()


def test_only_the_last_pages_of_a_window_or_state_are_needed(tmp_path: Path) -> None:
    """Their pages are kept where SGLang put them, with holes between."""
    anchor, swa, mamba = (
        MHATokenToKVPoolHost("page_first", pages=16),
        MHATokenToKVPoolHost("page_first"),
        StatePoolHost(16),
    )
    for seed, pool in enumerate((anchor, swa, mamba)):
        pool.fill(seed)
    store, keys = backend(tmp_path, anchor, {"swa": swa, "mamba": mamba}), chain(10)
    assert store.batch_set_v1(keys, at(*range(10))) == [True] * 10
    kept = [transfer("swa", keys[3:5], at(0, 1)), transfer("mamba", keys[4:5], torch.tensor([3]))]
    assert store.batch_set_v2(kept) == {"swa": [True] * 2, "mamba": [True]}
    assert store.batch_set_v2([transfer("swa", keys[7:9], at(2, 3))]) == {"swa": [True] * 2}
    windows = store.batch_exists_v2(keys, [transfer("swa", keys[:2], policy="trailing_pages")])
    assert windows.restorable_prefix_pages == [5, 9]
    both = [transfer("swa", keys[:2], policy="trailing_pages"), transfer("mamba", keys[:1], policy="trailing_pages")]
    found = store.batch_exists_v2(keys, both)
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (5, [5])
    wanted = mamba.page(3)
    assert store.batch_get_v2([transfer("mamba", keys[4:5], torch.tensor([11]))]) == {"mamba": [True]}
    assert torch.equal(mamba.page(11), wanted)
    wrong = store.batch_get_v2([transfer("swa", keys[:2], at(0)), transfer("draft", keys[:2], at(0, 1))])
    assert wrong == {"swa": [False] * 2, "draft": [False] * 2}, "indices that do not fit, a pool that is not registered"
    store.close()


def test_a_logical_anchor_pool_is_accepted(tmp_path: Path) -> None:
    """DeepSeek-V4's first pool has no memory: its pages are there where the others have them."""
    store, keys = backend(tmp_path, LogicalPoolHost(), {"indexer": MHATokenToKVPoolHost("page_first")}), chain(4)
    assert store.batch_set_v1(keys, at(0, 1, 2, 3)) == [True] * 4
    assert store.batch_exists_v2(keys, [transfer("indexer", keys)]).kv_hit_pages == 0
    assert store.batch_set_v2([transfer("indexer", keys[:3], at(0, 1, 2))]) == {"indexer": [True] * 3}
    assert store.batch_exists_v2(keys, [transfer("indexer", keys)]).kv_hit_pages == 3
    store.close()


def test_ranks_of_an_mla_model_share_the_first_ranks_pages(tmp_path: Path) -> None:
    """Only the first rank writes, as SGLang has it; each reads the same shard."""
    pool, keys = MLATokenToKVPoolHost("page_first"), chain(4)
    pool.fill(3)
    wanted = pool.page(1).clone()
    writer = backend(tmp_path, pool, is_mla_model=True)
    assert writer.batch_set_v1(keys, at(0, 1, 2, 3)) == [True] * 4
    writer.close()
    reader = backend(tmp_path, pool, is_mla_model=True)
    assert reader._pool_stores["kv"].described.shards == describe_pool(pool, Ranks(1, 2)).shards
    assert reader.batch_get_v1(keys, at(1, 5, 2, 3)) == [True] * 4
    assert torch.equal(pool.page(5), wanted)
    reader.close()


def test_flat_pages_round_trip(tmp_path: Path) -> None:
    pool, keys = MHATokenToKVPoolHost("layer_first"), chain(3)
    pool.fill(4)
    store = backend(tmp_path, pool)
    assert store.batch_set(keys, [pool.flat(page) for page in range(3)])
    assert store.exists(keys[0])
    assert not store.exists(chain(4)[3])
    targets = [torch.zeros_like(pool.flat(0)) for _ in range(3)]
    assert store.batch_get(keys, targets) == targets
    for page in range(3):
        assert torch.equal(targets[page], pool.flat(page))
        got = store.get(keys[page])
        assert got is not None
        assert torch.equal(got, pool.flat(page))
    assert store.get("ff" * 32, targets[0]) is None
    assert store.set(keys[0], pool.flat(0))
    store.close()


def test_page_statistics_are_reported_once(tmp_path: Path) -> None:
    pool, keys = MHATokenToKVPoolHost("page_first"), chain(4)
    store = backend(tmp_path, pool)
    store.batch_set_v1(keys, at(0, 1, 2, 3))
    store.batch_get_v1([*keys[:2], "ff" * 32], at(0, 1, 2))
    told = store.get_stats()
    assert (told.backup_pgs, told.prefetch_pgs) == ([4], [2])
    assert all(rate > 0 for rate in (*told.backup_bandwidth, *told.prefetch_bandwidth))
    assert store.get_stats().backup_pgs == []
    store.close()
    quiet = backend(tmp_path, pool, enable_storage_metrics=False)
    assert quiet.get_stats() is None
    quiet.close()


def test_a_pool_unreadable_by_other_engines_is_not_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model.make(tmp_path / "model")
    monkeypatch.setattr("kvcache.connector.sglang.storage._ServerArguments", lambda: SimpleNamespace(model_path=model))
    shared = {"share_across_engines": True}
    backend(tmp_path / "1", MHATokenToKVPoolHost("page_head"), ours=shared).close()
    with pytest.raises(LayoutError, match="share_across_engines"):
        backend(tmp_path / "2", StatePoolHost(), ours=shared)
    monkeypatch.undo()
    with pytest.raises(ModelError, match="share_across_engines"):
        backend(tmp_path / "3", MHATokenToKVPoolHost("page_head"), ours=shared, model_name="nowhere")


def test_flat_pages_of_a_pool_of_pieces_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match=r'"interface_v1": 1'):
        backend(tmp_path / "1", StatePoolHost())
    direct = backend(tmp_path / "2", StatePoolHost(), extra={"interface_v1": 1})
    assert direct.batch_set_v1(chain(2), at(0, 1, tokens=1)) == [True] * 2
    direct.close()


def test_an_unregistered_pool_is_a_miss(tmp_path: Path) -> None:
    store, keys = backend(tmp_path, MHATokenToKVPoolHost("page_first")), chain(3)
    assert store.batch_set_v1(keys, at(0, 1, 2)) == [True] * 3
    assert store.batch_exists_v2(keys, [transfer("draft", keys)]).kv_hit_pages == 0
    store.close()
