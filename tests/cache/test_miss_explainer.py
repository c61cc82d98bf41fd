"""Why a prompt missed: each reason by making it happen, its story, and that it is counted once."""

from __future__ import annotations

import hashlib
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.block.layout import KVLayout
from kvcache.cache.cache import Cache
from kvcache.cache.miss_explainer import resync_point
from kvcache.observe.events import EvictionHistory
from kvcache.observe.reasons import meaning
from kvcache.observe.recent_requests import RecentRequest, RecentRequests, kept, shared_blocks, shared_tokens
from kvcache.os_env import OsEnv, SystemClock
from kvcache.settings.sources import load
from kvcache.transfer.pages import GroupPages

LAYOUT = KVLayout.mha(layers=1, kv_heads=1, head_dim=256, dtype="fp32", block_tokens=4)  # 12 KiB a record
BLOCKS = 16


def opened(
    place: Path | None = None, *, host: str = "1MiB", memory: str = "1MiB", os_env: OsEnv | None = None, **more: Any
) -> Cache:
    nvme: dict[str, Any] = {"enabled": False}
    if place is not None:
        nvme = {"path": place / "nvme", "capacity_bytes": "8MiB", "segment_bytes": "96KiB", "min_free_bytes": 0}
    settings = load(
        host={"capacity_bytes": host, "slab_bytes": "24KiB"},
        nvme=nvme,
        explain={"memory_bytes": memory},
        **more,
    )
    return Cache(settings, os_env or OsEnv())


def pages() -> list[GroupPages]:
    tensor = np.zeros((1, 2, BLOCKS, 4, 1, 256), np.float32)
    return [GroupPages.from_tensors(LAYOUT, tensor, axes=("kv", "page", "token", "head", "dim"))]


def turn(cache: Cache, tokens: Any, name: str = "", *, store: bool = True, **namespace: Any) -> str:
    """A request that loads what is there and stores the rest; the reason that its match gave."""
    handle = cache.namespace(LAYOUT, **{"model": "m", "revision": "r", **namespace})
    with handle.request(id=name or None) as r:
        hit = r.match(tokens)
        r.admit()
        load = r.load(hit.blocks, pages(), [list(range(hit.blocks))])
        assert load.wait(30)
        if store:
            ids = [list(range(len(r.signatures) - load.blocks))]
            assert r.store(pages(), ids, first_block=load.blocks).wait(30)
        return hit.reason


def story(cache: Cache, request: str) -> dict[str, Any]:
    asked = cache.miss_explainer.recent_requests.find(request)
    assert asked is not None
    return cache.miss_explainer.explain(asked, cache.namespaces)


def misses(cache: Cache) -> dict[str, int]:
    found: dict[str, int] = cache.counters.tree().get("misses", {})
    return found


def test_a_first_prompt_is_a_cold_miss() -> None:
    with closing(opened()) as cache:
        assert turn(cache, range(40), "one") == "cold"
        assert turn(cache, range(40), "two") == ""
        assert misses(cache) == {"cold": 1}
        assert cache.counters.get("missed_tokens", reason="cold") == 40
        told = story(cache, "one")
        assert (told["reason"], told["found_blocks"], told["blocks"]) == ("cold", 0, 10)
        assert told["namespace"]["model"] == "m"
        assert "other" not in told


def test_a_prompt_never_stored_stays_cold() -> None:
    with closing(opened()) as cache:
        turn(cache, range(40), "one", store=False)
        assert turn(cache, range(40), "two") == "cold"
        assert story(cache, "two")["other"]["request"] == "one"


def test_an_evicted_miss_names_time_policy_and_age() -> None:
    with closing(opened(host="240KiB")) as cache:
        turn(cache, range(40), "one")
        for chain in range(1, 4):
            turn(cache, range(1000 * chain, 1000 * chain + 40), f"filler {chain}")
        assert turn(cache, range(40), "again") == "evicted"
        told = story(cache, "again")
        assert (told["tier"], told["why"]) == ("host", "hazard")
        assert told["age_requests"] >= 1
        assert told["lost_ago_s"] >= 0
        assert told["age_s"] >= 0
        assert misses(cache) == {"cold": 4, "evicted": 1}


def test_a_diverged_miss_names_token_and_resync_point() -> None:
    ours, theirs = list(range(64)), list(range(64))
    theirs[22:24] = [501, 502, 503]  # another timestamp, one token longer
    with closing(opened()) as cache:
        turn(cache, ours[:60], "old")
        assert turn(cache, theirs[:60], "new") == "diverged"
        told = story(cache, "new")
        assert (told["block"], told["token"], told["other"]["request"]) == (5, 22, "old")
        assert told["before"][-2:] == [20, 21]
        assert told["ours"][:4] == [501, 502, 503, 24]
        assert told["theirs"][:3] == [22, 23, 24]
        assert told["meet"]["ours"] == 3
        assert told["meet"]["theirs"] == 2
        assert told["meet"]["tokens"] >= 30


def test_divergence_in_the_first_block_needs_enough_tokens() -> None:
    wide = KVLayout.mha(layers=1, kv_heads=1, head_dim=4, block_tokens=16)
    with closing(opened()) as cache:

        def ask(tokens: list[int], name: str) -> str:
            with cache.namespace(wide, model="m", revision="r").request(id=name) as r:
                hit = r.match(tokens)
                r.admit()
                return hit.reason

        assert ask([*range(9), 70, *range(100, 150)], "old") == "cold"
        assert ask([*range(9), 71, *range(100, 150)], "new") == "diverged"
        told = story(cache, "new")
        assert (told["token"], told["meet"]) == (9, {"ours": 1, "theirs": 1, "tokens": 38})
        assert ask([*range(5), *range(200, 255)], "other") == "cold"


def test_divergence_behind_an_earlier_answer_is_found() -> None:
    with closing(opened()) as cache:
        handle = cache.namespace(LAYOUT, model="m", revision="r")
        with handle.request(id="first") as r:
            r.match(range(20))
            r.admit()
            r.extend([50, 51, 52])
            r.extend([53, 54, 55, 56, 57])
            assert r.store(pages(), [list(range(7))]).wait(30)
        assert turn(cache, [*range(20), 50, 51, 52, 53, 54, 55, 99, 57, 58, 59], "second") == "diverged"
        told = story(cache, "second")
        assert (told["token"], told["ours"][0], told["theirs"][0]) == (26, 99, 56)


def test_divergence_is_found_in_prompts_given_as_digests() -> None:
    ours, theirs = list(range(40)), list(range(40))
    theirs[22] = 501
    with closing(opened()) as cache:
        handle = cache.namespace(LAYOUT, model="m", revision="r", facts={"digests": "test"})
        for name, ids in (("old", ours), ("new", theirs), ("untold", [*range(30), *range(600, 610)])):
            with handle.request(id=name) as r:
                digests = [hashlib.sha256(str(ids[: end + 4]).encode()).digest() for end in range(0, 40, 4)]
                hit = r.match(None if name == "untold" else ids, digests=digests)
                r.admit()
                ids[:4] = [9] * 4  # the caller's buffer is his own
                assert r.store(pages(), [list(range(10 - hit.blocks))], first_block=hit.blocks).wait(30)
        assert misses(cache) == {"cold": 1, "diverged": 2}
        told = story(cache, "new")
        assert (told["block"], told["token"], told["other"]["request"]) == (5, 22, "old")
        assert (told["before"][-2:], told["ours"][:2], told["theirs"][:2]) == ([20, 21], [501, 23], [22, 23])
        told = story(cache, "untold")
        assert (told["block"], told["other"]["request"], "token" in told) == (7, "old", False)


@pytest.mark.parametrize(
    ("field", "value", "differs"),
    [
        ("model", "other", {"model": ["other", "m"]}),
        ("adapter", "a", {"adapter": ["a", "None"]}),
        ("tenant", "t", {"tenant": ["t", "default"]}),
        ("cache_salt", "secret", {"cache_salt": ["set", "none"]}),
        ("facts", {"rope": 2}, {"facts.rope": ["2", "None"]}),
    ],
)
def test_a_namespace_mismatch_names_the_field(field: str, value: Any, differs: dict[str, list[str]]) -> None:
    with closing(opened()) as cache:
        turn(cache, range(40), "one")
        assert turn(cache, range(40), "two", **{field: value}) == "cold", "an answer tells nothing of other tenants"
        assert misses(cache) == {"cold": 1, "apart": 1}
        told = story(cache, "two")
        assert told["reason"] == "apart"
        assert told["other"]["request"] == "one"
        assert told["differs"] == differs
        assert "secret" not in str(told)


def test_an_empty_namespace_is_no_namespace_mismatch() -> None:
    with closing(opened()) as cache:
        turn(cache, range(40), "one", store=False)
        turn(cache, range(40), "two", tenant="t")
        assert misses(cache) == {"cold": 2}


def test_a_store_dropped_for_capacity_is_the_reason() -> None:
    with closing(opened(host="72KiB")) as cache:
        assert turn(cache, range(40), "one") == "cold"
        hit_reason = turn(cache, range(40), "two")
        assert hit_reason == "store_dropped"
        told = story(cache, "two")
        assert (told["tier"], told["why"]) == ("host", "no room")
        assert meaning("drops", "reason", told["why"])


def test_a_damaged_record_is_a_verification_failure(tmp_path: Path) -> None:
    with closing(opened(tmp_path)) as cache:
        turn(cache, range(40), "one")
        assert cache.flush(30)
    for segment in (tmp_path / "nvme").glob("segment-*"):
        data = bytearray(segment.read_bytes())
        for slot in range(len(data) // 12288):
            data[slot * 12288 + 8192] ^= 1
        segment.write_bytes(data)
    with closing(opened(tmp_path)) as cache:
        assert turn(cache, range(40), "two") == ""
        assert misses(cache) == {"refused": 1}
        assert cache.counters.get("missed_tokens", reason="refused") == 40
        told = story(cache, "two")
        assert (told["reason"], told["tier"], told["why"], told["found_blocks"]) == ("refused", "nvme", "damaged", 0)
        assert turn(cache, [*range(40), *range(90, 98)], "three") == "cold"


def test_a_miss_is_counted_once_per_request() -> None:
    with closing(opened()) as cache:
        handle = cache.namespace(LAYOUT, model="m", revision="r")
        with handle.request() as r:
            for _ in range(5):
                r.match(range(40))
            r.admit()
            r.match()
            assert misses(cache) == {}
            assert r.store(pages(), [list(range(4))]).wait(30)
            assert misses(cache) == {"cold": 1}
            assert r.store(pages(), [list(range(4, 8))], first_block=4).wait(30)
        assert misses(cache) == {"cold": 1}
        with handle.request() as r:
            r.match(range(500, 540))
        assert misses(cache) == {"cold": 1}, "what is not admitted is not counted"


def test_zero_history_keeps_no_prompts() -> None:
    with closing(opened(memory="0")) as cache:
        turn(cache, range(40), "one")
        assert turn(cache, [*range(20), *range(100, 120)], "two") == "cold"
        assert len(cache.miss_explainer.recent_requests) == 0


# the parts


def test_recorded_prompts_are_copies_of_the_buffer() -> None:
    for ids in (np.arange(16, dtype=np.uint32), np.arange(16, dtype=np.int64), np.arange(32, dtype=np.uint32)[::2]):
        mine, before = kept(ids), ids.tolist()
        ids[:] = 7
        assert mine.tolist() == before
        assert mine.dtype == np.uint32
    packed = np.frombuffer(bytes(range(64)), "<u4")
    assert kept(packed[:8]).base is not None, "no caller can change it: no copy"
    with closing(opened()) as cache:
        buffer = np.arange(40, dtype=np.uint32)
        handle = cache.namespace(LAYOUT, model="m", revision="r")
        with handle.request(id="r") as r:
            r.match(buffer)
            r.admit()
            buffer[:] = 0
        assert story(cache, "r")["ids"][:4] == [0, 1, 2, 3]


@given(st.lists(st.integers(0, 2), max_size=40), st.lists(st.integers(0, 2), max_size=40))
def test_shared_tokens_is_the_common_prefix_length(one: list[int], other: list[int]) -> None:
    def front(a: list[Any], b: list[Any]) -> int:
        return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))

    assert shared_tokens(np.array(one, np.uint32), np.array(other, np.uint32)) == front(one, other)
    chains = [b"".join(hashlib.sha256(bytes(c[: i + 1])).digest() for i in range(len(c))) for c in (one, other)]
    assert shared_blocks(*chains) == front(one, other)


@given(st.lists(st.integers(0, 9), max_size=20), st.lists(st.integers(10, 19), max_size=20), st.integers(8, 60))
def test_resync_point_finds_the_common_rest(ours: list[int], theirs: list[int], after: int) -> None:
    same = list(range(100, 100 + after))
    met = resync_point(np.array([*ours, *same], np.uint32), np.array([*theirs, *same], np.uint32))
    assert met == (len(ours), len(theirs), after)
    assert resync_point(np.arange(50, dtype=np.uint32), np.arange(100, 150, dtype=np.uint32)) is None


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 8)), max_size=60), st.integers(200, 3000))
def test_the_request_ring_is_bounded_and_searchable(prompts: list[tuple[int, int]], most: int) -> None:
    ring, model = RecentRequests(most, requests=10), []
    for number, (chain, blocks) in enumerate(prompts):
        packed = b"".join(bytes([chain, i]).ljust(32, b"\0") for i in range(blocks))
        ids = [np.full(4 * blocks, chain, np.uint32)]
        asked = RecentRequest(f"r{number}", b"n" * 32, [], 4, packed, number, float(number), ids)
        ring.add(asked)
        if asked.size_bytes <= most:
            model.append(asked)
        while len(model) > 10 or sum(each.size_bytes for each in model) > most:
            model.pop(0)
        assert ring.last() == model[::-1]
        same = [each for each in model[::-1] if each.packed[:32] == packed[:32]]
        assert ring.same_head(b"n" * 32, packed[:32]) == same
        assert list(ring.same_start(ids[0])) == same


@given(st.lists(st.tuples(st.integers(0, 30), st.sampled_from(["host", "nvme"])), max_size=100))
def test_eviction_history_keeps_the_last_event_of_a_block(events: list[tuple[int, str]]) -> None:
    lost, model = EvictionHistory(SystemClock(), blocks=8), {}
    for clock, (block, tier) in enumerate(events):
        lost.add([bytes([block])], "evicted", tier=tier, why="lru", clock=clock)
        model.pop(block, None)
        model[block] = (tier, clock)
        assert len(lost) <= 16
        for recent in list(model)[-8:]:
            fate = lost.find(bytes([recent]))
            assert fate is not None
            assert (fate.tier, fate.clock) == model[recent]


def test_a_failed_write_below_is_the_reason_of_the_miss() -> None:
    lost = EvictionHistory(SystemClock())
    lost.add([b"a"], "store_failed", tier="nvme", why="failed", clock=1)
    lost.add([b"a", b"b"], "evicted", tier="host", why="lru", clock=2)
    assert [lost.find(s).reason for s in (b"a", b"b")] == ["store_failed", "evicted"]  # type: ignore[union-attr]
    lost.add([b"a"], "evicted", tier="nvme", why="lru", clock=3)
    assert lost.find(b"a").reason == "evicted"  # type: ignore[union-attr]
