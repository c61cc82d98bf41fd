"""Memory that other processes map: what they may do with it, and what they see of it when it is gone."""

from __future__ import annotations

import mmap
import os
import sys

import pytest

from kvcache.os_env import InlineExecutor
from kvcache.tier.host.arena import PAGE_BYTES, Arena, Region

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="files in memory are Linux's")


def mapped(region: Region, *, writable: bool) -> mmap.mmap:
    descriptor = region.export(writable=writable)
    try:
        return mmap.mmap(descriptor, 0, prot=mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))
    finally:
        os.close(descriptor)


def test_a_client_mapping_is_read_only_by_default() -> None:
    region = Region(8 * PAGE_BYTES, shared=True)
    reader, writer = mapped(region, writable=False), mapped(region, writable=True)
    region.view[PAGE_BYTES : PAGE_BYTES + 4] = b"abcd"
    for _ in range(7):
        region.renew_generations([3])
    assert reader[PAGE_BYTES : PAGE_BYTES + 4] == b"abcd"
    assert int.from_bytes(reader[8 * PAGE_BYTES + 24 : 8 * PAGE_BYTES + 32], "little") == 7
    writer[0:1] = b"x"
    assert region.view[0] == ord("x")
    descriptor = region.export(writable=False)
    with pytest.raises(PermissionError):
        mmap.mmap(descriptor, 0)
    os.close(descriptor)


def test_the_memory_cannot_be_reopened_for_writing() -> None:
    region = Region(8 * PAGE_BYTES, shared=True)
    descriptor = region.export(writable=False)
    assert os.fstat(descriptor).st_mode & 0o777 == 0o600
    os.close(descriptor)


def test_clients_cannot_change_generations() -> None:
    """Of slots that come back at once, the first one's word is the last that there is, or none."""
    for written in (b"\xff" * 8, bytes(8)):
        arena = Arena(8 * PAGE_BYTES, 8 * PAGE_BYTES, InlineExecutor(), shared=True)
        slots = arena.allocate_many(PAGE_BYTES, "one", 8)
        told = {slot.i: slot.generation for slot in slots}
        writer = mapped(slots[0].slab.region, writable=True)
        for i in range(8):
            writer[8 * PAGE_BYTES + 8 * i : 8 * PAGE_BYTES + 8 * i + 8] = written
        arena.release(*slots[1:])
        again = arena.allocate_many(PAGE_BYTES, "one", 7)
        for slot in again:
            assert slot.generation == told[slot.i] + 1
            assert int.from_bytes(writer[8 * PAGE_BYTES + 8 * slot.i :][:8], "little") == slot.generation
        arena.release(slots[0], *again)
        assert arena.used_bytes == 0
        assert arena.check() == []


def test_generations_wrap_around() -> None:
    region = Region(8 * PAGE_BYTES, shared=True)
    region.generations[3] = (1 << 64) - 1
    region.renew_generations([3])
    assert region.generations[3] == 1


def test_the_memory_cannot_be_resized() -> None:
    region = Region(8 * PAGE_BYTES, shared=True)
    descriptor = region.export(writable=True)
    for size in (0, 64 << 20):  # of whole pages, huge ones too
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, size)
    os.close(descriptor)


def test_punched_pages_read_zero_and_use_no_memory() -> None:
    region = Region(64 * PAGE_BYTES, shared=True)
    reader = mapped(region, writable=False)
    region.view[:] = b"s" * len(region.view)
    assert region.descriptor is not None
    region.punch_hole()
    assert os.fstat(region.descriptor).st_blocks == 0
    assert not any(reader[:])


def test_a_region_has_a_generation_for_every_slot() -> None:
    for shared in (False, True):
        for pages in (1, 8, 1024, 4096):
            assert len(Region(pages * PAGE_BYTES, shared=shared).generations) >= pages


def test_an_exported_region_is_not_reused_by_another_tenant() -> None:
    arena = Arena(8 * PAGE_BYTES, 8 * PAGE_BYTES, InlineExecutor(), shared=True)
    slot = arena.allocate(PAGE_BYTES, "one")
    assert slot is not None
    slot.view[:] = b"1" * PAGE_BYTES
    reader = mapped(slot.slab.region, writable=False)
    arena.release(slot)
    other = arena.allocate(PAGE_BYTES, "two")
    assert other is not None
    assert other.slab.region is not slot.slab.region
    other.view[:] = b"2" * PAGE_BYTES
    assert not any(reader[:]), "what the first tenant maps shows the second one's bytes, or keeps memory"
    assert arena.check() == []


def test_an_unmapped_region_is_reused() -> None:
    arena = Arena(8 * PAGE_BYTES, 8 * PAGE_BYTES, InlineExecutor(), shared=True)
    slot = arena.allocate(PAGE_BYTES, "one")
    assert slot is not None
    generation = slot.generation
    arena.release(slot)
    again = arena.allocate(2 * PAGE_BYTES, "two")
    assert again is not None
    assert again.slab.region is slot.slab.region
    assert again.generation != generation or again.i != slot.i
    assert again.slab.number != slot.slab.number
