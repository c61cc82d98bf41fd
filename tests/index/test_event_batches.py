"""The ring of changes: in order, bounded, and who missed something is told so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvcache.index.kv_events import KVEvent, KVEvents
from kvcache.os_env import SystemClock


class TurnedClock(SystemClock):
    def __init__(self) -> None:
        self.time = 1e9

    def wall(self) -> float:
        return self.time


ONE, OTHER = b"1" * 32, b"2" * 32


def change(i: int, namespace: bytes = ONE, blocks: int = 1) -> KVEvent:
    return KVEvent("stored", "host", namespace, 0, (0, 1, 0, 1), b"", i.to_bytes(32, "big") * blocks)


def ring(kept: int = 1 << 18, tenant_of: Callable[[bytes], str] = lambda namespace: "") -> KVEvents:
    return KVEvents(TurnedClock(), tenant_of, kept)


def test_no_events_are_kept_before_the_first_subscriber() -> None:
    changes = ring()
    assert not changes.on
    begun = changes.since(None, [])
    assert changes.on
    assert not begun.lost
    assert not begun.kv_events
    changes.add(change(1))
    assert changes.since(begun.next, [ONE]).kv_events == [change(1)]


@given(st.lists(st.sampled_from([ONE, OTHER]), max_size=40), st.integers(1, 7))
def test_a_subscriber_gets_each_event_once_in_order(owners: list[bytes], every: int) -> None:
    changes = ring()
    told = changes.since(None, [])
    heard: list[Any] = []
    for i, owner in enumerate(owners):
        changes.add(change(i, owner))
        if i % every == 0:
            told = changes.since(told.next, [ONE])
            assert not told.lost
            heard += told.kv_events
    heard += changes.since(told.next, [ONE]).kv_events
    assert heard == [change(i, owner) for i, owner in enumerate(owners) if owner == ONE]


def test_lost_events_are_reported() -> None:
    changes = ring(kept=3)
    begun = changes.since(None, [])
    for i in range(5):
        changes.add(change(i))
    told = changes.since(begun.next, [ONE])
    assert told.lost
    assert told.kv_events == [change(i) for i in (2, 3, 4)]
    assert not changes.since(told.next, [ONE]).lost


def test_a_cursor_of_an_earlier_process_reports_loss() -> None:
    clock = TurnedClock()
    old = KVEvents(clock)
    number = old.since(None, []).next
    for i in range(9):
        old.add(change(i))
    clock.time += 1
    new = KVEvents(clock)
    new.since(None, [])
    assert new.since(number + 9, [ONE]).lost
    assert not new.since(new.since(number + 9, [ONE]).next, [ONE]).lost


def test_an_answer_has_an_end(monkeypatch: Any) -> None:
    monkeypatch.setattr("kvcache.index.kv_events.MAX_BATCH_BLOCKS", 4)
    changes = ring()
    told = changes.since(None, [])
    for i in range(5):
        changes.add(change(i, blocks=3))
    counts = []
    while True:
        told = changes.since(told.next, [ONE])
        if not told.kv_events:
            break
        counts.append(len(told.kv_events))
    assert counts == [2, 2, 1]


def owner(namespace: bytes) -> str:
    return namespace[:1].decode()


@given(
    st.lists(st.tuples(st.sampled_from([ONE, OTHER]), st.integers(1, 5)), max_size=60),
    st.integers(1, 7),
    st.integers(1, 40),
)
def test_a_tenants_sequence_counts_only_its_events(given_: list[tuple[bytes, int]], every: int, kept: int) -> None:
    """As if no other tenant was there; and one that has no more than half loses nothing to another."""
    both, alone = ring(kept, owner), ring(1 << 20, owner)
    told, truth = (changes.since(None, [], "1") for changes in (both, alone))
    assert told == truth
    everything, heard, missed = both.since(None, []), list[Any](), False
    for i, (namespace, blocks) in enumerate(given_):
        both.add(change(i, namespace, blocks))
        if namespace == ONE:
            alone.add(change(i, namespace, blocks))
        if i % every == 0:
            told, truth = both.since(told.next, [ONE], "1"), alone.since(truth.next, [ONE], "1")
            assert told.next == truth.next
            if not told.lost:
                assert told.kv_events == truth.kv_events
            everything = both.since(everything.next, [ONE, OTHER])
            missed |= everything.lost
            heard += everything.kv_events
        assert sum(each.blocks for of in both._rings.values() for _, each in of.rows) <= kept
    everything = both.since(everything.next, [ONE, OTHER])
    heard += everything.kv_events
    if not (missed or everything.lost):
        assert heard == [change(i, *each) for i, each in enumerate(given_)]


def test_the_largest_holder_loses_first() -> None:
    changes = ring(10, owner)
    quiet, loud = (changes.since(None, [], tenant) for tenant in "12")
    for i in range(5):
        changes.add(change(i, ONE))
    for i in range(100):
        changes.add(change(i, OTHER))
    mine = changes.since(quiet.next, [ONE], "1")
    assert (mine.lost, len(mine.kv_events)) == (False, 5)
    theirs = changes.since(loud.next, [OTHER], "2")
    assert (theirs.lost, len(theirs.kv_events)) == (True, 5)
