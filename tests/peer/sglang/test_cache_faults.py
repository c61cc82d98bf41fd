"""Each hook that SGLang calls, over a cache that breaks its promises: no error, and an end within ten seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcache.testing.naive_cache import NaiveCache
from tests.connector.fault_injection import FAULTS, METHODS, FaultInjector
from tests.connector.sglang.fake_host_pools import MHATokenToKVPoolHost
from tests.peer.sglang.device_pools import LAYERS
from tests.peer.sglang.test_backend import at, backend, chain, transfer
from tests.peer.sglang.test_linker import Bench, wait

ENDED_S = 10.0
OF_A_CACHE = ("clear", "stats", "flush")

pytestmark = pytest.mark.usefixtures("sglang_in_process")
everything = pytest.mark.parametrize("fault", FAULTS)


@pytest.fixture
def injector(monkeypatch: pytest.MonkeyPatch) -> FaultInjector:
    """Before every cache that is opened from now on."""
    made = FaultInjector()
    for room in ("storage", "linker"):
        monkeypatch.setattr(f"kvcache.connector.sglang.{room}.open_cache", lambda *_: made.wrap(NaiveCache()))
    monkeypatch.setattr("kvcache.connector.guard._logged", set())
    return made


def in_time(work: Callable[[], Any]) -> Any:
    begun = time.monotonic()
    answer = work()
    assert time.monotonic() - begun < ENDED_S
    return answer


@everything
@pytest.mark.parametrize("method", [*METHODS, *OF_A_CACHE])
def test_backend_calls_over_a_faulty_cache_end_in_time(
    method: str, fault: str, injector: FaultInjector, tmp_path: Path
) -> None:
    anchor, side = MHATokenToKVPoolHost("page_first", pages=16), MHATokenToKVPoolHost("page_first", pages=16, dim=4)
    anchor.fill(1)
    side.fill(2)
    store, keys = backend(tmp_path, anchor, {"indexer": side}, ours={"deadline_s": 0.05}), chain(6)
    assert all(store.batch_set_v1(keys, at(*range(6))))
    assert store.batch_set_v2([transfer("indexer", keys, at(*range(6)))]) == {"indexer": [True] * 6}
    was = [anchor.page(i).clone() for i in range(6)]
    injector.method, injector.fault = method, fault
    assert 0 <= in_time(lambda: store.batch_exists(keys)) <= 6
    assert in_time(lambda: store.exists(keys[0])) in {True, False}
    found = in_time(lambda: store.batch_exists_v2(keys, [transfer("indexer", keys)]))
    assert 0 <= found.kv_hit_pages <= 6
    came = in_time(lambda: store.batch_get_v1(keys, at(*range(8, 14))))
    assert len(came) == 6
    assert all(torch.equal(anchor.page(8 + i), was[i]) for i, here in enumerate(came) if here is True)
    for hook in (store.batch_get_v2, store.batch_set_v2):
        told = in_time(lambda hook=hook: hook([transfer("indexer", keys, at(*range(8, 14)))]))
        assert len(told["indexer"]) == 6
    assert len(in_time(lambda: store.batch_set_v1(keys, at(*range(6))))) == 6
    targets = [torch.zeros_like(anchor.flat(0)) for _ in keys]
    assert len(in_time(lambda: store.batch_get(keys, targets))) == 6
    assert in_time(lambda: store.batch_set(keys, [anchor.flat(i) for i in range(6)])) in {True, False}
    in_time(lambda: store.get(keys[0]))
    assert in_time(lambda: store.set(keys[0], anchor.flat(0))) in {True, False}
    assert in_time(store.get_stats).prefetch_pgs
    in_time(store.clear)
    in_time(store.close)


@everything
@pytest.mark.parametrize("method", [*METHODS, *OF_A_CACHE])
def test_linker_calls_over_a_faulty_cache_end_in_time(
    method: str, fault: str, injector: FaultInjector, tmp_path: Path
) -> None:
    """An error to SGLang's requests remains only where a load of held pages fails that had begun: SGLang has no other
    answer for it."""
    bench, keys = Bench(tmp_path, deadline_s=0.05), chain(6)
    linker = bench.linker
    bench.fill(1)
    assert bench.offload(keys, list(range(1, 7)))
    assert bench.lookup(keys, "before") == 6
    injector.method, injector.fault = method, fault
    outcomes = []
    for rid in ("before", "a", "b"):
        ends = in_time(lambda rid=rid: linker.lookup(rid, bench.transfer(keys)))
        assert all(0 < end <= 6 for end in ends)
        count = max(ends, default=0) or 6
        queued = in_time(
            lambda rid=rid, count=count: linker.load(rid, bench.transfer(keys[:count], list(range(20, 20 + count))))
        )
        if rid == "b":
            assert in_time(lambda: linker.cancel_queued_load("b")) is queued
            continue
        index = in_time(linker.start_layer_wise_loading)
        assert (index >= 0) is queued
        if queued:
            for layer in range(LAYERS):
                linker.layer_done_counter.set_consumer(index)
                in_time(lambda layer=layer: linker.layer_done_counter.wait_until(layer))
            outcomes.append(in_time(lambda index=index: linker.finish_layer_wise_loading(index)))
    if method in {"request", "match", "admit", "close", *OF_A_CACHE} and fault != "a hit of everything":
        assert False not in outcomes, "nothing was promised that could not be kept"
    if in_time(lambda: linker.offload(bench.transfer(chain(8)[6:], [1, 2]))):
        wait(linker.num_completed_offloads)
        assert linker.pop_completed_offload() in {True, False}
    in_time(linker.reset)
    injector.method = ""
    assert bench.lookup(keys, "after") == 6
    assert bench.load(keys, list(range(20, 26)), "after") is True
    injector.method = method
    in_time(linker.close)


def test_a_reset_drops_stores_that_cannot_end(injector: FaultInjector, tmp_path: Path) -> None:
    """Stores that never end: SGLang's scheduler waits for what is under fault, and receives nothing afterwards."""
    bench = Bench(tmp_path, deadline_s=0.3)
    injector.method, injector.fault = "wait", "never"
    for i in range(50):
        assert bench.linker.offload(bench.transfer(chain(50)[i : i + 1], [1]))
    in_time(bench.linker.reset)
    assert bench.linker.num_completed_offloads() == 0
    injector.method = ""
    assert bench.offload(chain(3), [1, 2, 3])
    bench.linker.close()
    begun = time.monotonic()
    bench.linker._deadline_s = 60.0
    bench.linker.close()
    assert time.monotonic() - begun < 60, "nothing is left to wait for"


def test_the_scheduler_loads_if_no_thread_starts(
    injector: FaultInjector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, keys = Bench(tmp_path), chain(4)
    bench.fill(3)
    was = [bench.page(page) for page in range(1, 5)]
    assert bench.offload(keys, [1, 2, 3, 4])
    assert bench.lookup(keys) == 4

    def none_left(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr("threading.Thread.start", none_left)
        assert bench.load(keys, [5, 6, 7, 8]) is True
    assert all(torch.equal(bench.page(5 + i), page) for i, page in enumerate(was))
    bench.linker.close()
