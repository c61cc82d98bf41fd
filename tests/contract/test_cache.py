"""The promises of `kvcache/cache/api.py`, for every implementation."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import kvcache
from kvcache.block.layout import KVLayout
from kvcache.cache.api import SupportsKVEvents
from kvcache.testing.naive_cache import NaiveCache
from kvcache.tier.tier import Outcome
from tests.contract.fake_engine import FULL, HYBRID, Engine, bind, store


def test_stored_blocks_load_bit_for_bit(cache: Any) -> None:
    handle, engine = bind(cache), Engine(FULL)
    tokens = list(range(22))  # five blocks and a half
    engine.fill(1, [3, 9, 4, 30, 7])
    expected = [engine.block(p) for p in (3, 9, 4, 30, 7)]
    assert store(handle, engine, tokens, [3, 9, 4, 30, 7]).blocks == 5
    engine.poison()
    with handle.request() as r:
        hit = r.match(tokens)
        assert (hit.blocks, hit.tokens, hit.reason) == (5, 20, "")
        assert sum(hit.by_tier.values()) == 5
        r.admit()
        transfer = r.load(5, engine.described, engine.ids([0, 1, 2, 40, 50]))
        assert transfer.wait(30)
        assert transfer.done
        assert transfer.wait_layer(0)
        assert transfer.outcomes == (Outcome.DONE,) * 5
    assert [engine.block(p) for p in (0, 1, 2, 40, 50)] == expected
    assert np.isnan(engine.memory[0][0][:, 3]).all(), "a page that was not named was written"


def test_compute_times_only_change_the_hit_length(cache: Any) -> None:
    handle, engine = bind(cache), Engine(FULL)
    tokens = list(range(22))
    engine.fill(1, [0, 1, 2, 3, 4])
    expected = [engine.block(p) for p in range(5)]
    store(handle, engine, tokens, [0, 1, 2, 3, 4])
    for seconds in (1000.0, *[1e-12] * 9):  # an engine that never ends; then one that takes no time
        handle.computed(16, seconds)
        with handle.request() as r:
            hit = r.match(tokens)
            assert (hit.blocks, hit.reason) == (5, "") or (seconds < 1 and hit.reason == "below_plan")
            r.admit()
            engine.poison()
            transfer = r.load(hit.blocks, engine.described, engine.ids(list(range(hit.blocks))))
            assert transfer.wait(30)
            assert [engine.block(p) for p in range(transfer.blocks)] == expected[: transfer.blocks]


def test_match_ends_at_the_first_different_block(cache: Any) -> None:
    handle, engine = bind(cache), Engine(FULL)
    tokens = list(range(20))
    store(handle, engine, tokens, [0, 1, 2, 3, 4])
    for wrong in range(20):
        other = tokens.copy()
        other[wrong] += 1000
        with handle.request() as r:
            hit = r.match(other)
            assert hit.blocks == wrong // 4
            assert hit.reason
    with handle.request() as r:
        assert r.match(tokens[:11]).blocks == 2
        assert r.match([]).blocks == 0
        assert r.match([*tokens, 1, 2, 3, 4]).blocks == 5


def test_match_changes_no_state(cache: Any) -> None:
    handle = bind(cache)
    before = cache.stats()
    for _ in range(3):
        with handle.request() as r:
            r.match(range(40))
            r.match()
    assert cache.stats() == before


def test_only_new_blocks_are_stored_behind_a_loaded_prefix(cache: Any) -> None:
    handle, engine = bind(cache), Engine(FULL)
    tokens = list(range(32))
    engine.fill(2, list(range(8)))
    expected = [engine.block(p) for p in range(8)]
    store(handle, engine, tokens[:16], [0, 1, 2, 3])
    with handle.request() as r:
        assert r.match(tokens[:20]).blocks == 4
        r.admit()
        r.extend(tokens[20:])
        assert len(r.signatures) == 8
        assert r.store(engine.described, engine.ids([4, 5, 6, 7]), first_block=4).wait(30)
    engine.poison()
    with handle.request() as r:
        assert r.match(tokens).blocks == 8
        transfer = r.load(8, engine.described, engine.ids([16, 17]), first_block=6)
        assert transfer.wait(30)
        assert transfer.blocks == 2
    assert [engine.block(16), engine.block(17)] == expected[6:]


def test_tokens_of_any_integer_type_are_accepted(cache: Any) -> None:
    handle, engine = bind(cache), Engine(FULL)
    tokens = list(range(100, 116))
    store(handle, engine, tokens, [0, 1, 2, 3])
    for form in (
        tuple(tokens),
        np.array(tokens),
        np.array(tokens, np.uint32),
        range(100, 116),
        np.array(tokens, np.int16),
    ):
        with handle.request() as r:
            assert r.match(form).blocks == 4


def test_extras_and_digests_are_part_of_identity(cache: Any) -> None:
    handle, engine = bind(cache), Engine(FULL)
    tokens = list(range(12))
    with handle.request() as r:
        r.match(tokens, extras=[[], [(b"image", b"\1" * 32)]])
        assert r.store(engine.described, engine.ids([0, 1, 2])).wait(30)
    with handle.request() as r:
        assert r.match(tokens, extras=[[], [(b"image", b"\1" * 32)]]).blocks == 3
        assert r.match(tokens, extras=[[], [(b"image", b"\2" * 32)]]).blocks == 1
        assert r.match(tokens).blocks == 1
    digests = [bytes([i]) * 32 for i in range(3)]
    digested = bind(cache, facts={"identity": "test digests"})
    with digested.request() as r:
        assert r.match(digests=digests).blocks == 0
        assert r.store(engine.described, engine.ids([0, 1, 2])).wait(30)
        assert r.match(digests=digests).blocks == 3
        assert r.match(digests=[*digests[:2], b"\xff" * 32]).blocks == 2
        assert r.match(digests=digests[:1]).blocks == 1
        r.extend(digests=digests[1:])
        assert r.match().blocks == 3


def test_digests_may_begin_within_a_prefix(cache: Any) -> None:
    handle, engine = bind(cache, facts={"identity": "test digests"}), Engine(FULL)
    digests = [bytes([i]) * 32 for i in range(6)]
    engine.fill(5, list(range(6)))
    expected = [engine.block(p) for p in range(6)]

    def keep(first: int, end: int, after: bytes | None) -> int:
        with handle.request() as r:
            r.match(digests=digests[first:end], after=after)
            transfer = r.store(engine.described, engine.ids(list(range(first, end))))
            assert transfer.wait(30)
        return int(transfer.blocks)

    assert keep(2, 4, b"") == 2, "what is before is the engine's to know"
    assert keep(4, 6, digests[3]) == 2
    with handle.request() as r:
        assert r.match(digests=digests).blocks == 0
        assert r.match(digests=digests[2:], after=digests[1]).blocks == 4
        assert r.match(digests=digests[3:5], after=b"").blocks == 2
    assert keep(0, 2, None) == 2
    engine.poison()
    with handle.request() as r:
        assert r.match(digests=digests).blocks == 6
        r.admit()
        transfer = r.load(6, engine.described, engine.ids(list(range(10, 16))))
        assert transfer.wait(30)
        assert transfer.blocks == 6
    assert [engine.block(p) for p in range(10, 16)] == expected


@pytest.mark.parametrize(
    "fields",
    [
        {"model": "n"},
        {"revision": "s"},
        {"adapter": "a"},
        {"tenant": "t"},
        {"cache_salt": "x"},
        {"facts": {"rope": 1}},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_namespaces_share_nothing(cache: Any, fields: dict[str, Any]) -> None:
    engine, tokens = Engine(FULL), list(range(16))
    store(bind(cache), engine, tokens, [0, 1, 2, 3])
    other = bind(cache, **fields)
    with other.request() as r:
        assert r.match(tokens).blocks == 0
        transfer = r.load(4, engine.described, engine.ids([5, 6, 7, 8]))
        assert transfer.wait(30)
        assert transfer.blocks == 0
    assert (engine.memory[0][0][:, 5:9] == 0).all()


def test_each_groups_rule_decides_the_blocks_it_needs(cache: Any) -> None:
    handle, engine = bind(cache, HYBRID), Engine(HYBRID)
    tokens = list(range(24))
    ids = list(range(6))
    engine.fill(3, ids)
    expected = [[engine.block(p, g) for p in ids] for g in range(3)]
    store(handle, engine, tokens, ids)
    engine.poison()
    with handle.request() as r:
        assert r.match(tokens).blocks == 6
        r.admit()
        transfer = r.load(6, engine.described, engine.ids([10, 11, 12, 13, 14, 15]))
        assert transfer.wait(30)
        assert transfer.blocks == 6
    assert [engine.block(p, 0) for p in range(10, 16)] == expected[0]
    assert [engine.block(p, 1) for p in (14, 15)] == expected[1][4:]
    assert engine.block(15, 2) == expected[2][5]
    assert np.isnan(engine.memory[2][0][:, 14]).all(), "a state that the prefix does not need was loaded"


def test_a_missing_block_ends_the_prefix(cache: Any) -> None:
    handle, engine = bind(cache), Engine(FULL)
    store(handle, engine, list(range(8)), [0, 1])
    with handle.request() as r:
        r.match(list(range(16)))
        transfer = r.load(4, engine.described, engine.ids([10, 11, 12, 13]))
        assert transfer.wait(30)
        assert transfer.blocks == 2
        assert Outcome.DONE not in transfer.outcomes[2:]


def test_misuse_is_refused_and_changes_nothing(cache: Any) -> None:
    handle, engine = bind(cache), Engine(FULL)
    wrong = Engine(KVLayout.mha(layers=2, kv_heads=2, head_dim=4, dtype="fp32", block_tokens=4))
    with handle.request() as r:
        for bad in ([1.5], [-1], [1 << 32], "text", [[1]]):
            with pytest.raises(kvcache.TokenError):
                r.match(bad)
        r.match(list(range(8)))
        for pages, ids, first in (
            (wrong.described, [[0, 1]], 0),
            (engine.described, [[0, 1], [0, 1]], 0),
            (engine.described, [[0, 64]], 0),
            (engine.described, [[-1, 0]], 0),
            (engine.described, [[0, 1]], 1),
            ([], [], 0),
        ):
            with pytest.raises(kvcache.LayoutError):
                r.store(pages, ids, first_block=first)
        with pytest.raises(kvcache.LayoutError):
            r.load(3, engine.described, [[0, 1, 2]])
        with pytest.raises(kvcache.LayoutError):
            r.load(2, engine.described, [[0]])
        assert r.match().blocks == 0


def test_two_stores_of_one_block_keep_one_copy(cache: Any) -> None:
    handle, engine = bind(cache), Engine(FULL)
    tokens = list(range(32))
    engine.fill(4, list(range(8)))
    threads = [threading.Thread(target=store, args=(handle, engine, tokens, list(range(8)))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert cache.stats()["tiers"]["host"]["records"] == 8


def test_threads_load_their_own_blocks(cache: Any) -> None:
    handle = bind(cache)
    faults: list[str] = []

    def work(worker: int) -> None:
        engine = Engine(FULL, pages=16)
        for turn in range(8):
            tokens = [worker, turn, *range(30)]
            engine.fill(worker * 100 + turn, list(range(8)))
            expected = [engine.block(p) for p in range(8)]
            store(handle, engine, tokens, list(range(8)))
            engine.poison()
            with handle.request() as r:
                hit = r.match(tokens)
                r.admit()
                transfer = r.load(hit.blocks, engine.described, engine.ids(list(range(8, 8 + hit.blocks))))
                if not transfer.wait(30):
                    faults.append("a load did not end")
                wrong = [i for i in range(transfer.blocks) if engine.block(8 + i) != expected[i]]
                faults.extend(f"worker {worker} turn {turn} block {i}: foreign bytes" for i in wrong)

    threads = [threading.Thread(target=work, args=(w,)) for w in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []


def test_clear_removes_one_namespace(cache: Any) -> None:
    engine, tokens = Engine(FULL), list(range(16))
    mine, other = bind(cache), bind(cache, model="other")
    for handle in (mine, other):
        store(handle, engine, tokens, [0, 1, 2, 3])
    assert cache.flush(30)
    assert mine.clear() >= 4
    assert mine.clear() == 0
    for handle, blocks in ((mine, 0), (other, 4)):
        with handle.request() as r:
            assert r.match(tokens).blocks == blocks
    assert store(mine, engine, tokens, [0, 1, 2, 3]).blocks == 4


def test_a_request_closed_by_an_error_releases_its_holds(cache: Any) -> None:
    handle, engine = bind(cache), Engine(FULL)
    tokens = list(range(16))
    store(handle, engine, tokens, [0, 1, 2, 3])

    def abort() -> None:
        with handle.request() as r:
            r.match(tokens)
            r.admit()
            raise InterruptedError

    with pytest.raises(InterruptedError):
        abort()
    held = cache.stats()["tiers"]["host"].get("held_bytes", 0)
    assert held == 0


def test_a_cache_is_left_closed(cache: Any) -> None:
    with cache as entered:
        assert entered is cache
    cache.close()
    with pytest.raises(kvcache.ClosedError):
        bind(cache)


def test_implementations_have_the_face() -> None:
    faces: list[kvcache.KVCache] = [NaiveCache()]
    assert {name for name in vars(kvcache.KVCache) if not name.startswith("_")} <= set(dir(faces[0]))


def test_events_name_a_chain_in_order_with_its_parent(cache: Any) -> None:
    if not isinstance(cache, SupportsKVEvents):
        pytest.skip("this one tells nothing")
    handle, other, engine = bind(cache), bind(cache, model="other"), Engine(FULL)
    tokens = list(range(32))
    number = cache.kv_events(None, [handle]).next
    store(handle, engine, tokens[:16], [0, 1, 2, 3])
    store(other, engine, tokens, list(range(8)))
    with handle.request() as r:
        r.match(tokens)
        assert r.store(engine.described, engine.ids([4, 5, 6, 7]), first_block=4).wait(30)
        signatures = [handle.event_signature(signature) for signature in r.signatures]
    told = cache.kv_events(number, [handle])
    stored = [c for c in told.kv_events if c.tier == "host"]
    assert not told.lost
    assert [c.kind for c in stored] == ["stored", "stored"]
    assert [c.each for c in stored] == [signatures[:4], signatures[4:]]
    assert [c.parent for c in stored] == [handle.id, signatures[3]]
    handle.clear()
    gone = [
        s
        for c in cache.kv_events(told.next, [handle]).kv_events
        if c.kind == "removed" and c.tier == "host"
        for s in c.each
    ]
    assert sorted(gone) == sorted(signatures)
