"""The ring of changes: in order, bounded, and who missed something is told so."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvcache.observe.changes import Change, Changes
from kvcache.port import SystemClock


class TurnedClock(SystemClock):
    def __init__(self) -> None:
        self.time = 1e9

    def wall(self) -> float:
        return self.time


ONE, OTHER = b"1" * 32, b"2" * 32


def change(i: int, namespace: bytes = ONE, blocks: int = 1) -> Change:
    return Change("stored", "host", namespace, 0, (0, 1, 0, 1), b"", i.to_bytes(32, "big") * blocks)


def ring(kept: int = 1 << 18) -> Changes:
    return Changes(TurnedClock(), kept)


def test_nothing_is_kept_before_somebody_asks() -> None:
    changes = ring()
    assert not changes.on
    begun = changes.since(None, [])
    assert changes.on
    assert not begun.lost
    assert not begun.changes
    changes.add(change(1))
    assert changes.since(begun.next, [ONE]).changes == [change(1)]


@given(st.lists(st.sampled_from([ONE, OTHER]), max_size=40), st.integers(1, 7))
def test_a_follower_hears_each_change_of_its_own_once_and_in_order(owners: list[bytes], every: int) -> None:
    changes = ring()
    told = changes.since(None, [])
    heard: list[Any] = []
    for i, owner in enumerate(owners):
        changes.add(change(i, owner))
        if i % every == 0:
            told = changes.since(told.next, [ONE])
            assert not told.lost
            heard += told.changes
    heard += changes.since(told.next, [ONE]).changes
    assert heard == [change(i, owner) for i, owner in enumerate(owners) if owner == ONE]


def test_what_is_not_kept_any_more_is_said() -> None:
    changes = ring(kept=3)
    begun = changes.since(None, [])
    for i in range(5):
        changes.add(change(i))
    told = changes.since(begun.next, [ONE])
    assert told.lost
    assert told.changes == [change(i) for i in (2, 3, 4)]
    assert not changes.since(told.next, [ONE]).lost


def test_another_process_is_not_taken_for_this_one() -> None:
    clock = TurnedClock()
    old = Changes(clock)
    number = old.since(None, []).next
    for i in range(9):
        old.add(change(i))
    clock.time += 1
    new = Changes(clock)
    new.since(None, [])
    assert new.since(number + 9, [ONE]).lost
    assert not new.since(new.since(number + 9, [ONE]).next, [ONE]).lost


def test_an_answer_has_an_end(monkeypatch: Any) -> None:
    monkeypatch.setattr("kvcache.observe.changes.TOLD_BLOCKS", 4)
    changes = ring()
    told = changes.since(None, [])
    for i in range(5):
        changes.add(change(i, blocks=3))
    counts = []
    while True:
        told = changes.since(told.next, [ONE])
        if not told.changes:
            break
        counts.append(len(told.changes))
    assert counts == [2, 2, 1]
