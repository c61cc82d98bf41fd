"""Extents and slots: one size and one tenant an extent, released when empty, never two owners of a slot."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvcache.os_env import InlineExecutor
from kvcache.tier.host.arena import PAGE_BYTES, Arena, Slot

KiB = 1 << 10


def arena(capacity: int = 64 * PAGE_BYTES, slab: int = 8 * PAGE_BYTES) -> Arena:
    return Arena(capacity, slab, InlineExecutor())


@given(st.lists(st.tuples(st.sampled_from([1, 2, 3, 9]), st.sampled_from("ab"), st.integers(0, 30)), max_size=120))
def test_slots_never_overlap_and_are_all_released(steps: list[tuple[int, str, int]]) -> None:
    memory = arena()
    taken: list[tuple[Slot, int]] = []
    for pages, tenant, which in steps:
        slot = memory.allocate(pages * PAGE_BYTES, tenant)
        if slot is None:
            assert memory.free_slots(pages * PAGE_BYTES) == 0 or any(e.tenant != tenant for e in memory.slabs())
            if taken:
                back, _ = taken.pop(which % len(taken))
                memory.release(back)
            continue
        mark = len(taken) + 1
        slot.view[:] = bytes([mark % 256]) * len(slot.view)
        assert len(slot.view) == pages * PAGE_BYTES
        assert slot.slab.tenant == tenant
        taken.append((slot, mark))
        assert memory.check() == []
    for slot, mark in taken:
        assert bytes(slot.view) == bytes([mark % 256]) * len(slot.view), "another slot wrote here"
    for slot, _ in taken:
        memory.release(slot)
    assert memory.check() == []
    assert (memory.used_bytes, memory.mapped_bytes) == (0, 0)


def test_a_slot_under_read_is_not_reused() -> None:
    memory = arena(capacity=PAGE_BYTES, slab=PAGE_BYTES)
    slot = memory.allocate(PAGE_BYTES, "a")
    assert slot is not None
    memory.acquire(slot)
    memory.release(slot)
    assert memory.allocate(PAGE_BYTES, "a") is None
    memory.release(slot)
    assert memory.allocate(PAGE_BYTES, "a") is not None


def test_a_failed_allocation_prepares_nothing() -> None:
    """A store in a full tier asks in vain first; what is free there may be another's."""
    work: list[object] = []

    class Recorder(InlineExecutor):
        def submit(self, call: Callable[[], Any]) -> Future[Any]:
            work.append(call)
            return super().submit(call)

    memory = Arena(2 * PAGE_BYTES, 2 * PAGE_BYTES, Recorder())
    assert len(memory.allocate_many(PAGE_BYTES, "another", 1)) == 1
    begun = len(work)
    assert memory.spare_bytes("a") >= PAGE_BYTES
    assert memory.allocate_many(PAGE_BYTES, "a", 1) == []
    assert len(work) == begun


def test_a_reused_slot_has_a_new_generation() -> None:
    memory = arena(capacity=8 * PAGE_BYTES)
    keep, first = memory.allocate(PAGE_BYTES, "a"), memory.allocate(PAGE_BYTES, "a")
    assert keep is not None
    assert first is not None
    memory.release(first)
    second = memory.allocate(PAGE_BYTES, "a")
    assert second is not None
    assert (second.i, second.generation) == (first.i, first.generation + 1)


def test_an_emptied_extent_serves_another_size_and_tenant() -> None:
    memory = arena(capacity=8 * PAGE_BYTES)
    for turn in range(50):
        size, tenant = (1 + turn % 8) * PAGE_BYTES, "ab"[turn % 2]
        slots = []
        while (slot := memory.allocate(size, tenant)) is not None:
            slots.append(slot)
        assert len(slots) == 8 * PAGE_BYTES // size
        for slot in slots:
            memory.release(slot)
    assert memory.check() == []


def test_a_record_larger_than_an_extent_gets_its_own() -> None:
    memory = arena(capacity=32 * PAGE_BYTES, slab=4 * PAGE_BYTES)
    slot = memory.allocate(20 * PAGE_BYTES, "a")
    assert slot is not None
    assert len(slot.view) == 20 * PAGE_BYTES
    assert memory.allocate(20 * PAGE_BYTES, "a") is None
    assert memory.check() == []
