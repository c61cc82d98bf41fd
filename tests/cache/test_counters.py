"""What a cache says of itself: events that add up to the counters, whose request they are, and the bypass."""

from __future__ import annotations

import logging
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.block.layout import KVLayout
from kvcache.cache.cache import Cache
from kvcache.cache.context import Bypass
from kvcache.log import MAX_LABEL_CHARS
from kvcache.observe.reasons import meaning
from kvcache.os_env import Executor, InlineExecutor, OsEnv, ThreadExecutor
from kvcache.settings.sources import load
from kvcache.tier.tier import Outcome
from kvcache.transfer.pages import GroupPages
from tests.cache.deferred_executor import DeferredExecutor
from tests.contract.fake_engine import flushed

LAYOUT = KVLayout.mha(layers=1, kv_heads=1, head_dim=256, dtype="fp32", block_tokens=4)  # 12 KiB a record
BLOCKS = 8


def opened(
    place: Path, os_env: OsEnv | None = None, *, host: str = "96KiB", nvme: str = "8MiB", queue: int = 64
) -> Cache:
    settings = load(
        host={"capacity_bytes": host, "slab_bytes": "24KiB"},
        nvme={"path": place / "nvme", "capacity_bytes": nvme, "segment_bytes": "96KiB", "min_free_bytes": 0},
        flow={"queue_blocks": queue},
    )
    return Cache(settings, os_env)


def pages() -> list[GroupPages]:
    tensor = np.zeros((1, 2, BLOCKS, 4, 1, 256), np.float32)
    return [GroupPages.from_tensors(LAYOUT, tensor, axes=("kv", "page", "token", "head", "dim"))]


def handle(cache: Cache) -> Any:
    return cache.namespace(LAYOUT, model="m", revision="r")


def ids(count: int) -> list[list[int]]:
    return [list(range(count))]


def turn(cache: Cache, chain: int, blocks: int, name: str) -> None:
    """A request that loads what is there and stores the rest."""
    with handle(cache).request(id=name) as r:
        hit = r.match(range(1000 * chain, 1000 * chain + 4 * blocks))
        r.admit()
        brought = r.load(hit.blocks, pages(), ids(hit.blocks))
        assert brought.wait(30)
        assert r.store(pages(), ids(blocks - brought.blocks), first_block=brought.blocks).wait(30)


def test_agent_and_session_label_events_and_not_keys(tmp_path: Path) -> None:
    with closing(opened(tmp_path)) as cache:
        names = dict[str, list[bytes]]()
        for agent, session in (("planner", "one"), ("critic", "x" * 1000), (None, None)):
            with handle(cache).request(id=f"of {agent}", agent=agent, session=session) as r:
                hit = r.match(range(40))
                r.admit()
                with handle(cache).join(r.id) as rank:
                    assert rank.load(hit.blocks, pages(), ids(hit.blocks)).wait(30)
                    assert rank.store(pages(), ids(BLOCKS - hit.blocks), first_block=hit.blocks).wait(30)
                names[r.id] = list(r.signatures)
        assert names["of planner"] == names["of critic"] == names["of None"]
        told = [(event.kind, event.request, event.agent, event.session) for event in cache.events.last()]
        assert told == [
            ("stored", "of planner", "planner", "one"),
            ("loaded", "of critic", "critic", "x" * MAX_LABEL_CHARS),
            ("loaded", "of None", "", ""),
        ]
        story, other = (
            cache.miss_explainer.explain(asked) for asked in reversed(cache.miss_explainer.recent_requests.last()[1:])
        )
        assert (story["reason"], story["agent"], story["session"]) == ("cold", "planner", "one")
        assert other["agent"] == "critic"


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, BLOCKS)), min_size=1, max_size=12), st.sampled_from([2, 64])
)
@settings(max_examples=20)
def test_events_add_up_to_the_counters(turns: list[tuple[int, int]], queue: int) -> None:
    with TemporaryDirectory() as place, closing(opened(Path(place), queue=queue)) as cache:
        for number, (chain, blocks) in enumerate(turns):
            turn(cache, chain, blocks, f"turn {number}")
        assert flushed(cache)
        assert cache.check() == []
        events, count = cache.events.last(), cache.counters.get

        def total(kind: str, field: str = "blocks") -> int:
            return sum(getattr(event, field) for event in events if event.kind == kind)

        assert total("stored") == count("stored_blocks")
        assert total("stored", "bytes") == count("stored_bytes")
        assert total("loaded") == count("loaded_blocks")
        assert total("loaded", "bytes") == count("loaded_bytes")
        assert total("evicted") == count("evicted_blocks")
        assert total("dropped") == count("drops") + count("write_failures")
        assert total("refused") == count("refused_records")
        assert {event.namespace for event in events} == {handle(cache).id[:4].hex()}
        names = {f"turn {number}" for number in range(len(turns))}
        assert {event.request for event in events if event.kind in {"stored", "loaded"}} <= names
        for metric, labels, _ in cache.counters.rows():
            for label in {"reason", "outcome", "check", "kept"} & set(labels):
                assert meaning(metric, label, labels[label])


def test_a_damaged_record_is_refused_and_reported(tmp_path: Path) -> None:
    with closing(opened(tmp_path)) as cache:
        turn(cache, 0, BLOCKS, "first")
        assert cache.flush(30)
    for segment in (tmp_path / "nvme").glob("segment-*"):
        data = bytearray(segment.read_bytes())
        for slot in range(len(data) // 12288):
            data[slot * 12288 + 8192] ^= 1
        segment.write_bytes(data)
    with closing(opened(tmp_path)) as cache:
        turn(cache, 0, BLOCKS, "second")
        refused = [event for event in cache.events.last() if event.kind == "refused"]
        assert {(event.tier, event.reason) for event in refused} == {("nvme", "damaged")}
        assert sum(event.blocks for event in refused) == cache.counters.get("refused_records", check="damaged") > 0
        assert cache.flush(30)
        found = cache.check()
        assert found, "the block without a request is still damaged"
        assert all("checksum" in fault for fault in found)


def with_copies_later() -> tuple[OsEnv, DeferredExecutor]:
    later = DeferredExecutor()

    def executor(threads: int, name: str) -> Executor:
        return later if name == "copy" else ThreadExecutor(threads, name)

    return OsEnv(executor=executor), later


def test_requests_open_at_a_bypass_finish_normally(tmp_path: Path) -> None:
    os_env, later = with_copies_later()
    with closing(opened(tmp_path, os_env)) as cache:
        with handle(cache).request() as r:
            r.match(range(4 * BLOCKS))
            stored = r.store(pages(), ids(4))
            later.run()
            assert stored.blocks == 4
            r.match()
            r.admit()
            loading, storing = r.load(4, pages(), ids(4)), r.store(pages(), ids(4), first_block=4)
        cache.bypass.set("on")
        later.run()
        assert loading.outcomes == (Outcome.CANCELLED, *[Outcome.NOT_FOUND] * 3)
        assert storing.outcomes == (Outcome.DROPPED,) * 4
        assert cache.counters.get("drops", reason="bypass") == 4
        assert cache._context.holds.held_bytes() == {"host": 0, "nvme": 0}
        cache.bypass.set("off")
        with handle(cache).request() as r:
            assert r.match(range(4 * BLOCKS)).blocks == 4
        assert cache.flush(30)
        assert cache.check() == []


def test_a_bypassed_cache_uses_no_threads(tmp_path: Path) -> None:
    os_env, later = with_copies_later()
    with closing(opened(tmp_path, os_env)) as cache:
        cache.bypass.set("on")
        with handle(cache).request() as r:
            assert r.match(range(16)).reason == "bypass"
            r.admit()
            assert r.load(2, pages(), ids(2)).outcomes == (Outcome.NOT_FOUND,) * 2
            assert r.store(pages(), ids(4)).outcomes == (Outcome.DROPPED,) * 4
        assert later.calls == []
        assert cache.flush(0)


def test_a_bypassed_request_promotes_no_blocks(tmp_path: Path) -> None:
    with closing(opened(tmp_path)) as cache:
        turn(cache, 0, BLOCKS, "first")
        assert cache.flush(30)
    with closing(opened(tmp_path)) as cache:
        with handle(cache).request() as r:
            assert r.match(range(4 * BLOCKS)).by_tier == {"nvme": BLOCKS}
            cache.bypass.set("loads")
            r.admit()
        cache.tier_manager.promoter.wait_idle(30)
        assert cache.counters.get("promoted_blocks") == 0


@pytest.mark.parametrize("mode", ["off", "on", "loads", "stores"])
def test_a_bypass_mode_sets_its_two_flags(mode: Any) -> None:
    bypass = Bypass()
    bypass.set(mode)
    assert bypass.mode == mode
    assert (bypass.loads, bypass.stores) == (mode in {"on", "loads"}, mode in {"on", "stores"})


class Broken:
    """Copiers of a device that is gone."""

    def of(self, device: str) -> Any:
        return self

    def mark(self) -> None:
        pass

    def gather(self, *_: Any, after: Any) -> Any:
        raise OSError("the device is gone")

    scatter = gather


def test_a_fault_of_a_request_is_logged_with_its_id(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with closing(opened(tmp_path, OsEnv(executor=lambda threads, name: InlineExecutor()))) as cache:
        here = handle(cache)
        here.copiers = Broken()
        with here.request(id="r-42") as r, caplog.at_level(logging.ERROR, "kvcache"):
            r.match(range(16))
            assert r.store(pages(), ids(4)).outcomes == (Outcome.FAILED,) * 4
        assert [(record.name, record.__dict__["request_id"]) for record in caplog.records] == [
            ("kvcache.store", "r-42")
        ]
        assert cache.check() == []


def test_check_reports_index_and_tier_that_differ(tmp_path: Path) -> None:
    with closing(opened(tmp_path)) as cache:
        turn(cache, 0, BLOCKS, "first")
        assert cache.flush(30)
        assert cache.check() == []
        first, second, *_ = cache.host.scan()
        cache.host.unpublish(first)
        assert cache.check() == [f"host: {first.name.hex()} is in the index and not in the tier"]
        cache.index.discard(second, "host")
        assert cache.check() == [
            f"host: {first.name.hex()} is in the index and not in the tier",
            f"host: {second.name.hex()} is in the tier and not in the index",
        ]
