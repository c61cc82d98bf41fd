"""What is lent: a reader that is too slow is told by the generation, a writer that is too slow harms no other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from kvcache.tier.tier import Outcome
from kvcache.transfer.copier import Copier, CopierRegistry, CopyHandle
from tests.contract.fake_engine import Engine
from tests.daemon.daemon_process import LAYOUT, bound_to, load, store
from tests.daemon.in_process_daemon import InProcessDaemon, until


class Slow(CopierRegistry):
    """A client's copiers, which wait within each copy until they are let go."""

    def __init__(self) -> None:
        super().__init__(lambda call: call())
        self.entered, self.go = threading.Event(), threading.Event()

    def of(self, device: str) -> Copier:
        waiting, copier = self, super().of(device)

        class Waiting:
            def mark(self) -> Any:
                return copier.mark()

            def gather(self, *arguments: Any, **more: Any) -> CopyHandle:
                waiting.entered.set()
                assert waiting.go.wait(60)
                return copier.gather(*arguments, **more)

            def scatter(self, *arguments: Any, **more: Any) -> CopyHandle:
                waiting.entered.set()
                assert waiting.go.wait(60)
                return copier.scatter(*arguments, **more)

        return Waiting()


@pytest.fixture
def brief(make_in_process: Callable[..., InProcessDaemon]) -> InProcessDaemon:
    """With leases that a client soon outlasts. What is stored beside goes into its cache by no lease at all."""
    return make_in_process(daemon__lease_s=0.2)


def test_a_reader_past_its_lease_gets_a_miss(brief: InProcessDaemon) -> None:
    in_process, slow, engine = brief, Slow(), Engine(LAYOUT)
    own, cache = bound_to(in_process.cache), in_process.open()
    store(own, list(range(16)), 1)
    cache.copiers = slow
    with bound_to(cache).request() as r:
        assert r.match(list(range(16))).blocks == 4
        transfer = r.load(4, engine.described, engine.ids([8, 9, 10, 11]))
        assert slow.entered.wait(60)
        until(lambda: in_process.held_blocks == 0)  # the daemon has given it up
        for turn in range(8):  # as much as host can have, and more: the slots that are read are given out again
            store(own, [1000 + turn, *range(63)], turn)
        slow.go.set()
        assert transfer.wait(60)
        assert Outcome.DONE not in transfer.outcomes
        assert transfer.blocks == 0


def test_a_writer_past_its_lease_changes_no_other_block(brief: InProcessDaemon) -> None:
    in_process, slow, engine = brief, Slow(), Engine(LAYOUT)
    own, cache = bound_to(in_process.cache), in_process.open()
    engine.fill(9, [0, 1, 2, 3])
    cache.copiers = slow
    with bound_to(cache).request() as r:
        r.match(list(range(16)))
        transfer = r.store(engine.described, engine.ids([0, 1, 2, 3]))
        assert slow.entered.wait(60)
        until(lambda: in_process.cache.tier_manager.flush(0))  # the daemon has given it up
        expected = {turn: store(own, [2000 + turn, *range(31)], turn) for turn in range(7)}
        assert r.match().blocks == 0
        slow.go.set()
        assert transfer.wait(60)
        assert Outcome.DONE not in transfer.outcomes
    for turn, blocks in expected.items():
        found = load(own, [2000 + turn, *range(31)])
        assert found == blocks[: len(found)]
    until(lambda: in_process.leaked_slots == 0)  # what was lent is back once the client has hung up


def test_a_partial_store_is_never_visible(in_process: InProcessDaemon) -> None:
    cache, slow, engine = in_process.open(), Slow(), Engine(LAYOUT)
    cache.copiers = slow
    with bound_to(cache).request() as r:
        r.match(list(range(16)))
        transfer = r.store(engine.described, engine.ids([0, 1, 2, 3]))
        assert slow.entered.wait(60)
        with bound_to(in_process.open()).request() as other:
            assert other.match(list(range(16))).blocks == 0
        slow.go.set()
        assert transfer.wait(60)


def test_a_disconnect_releases_a_clients_holds(in_process: InProcessDaemon) -> None:
    cache = in_process.open()
    handle = bound_to(cache)
    store(handle, list(range(40)), 1)
    requests = [handle.request() for _ in range(3)]
    for r in requests:
        r.match(list(range(40)))
        r.admit()
    assert in_process.held_blocks > 0
    cache.close()
    until(lambda: in_process.daemon.sessions == [])
    assert in_process.held_blocks == 0


def test_a_lease_lasts_while_its_request_waits(in_process: InProcessDaemon) -> None:
    """Only a copy has one: what is held belongs to the request, which may wait as long as it likes."""
    cache = in_process.open()
    handle = bound_to(cache)
    expected = store(handle, list(range(16)), 1)
    with handle.request() as r:
        r.match(list(range(16)))
        r.admit()
        other = bound_to(in_process.open())
        for turn in range(12):
            store(other, [3000 + turn, *range(63)], turn)
        engine = Engine(LAYOUT)
        transfer = r.load(4, engine.described, engine.ids([0, 1, 2, 3]))
        assert transfer.wait(60)
        assert [engine.block(i) for i in range(4)] == expected
        assert transfer.blocks == 4


def test_released_memory_is_unmapped_and_not_shared(in_process: InProcessDaemon) -> None:
    cache = in_process.open(threads=1)  # each connection receives extents by itself: there is one
    one, two = bound_to(cache, tenant="one"), bound_to(cache, tenant="two")
    store(one, list(range(64)), 1)
    (first,) = cache.connection.mappings.numbers
    for turn in range(200):  # until the first tenant's extent is emptied, and its memory released
        store(two, [4000 + turn, *range(63)], turn)
        if {slab.tenant for slab in in_process.cache.host.arena.slabs()} == {"two"}:
            break
    assert load(one, list(range(64))) == []
    there = {slab.number for slab in in_process.cache.host.arena.slabs()}
    dropped = set(cache.connection.mappings.numbers) - there
    assert first not in there
    store(two, [5000, *range(15)], 9)  # behind whose lending the daemon may drop more
    assert dropped.isdisjoint(cache.connection.mappings.numbers)
    assert first not in cache.connection.mappings.numbers
    assert {slab.tenant for slab in in_process.cache.host.arena.slabs()} == {"two"}


def test_a_cancelled_transfer_ends_on_both_sides(in_process: InProcessDaemon) -> None:
    cache, slow, engine = in_process.open(), Slow(), Engine(LAYOUT)
    handle = bound_to(cache)
    store(handle, list(range(16)), 1)
    cache.copiers = slow
    with handle.request() as r:
        r.match(list(range(16)))
        first = r.load(4, engine.described, engine.ids([0, 1, 2, 3]))
        assert slow.entered.wait(60)
        first.cancel()
        slow.go.set()
        assert first.wait(60)
    assert load(handle, list(range(16)))
