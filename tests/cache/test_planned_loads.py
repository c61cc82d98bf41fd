"""A cache that knows what computing takes: it loads what comes sooner, says so of the rest, and goes on learning."""

from __future__ import annotations

import itertools
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcache.block.layout import Group, KVLayout
from kvcache.cache.cache import Cache
from kvcache.cache.load_plan import TierSpan, spans
from kvcache.cache.operation import BlockTransfer
from kvcache.evict.policy import LRU
from kvcache.index.block_run import BlockRun, needs, pack_shard_key
from kvcache.index.index import Index
from kvcache.os_env import OsEnv, SystemClock
from kvcache.tier.tier import Outcome
from tests.cache.test_miss_explainer import LAYOUT, misses, opened, pages, story, turn

SLOW_S = 10.0  # of the drive, for a block


class Ticking(SystemClock):
    """Each look at it is a tenth of a millisecond later."""

    def __init__(self) -> None:
        self._ticks = itertools.count(1)

    def now(self) -> float:
        return next(self._ticks) * 1e-4


def below(place: Path, **settings: Any) -> Cache:
    """A cache with ten blocks on its drive alone. Its time goes on by looking at it, however busy the machine."""
    with closing(opened(place)) as cache:
        turn(cache, range(40), "before")
        assert cache.flush(30)
    return opened(place, os_env=OsEnv(clock=Ticking()), **settings)


def slow(cache: Cache) -> None:
    for _ in range(5):
        reading = cache.plan.read_started("nvme", 8192)
        reading.begun -= SLOW_S
        cache.plan.read_ended(reading, 8192)


def ask(cache: Cache, name: str) -> tuple[int, str]:
    handle = cache.namespace(LAYOUT, model="m", revision="r")
    with handle.request(id=name) as r:
        hit = r.match(range(44))
        r.admit()
        t = r.load(hit.blocks, pages(), [list(range(hit.blocks))])
        assert t.wait(30)
        assert t.blocks == hit.blocks == sum(hit.by_tier.values())
        return hit.blocks, hit.reason


def test_blocks_slower_than_recomputing_are_no_hit(tmp_path: Path) -> None:
    with closing(below(tmp_path)) as cache:
        slow(cache)
        assert ask(cache, "untold")[0] == 10, "until the engine tells"
    with closing(below(tmp_path)) as cache:
        slow(cache)
        cache.namespace(LAYOUT, model="m", revision="r").computed(40, 0.1)
        assert ask(cache, "told") == (0, "below_plan")
        assert misses(cache) == {"below_plan": 1}
        told = story(cache, "told")
        assert told["plan"]["load_s"] > SLOW_S
        assert 0 < told["plan"]["compute_s"] < 1


def test_a_setting_disables_the_plan(tmp_path: Path) -> None:
    with closing(below(tmp_path, plan={"enabled": False})) as cache:
        slow(cache)
        cache.namespace(LAYOUT, model="m", revision="r").computed(40, 0.1)
        assert ask(cache, "told")[0] == 10


def test_host_blocks_are_loaded_and_the_rest_computed(tmp_path: Path) -> None:
    with closing(below(tmp_path)) as cache:
        assert turn(cache, range(16), "brings four blocks to host") == ""
        slow(cache)
        cache.namespace(LAYOUT, model="m", revision="r").computed(40, 0.1)
        assert ask(cache, "told") == (4, "below_plan")
        assert cache.counters.get("hit_tokens", tier="host") == 16
        assert cache.counters.get("planned_seconds") > 0
        rate = cache.stats()["tiers"]["nvme"]["read_bytes_per_s"]
        assert 0 < rate < 1e6, "as it was of late"


def test_a_slow_tier_is_probed_again(tmp_path: Path) -> None:
    with closing(below(tmp_path)) as cache:
        slow(cache)
        cache.namespace(LAYOUT, model="m", revision="r").computed(40, 0.1)
        cache.plan._tried["nvme"] = -1e9  # long ago
        found = [ask(cache, f"r{i}")[0] for i in range(8) if cache.tier_manager.promoter.wait_idle(30)]
        assert found[0] == 0
        assert found[-1] == 10, "the drive is fast after all: it was tried until that was clear"
        assert cache.check() == []


def test_a_choice_to_load_nothing_is_settled_later(tmp_path: Path) -> None:
    with closing(below(tmp_path)) as cache:
        slow(cache)
        handle, counted = cache.namespace(LAYOUT, model="m", revision="r"), cache.counters.get
        handle.computed(40, 0.1)
        for i in range(5):
            cache.plan._tried["nvme"] = 1e9  # just now: it is not tried again
            with handle.request(id=f"r{i}") as r:
                assert r.match(range(44)).blocks == 0
                r.admit()
                if i == 4:
                    with handle.join("r4") as rank:  # the first store settles it
                        assert rank.store(pages(), [[0]], first_block=0).wait(30)
            assert 0.1 * (i + 1) <= counted("planned_seconds") < 0.15 * (i + 1)
        assert counted("plan_regret_seconds") == 0, "by what is known"
        cache.plan._tried["nvme"] = -1e9
        while ask(cache, "again")[0] < 10:
            assert cache.tier_manager.promoter.wait_idle(30)
        assert 0 < counted("plan_regret_seconds") < counted("planned_seconds")


def test_a_tier_with_late_reads_is_not_asked_repeatedly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(below(tmp_path)) as cache:
        (drive,) = cache.lower_tiers

        def late(op: str, addresses: Any, *_: Any, on_outcome: Any, **__: Any) -> None:
            for _ in range(10_000):
                cache.os_env.clock.now()  # a second goes by
            for i in range(len(addresses)):
                on_outcome(i, Outcome.TIMED_OUT)

        handle = cache.namespace(LAYOUT, model="m", revision="r")
        handle.computed(40, 0.1)
        monkeypatch.setattr(drive, "submit", late)
        with handle.request(id="first") as r:
            assert r.match(range(44)).blocks == 10
            r.admit()
            assert r.load(10, pages(), [list(range(10))]).wait(30)
        assert ask(cache, "second") == (0, "below_plan")
        assert cache.counters.get("plan_regret_seconds") > 0


def test_a_done_load_has_its_duration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settled, seen = BlockTransfer.settle_run, []

    def watched(transfer: BlockTransfer, first: int, end: int, outcome: Outcome) -> None:
        settled(transfer, first, end, outcome)
        seen.append((transfer.done, transfer.seconds))

    with closing(below(tmp_path)) as cache:
        monkeypatch.setattr(BlockTransfer, "settle_run", watched)
        assert ask(cache, "whole")[0] == 10
        with cache.namespace(LAYOUT, model="m", revision="r").request() as r:
            r.match(range(44))
            assert r.load(11, pages(), [list(range(11))]).wait(30)  # of which the last is nowhere
        assert any(done for done, _ in seen)
        assert all(seconds > 0 for done, seconds in seen if done)


@pytest.mark.parametrize("broken", ["holds.release", "plan.copied"])
def test_a_load_ends_though_its_callbacks_fail(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(below(tmp_path)) as cache:
        assert ask(cache, "brings all to host")[0] == 10
        part, name = broken.split(".")
        whole = getattr(getattr(cache._context, part), name)

        def fails(*given: Any) -> None:
            whole(*given)
            raise RuntimeError(broken)

        with cache.namespace(LAYOUT, model="m", revision="r").request() as r:
            assert r.match(range(44)).blocks == 10
            with monkeypatch.context() as patch:
                patch.setattr(getattr(cache._context, part), name, fails)
                loaded, failed = (r.load(n, pages(), [list(range(n))]) for n in (10, 11))  # the last is nowhere
                assert loaded.wait(30)
                assert failed.wait(30)
        assert loaded.blocks == 10
        assert failed.failure == (10, Outcome.NOT_FOUND)
        assert loaded.seconds > 0
        assert f"RuntimeError: {broken}" in caplog.text
        assert cache.index.held() == 0
        assert cache.check() == []


def test_invalid_compute_times_are_ignored(tmp_path: Path) -> None:
    with closing(below(tmp_path)) as cache:
        handle = cache.namespace(LAYOUT, model="m", revision="r")
        for tokens, seconds in ((0, 1.0), (-5, 1.0), (40, 0.0), (40, float("nan")), (40, float("inf")), (40, -1.0)):
            handle.computed(tokens, seconds)
        assert ask(cache, "told")[0] == 10


def test_spans_are_the_runs_of_the_nearest_tier() -> None:
    shard_key, index = pack_shard_key(b"n" * 32, 0, LAYOUT.whole[0]), Index(["host", "nvme"], LRU())
    packed = b"".join(bytes([i]) * 32 for i in range(1, 9))
    run = BlockRun(shard_key, packed)
    index.insert_run(run, b"n" * 32, "nvme")
    for first, end in ((0, 3), (5, 6)):
        index.insert_run(run.part(first, end), packed[(first - 1) * 32 : first * 32] if first else b"n" * 32, "host")
    lookup = index.lookup([shard_key], needs(LAYOUT))
    lookup.match(packed)
    assert spans(index, [(shard_key, 10)], needs(LAYOUT), packed, lookup.by_tier) == [
        TierSpan("host", 3, 30), TierSpan("nvme", 2, 20), TierSpan("host", 1, 10), TierSpan("nvme", 2, 20),
    ]  # fmt: skip
    assert spans(index, [(shard_key, 10)], needs(LAYOUT), packed, {}) == []


def test_a_windowed_prefix_is_loaded_wholly_or_not_at_all() -> None:
    whole = Group(kind="mha", layers=1, kv_heads=1, head_dim=4, dtype="fp32")
    window = Group(kind="mha", layers=1, kv_heads=1, head_dim=4, dtype="fp32", rule="window", window_tokens=8)
    layout = KVLayout(groups=(whole, window), block_tokens=4)
    index = Index(["host", "nvme"], LRU())
    shard_keys = [(pack_shard_key(b"n" * 32, g, layout.whole[g]), 100) for g in range(2)]
    found = spans(index, shard_keys, needs(layout), b"", {"host": 5, "nvme": 3})
    assert found == [TierSpan("nvme", 8, 800 + 100 * min(8, needs(layout)[1]))]
    assert np.all([span.bytes > 0 for span in found])


def test_a_ranks_load_settles_the_schedulers_plan(tmp_path: Path) -> None:
    """By a request of its own, which no scheduler admits; or by one that joins the scheduler's."""
    with closing(below(tmp_path)) as cache:
        handle = cache.namespace(LAYOUT, model="m", revision="r")
        handle.computed(40, 1.0)
        for name in ("rank", "joined"):
            before = cache.counters.get("planned_seconds")
            with handle.request(id=name) as scheduler:
                hit = scheduler.match(range(44))
                scheduler.admit()
                with handle.join(name) if name == "joined" else handle.request(id="of a rank") as rank:
                    if name == "rank":
                        rank.match(range(44))
                    assert rank.load(hit.blocks, pages(), [list(range(hit.blocks))]).wait(30)
            assert cache.counters.get("planned_seconds") > before, name
            spent = cache.counters.get("planned_seconds")
            assert cache.counters.get("plan_regret_seconds") < spent
        assert misses(cache) == {"cold": 2}, "a scheduler's, once each: the last block of its prompt"
