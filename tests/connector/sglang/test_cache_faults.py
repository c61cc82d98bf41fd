"""Whatever a cache does that it has promised not to do, SGLang's threads see a miss: no error, and an end in time."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcache.connector.sglang import pool_store as faults
from kvcache.connector.sglang.lookup_leases import LookupLeases
from kvcache.testing.naive_cache import NaiveCache
from tests.connector.fault_injection import FAULTS, METHODS, FaultInjector
from tests.connector.sglang.test_pool_store import chain, opened, pool, pool_store

ENDED_S = 10.0
"""Beyond which SGLang cannot stop its threads."""


def over(methods: Sequence[str]) -> Any:
    return pytest.mark.parametrize(("method", "fault"), [(method, fault) for method in methods for fault in FAULTS])


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was said by earlier tests."""
    monkeypatch.setattr("kvcache.connector.guard._logged", set())


@over(METHODS)
def test_a_faulty_cache_is_a_miss_in_time(method: str, fault: str) -> None:
    injector, keys, host = FaultInjector(), chain(8), pool(1)
    cache = injector.wrap(NaiveCache())
    assert all(pool_store(cache, host).store(keys, range(8)))
    other = pool()
    store = pool_store(cache, other)
    store.deadline_s = 0.05
    injector.method, injector.fault = method, fault
    begun = time.monotonic()
    assert 0 <= store.match_prefix(keys) <= 8
    assert len(store.present(keys)) == 8
    came, fresh = store.load(keys, range(8)), chain(4, seed=2)
    kept = store.store(fresh, range(20, 24))
    assert time.monotonic() - begun < ENDED_S
    assert (len(came), len(kept)) == (8, 4)
    if not (method == "blocks" and fault == "a hit of everything"):  # a number that says of itself how many came
        assert all(torch.equal(other.page(i), host.page(i)) for i, here in enumerate(came) if here)
    injector.method, store.deadline_s = "", 30.0
    assert store.load(keys, range(8)) == [True] * 8, "and afterwards it goes on"
    assert store.match_prefix(fresh) >= kept.count(True)


@over(("request", "match", "admit", "close"))
def test_lookup_leases_over_a_faulty_cache_are_misses(method: str, fault: str, tmp_path: Path) -> None:
    """On the scheduler's thread: the linker turns an error into a miss; nothing is held for ever, and afterwards
    promises are kept again."""
    injector, keys = FaultInjector(), chain(8)
    with opened(tmp_path) as cache:
        store = pool_store(injector.wrap(cache), pool(1))
        assert all(store.store(keys, range(8)))
        told = LookupLeases({"kv": store.handle, "swa": store.handle}, 0.01)
        assert told.loadable_lengths("before", keys, {"swa": 2}) == [5, 6, 7, 8]
        injector.method, injector.fault = method, fault
        begun = time.monotonic()
        for rid, last in (("a", {}), ("b", {"swa": 2}), ("before", {"swa": 2})):
            for _ in range(2):
                ends = _or_nothing(lambda rid=rid, last=last: told.loadable_lengths(rid, keys, last))
                assert all(0 < end <= 8 for end in ends or ())
            taken = _or_nothing(lambda rid=rid: told.claim(rid, {"kv": keys[:5], "swa": keys[3:5]}))
            faults.release((taken or {}).values())
        told.clear()
        assert time.monotonic() - begun < ENDED_S
        injector.method = ""
        assert told.loadable_lengths("a", keys) == list(range(1, 9))
        requests = told.claim("a", {"kv": keys, "swa": keys})
        assert requests is not None
        faults.release(requests.values())
        assert len(told) == 0
        if method != "close":
            assert cache.stats()["tiers"]["host"]["held_bytes"] == 0


def _or_nothing(work: Any) -> Any:
    try:
        return work()
    except Exception:  # noqa: BLE001  what the linker turns into a miss
        return None


def test_each_kind_of_fault_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    injector = FaultInjector()
    store = pool_store(injector.wrap(NaiveCache()), pool())
    injector.method = "match"
    with caplog.at_level(logging.ERROR, "kvcache.connector"):
        for fault in ("a mistake", "an error of ours", "a mistake"):
            injector.fault = fault
            for _ in range(5):
                assert store.match_prefix(chain(3)) == 0
    assert [("ZeroDivisionError" in line, "ClosedError" in line) for line in caplog.messages] == [
        (True, False),
        (False, True),
    ]


def test_a_call_over_several_pools_keeps_one_deadline(tmp_path: Path) -> None:
    with opened(tmp_path) as cache:
        store, keys = pool_store(cache, pool(1)), chain(4)
        over = time.monotonic() - 1
        assert store.store(keys, range(4), until=over) == [False] * 4
        assert store.store(keys, range(4)) == [True] * 4
        assert store.match_prefix(keys, until=over) == 0
        assert store.present(keys, until=over) == [False] * 4
        assert store.load(keys, range(4), until=over) == [False] * 4
        assert store.load(keys, range(4), until=time.monotonic() + 60) == [True] * 4


def test_a_tier_that_refuses_reads_is_a_miss_and_recovers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though a tier raises for misuse only: blocks that never arrived could not be asked for again, nor the cache be
    closed."""
    host, other, keys = pool(1), pool(), chain(20)
    with opened(tmp_path) as cache:
        assert all(pool_store(cache, host).store(keys, range(20)))
    with opened(tmp_path) as cache:
        [tier] = cache.lower_tiers
        store = pool_store(cache, other)

        def none(*_: Any, **__: Any) -> Any:
            raise MemoryError

        with monkeypatch.context() as patched:
            patched.setattr(tier, "submit", none)
            assert store.match_prefix(keys) == 20, "the index is in memory"
            assert store.load(keys, range(20)) == [False] * 20
        assert store.load(keys, range(20)) == [True] * 20
        assert torch.equal(other.page(7), host.page(7))
