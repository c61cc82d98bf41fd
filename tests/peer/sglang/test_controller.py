"""SGLang's own controller over our backend: what comes back after a restart is what was computed, byte for byte."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcache.cache.cache import Cache
from kvcache.errors import LayoutError
from kvcache.os_env import OsEnv
from kvcache.settings.sources import load
from tests.connector.sglang.faulty_disk import FaultyDisk
from tests.engine import tiny_model
from tests.peer.sglang.cache_stack import HiCacheStack
from tests.peer.sglang.device_pools import PAGE, SIZES

LAYOUTS = (
    ("layer_first", "direct"),
    ("layer_first", "kernel"),
    ("page_first", "kernel"),
    ("page_first_direct", "direct"),
    ("page_head", "kernel"),
)
PROMPT = list(range(2, 2 + 40 * PAGE))

pytestmark = pytest.mark.usefixtures("sglang_in_process")


def equal(left: Any, right: Any) -> bool:
    return all(torch.equal(a, b) for pair in zip(left, right, strict=True) for a, b in zip(*pair, strict=True))


@pytest.mark.parametrize("v1", [0, 1], ids=["v0", "v1"])
@pytest.mark.parametrize(("layout", "io"), LAYOUTS, ids=[" ".join(pair) for pair in LAYOUTS])
def test_pages_after_a_restart_equal_the_computed_ones(layout: str, io: str, v1: int, tmp_path: Path) -> None:
    first = HiCacheStack(tmp_path, layout=layout, io=io, v1=v1)
    computed = first.compute(PROMPT)
    first.stored(40)
    first.close()
    second = HiCacheStack(tmp_path, layout=layout, io=io, v1=v1)
    assert second.match(PROMPT).host_hit_length == 0
    assert second.run_prefetch(PROMPT) == len(PROMPT)
    assert equal(second.load_back(PROMPT), computed)
    assert second.backend.cache.check() == []
    second.close()


@pytest.mark.parametrize("kind", ["mla", "swa"])
@pytest.mark.parametrize(("layout", "io"), LAYOUTS, ids=[" ".join(pair) for pair in LAYOUTS])
def test_models_with_other_pools_round_trip(kind: str, layout: str, io: str, tmp_path: Path) -> None:
    """A latent; windows, whose pages are a side pool of their own (v2)."""
    if kind == "mla" and layout == "page_head":
        pytest.skip("SGLang itself has no page_head for a latent")
    first = HiCacheStack(tmp_path, kind=kind, layout=layout, io=io)
    computed = first.compute(PROMPT)
    first.stored(40)
    first.close()
    second = HiCacheStack(tmp_path, kind=kind, layout=layout, io=io)
    assert second.run_prefetch(PROMPT) == len(PROMPT)
    assert equal(second.load_back(PROMPT), computed)
    assert second.backend.cache.check() == []
    second.close()


def test_an_indexer_is_restored_with_its_keys(tmp_path: Path) -> None:
    """DSA: a side pool of which every page is needed."""
    size = SIZES["dsa"]
    whole = PROMPT[: 8 * size]
    first = HiCacheStack(tmp_path, kind="dsa")
    for layer, buffer in enumerate(first.pools.extras):
        buffer.copy_(torch.randint(0, 255, buffer.shape, generator=torch.Generator().manual_seed(layer)))
    computed = first.compute(whole)
    at = first.tree.path_device_indices(first.match(whole).last_device_node)
    indexed = [buffer[at[::size] // size].clone() for buffer in first.pools.extras]
    first.stored(16)
    first.close()
    second = HiCacheStack(tmp_path, kind="dsa")
    assert second.run_prefetch(whole) == len(whole)
    assert equal(second.load_back(whole), computed)
    at = second.tree.path_device_indices(second.match(whole).last_device_node)
    for buffer, was in zip(second.pools.extras, indexed, strict=True):
        assert torch.equal(buffer[at[::size] // size], was)
    second.close()


def test_an_indexer_without_page_metadata_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match="page_first_direct"):
        HiCacheStack(tmp_path, kind="dsa", layout="layer_first")


def test_a_state_is_restored_with_its_prefix(tmp_path: Path) -> None:
    """Mamba: a side pool of which only the end of the prefix is needed."""
    first = HiCacheStack(tmp_path, kind="mamba")
    computed = first.compute(PROMPT)
    first.stored(len(PROMPT) + 1)
    first.close()
    second = HiCacheStack(tmp_path, kind="mamba")
    assert second.run_prefetch(PROMPT) == len(PROMPT)
    assert equal(second.load_back(PROMPT), computed)
    slot = int(second.request.kv.mamba_pool_idx)
    for here, there in zip(second.pools.extras, first.pools.extras, strict=True):
        assert any(torch.equal(here[:, slot], there[:, i]) for i in range(1, there.shape[1]) if there[:, i].any())
    second.close()


def test_a_calls_head_is_known_if_sglang_passes_its_keys(tmp_path: Path) -> None:
    told = {"hicache_storage_pass_prefix_keys": True}
    first = HiCacheStack(tmp_path, extra=told)
    computed = first.compute(PROMPT)
    longer = [*PROMPT, *range(1000, 1000 + 8 * PAGE)]
    first.stored(40)
    first.compute(longer, seed=1)
    first.stored(48)
    first.close()
    second = HiCacheStack(tmp_path, extra=told)
    assert second.run_prefetch(PROMPT) == len(PROMPT)
    assert equal(second.load_back(PROMPT), computed)
    second.run_prefetch(longer, "r2")
    assert second.match(longer).host_hit_length + second.match(longer).device_prefix_len == len(longer)
    second.close()


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective"])
def test_each_write_policy_stores_pages(policy: str, tmp_path: Path) -> None:
    first = HiCacheStack(tmp_path, policy=policy)
    first.compute(PROMPT)
    for _ in range(2):
        first.match(PROMPT)
        first.compute(PROMPT)
    first.stored(40)
    first.close()


@pytest.mark.parametrize(
    "other", [{"revision": "2"}, {"tenant": "other"}, {"cache_salt": "x"}], ids=lambda o: next(iter(o))
)
def test_other_weights_are_a_miss(other: dict[str, Any], tmp_path: Path) -> None:
    first = HiCacheStack(tmp_path)
    first.compute(PROMPT)
    first.stored(40)
    first.close()
    second = HiCacheStack(tmp_path, ours=other)
    assert second.run_prefetch(PROMPT) == 0
    second.close()


def test_another_dtype_is_a_miss(tmp_path: Path) -> None:
    first = HiCacheStack(tmp_path)
    first.compute(PROMPT)
    first.stored(40)
    first.close()
    second = HiCacheStack(tmp_path, dtype=torch.float16)
    assert second.run_prefetch(PROMPT) == 0
    second.close()


@pytest.mark.parametrize("layouts", [("page_first", "kernel"), ("layer_first", "direct"), ("page_head", "kernel")])
def test_pool_layouts_share_pages(layouts: tuple[str, str], tmp_path: Path) -> None:
    layout, io = layouts
    model = tiny_model.make(tmp_path / "model")  # what engines share by names its configuration
    first = HiCacheStack(tmp_path, ours={"share_across_engines": True}, model=model)
    computed = first.compute(PROMPT)
    first.stored(40)
    first.close()
    second = HiCacheStack(tmp_path, layout=layout, io=io, ours={"share_across_engines": True}, model=model)
    assert second.run_prefetch(PROMPT) == len(PROMPT)
    assert equal(second.load_back(PROMPT), computed)
    second.close()


def test_a_damaged_record_ends_the_prefix(tmp_path: Path) -> None:
    """Wrong bytes are never noticed by SGLang itself."""
    first = HiCacheStack(tmp_path)
    computed = first.compute(PROMPT)
    first.stored(40)
    first.close()
    [segment] = [file for file in (tmp_path / "nvme").rglob("*") if file.is_file() and file.stat().st_size > 1 << 20]
    held = bytearray(segment.read_bytes())
    middle = bytes(computed[2][1][17 * PAGE : 18 * PAGE].contiguous().view(torch.uint8).numpy().tobytes())
    at = held.find(middle)
    assert at > 0, "the page's bytes lie there as they are"
    held[at] ^= 1
    segment.write_bytes(held)
    second = HiCacheStack(tmp_path)
    assert second.run_prefetch(PROMPT) == 17 * PAGE
    got = second.load_back(PROMPT)
    assert equal(got, [(keys[: 17 * PAGE], values[: 17 * PAGE]) for keys, values in computed])
    second.close()


@pytest.mark.parametrize("v1", [0, 1], ids=["v0", "v1"])
def test_faults_injected_by_sglang_are_survived(v1: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of all calls fail: whatever is there afterwards is right, and nothing is raised."""
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.5")
    first = HiCacheStack(tmp_path, v1=v1)
    prompts = [[seed, *PROMPT[1:]] for seed in range(1000, 1008)]
    computed = [first.compute(prompt[: 4 * PAGE], seed) for seed, prompt in enumerate(prompts)]
    first.pump(lambda: not first.tree.ongoing_backup)
    first.close()
    second = HiCacheStack(tmp_path, v1=v1)
    for number, (prompt, whole) in enumerate(zip(prompts, computed, strict=True)):
        came = second.run_prefetch(prompt[: 4 * PAGE], f"r{number}")
        if came:
            got = second.load_back(prompt[: 4 * PAGE], f"r{number}")
            assert equal(got, [(keys[:came], values[:came]) for keys, values in whole])
    second.close()


def test_concurrent_prompts_get_their_own_pages(tmp_path: Path) -> None:
    """SGLang's two threads and ours: a backup and a prefetch under way together."""
    from array import array

    from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle

    first = HiCacheStack(tmp_path)
    old = [[seed, *PROMPT[1 : 8 * PAGE]] for seed in range(2000, 2008)]
    for seed, prompt in enumerate(old):
        first.compute(prompt, seed)
    first.stored(64)
    first.close()
    second = HiCacheStack(tmp_path)
    handles = [CacheRequestHandle(f"r{i}", 0) for i in range(8)]
    for seed, (handle, prompt) in enumerate(zip(handles, old, strict=True)):
        second.tree.prefetch_from_storage(handle, second.match(prompt).last_host_node, array("q", prompt), None, [])
        second.compute([seed + 3000, *PROMPT[1 : 8 * PAGE]], seed)
    for handle, prompt in zip(handles, old, strict=True):
        second.pump(lambda handle=handle: second.tree.check_prefetch_progress(handle))
        assert second.match(prompt).host_hit_length == len(prompt)
    second.close()


def test_clear_and_attach_work_at_run_time(tmp_path: Path) -> None:
    stack = HiCacheStack(tmp_path)
    stack.compute(PROMPT)
    stack.stored(40)
    assert stack.tree.clear_storage_backend()
    assert stack.backend.cache.stats()["tiers"]["nvme"]["records"] == 0
    controller, ours = stack.tree.cache_controller, stack.backend.cache
    extra, pools = stack.backend._config.extra_config, controller.mem_pool_host.entries
    for _ in range(2):
        controller.detach_storage_backend()
        assert ours.stats()["queued_blocks"] == 0
        controller.attach_storage_backend(
            storage_backend="dynamic", model_name="tiny", storage_backend_extra_config=extra, host_pools=pools
        )
        ours = stack.backend.cache
    stack.compute([7, *PROMPT[1:]], seed=1)
    stack.stored(40)
    stack.close()


@pytest.fixture
def drive(monkeypatch: pytest.MonkeyPatch) -> FaultyDisk:
    """Under every cache that a backend opens from now on."""
    made = FaultyDisk()

    def open_cache(options: Any, engine: str | None = None) -> Cache:
        return Cache(load(None, **options.settings), OsEnv(disk=made))

    monkeypatch.setattr("kvcache.connector.sglang.storage.open_cache", open_cache)
    return made


def test_a_hung_drive_blocks_neither_requests_nor_threads(drive: FaultyDisk, tmp_path: Path) -> None:
    hasty = {"deadline_s": 0.5}
    first = HiCacheStack(tmp_path, ours=hasty)
    computed = first.compute(PROMPT)
    first.stored(40)
    first.close()
    second = HiCacheStack(tmp_path, ours=hasty)
    drive.hang()
    assert second.run_prefetch(PROMPT) == 0, "released, though the policy would wait for ever"
    fresh = [9, *PROMPT[1:]]
    second.compute(fresh, seed=2)
    second.pump(lambda: second.backend.cache.stats()["tiers"]["host"]["records"] >= 40)
    second.tree.cache_controller.reset()  # raises where a thread does not stop within ten seconds
    drive.go()
    assert second.backend.cache.flush(20)
    second.tree.reset()
    assert second.run_prefetch(PROMPT, "later") == len(PROMPT)
    assert equal(second.load_back(PROMPT, "later"), computed)
    second.close()


def test_a_full_drive_fails_no_request(drive: FaultyDisk, tmp_path: Path) -> None:
    stack = HiCacheStack(tmp_path)
    drive.error = errno.ENOSPC
    computed = stack.compute(PROMPT)
    stack.pump(lambda: stack.backend.cache.stats()["tiers"]["host"]["records"] >= 40)
    stack.tree.reset()
    assert stack.run_prefetch(PROMPT) == len(PROMPT), "from memory"
    assert equal(stack.load_back(PROMPT), computed)
    drive.error = None
    stack.close()
