"""What one cache leaves to the next: the same bytes in the same order of use, or nothing; never another's."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_digest

from kvcache.block.record import header_area
from kvcache.cache.cache import Cache
from kvcache.cache.warm_restart import RECORD_ROW, WarmRestart, export_state
from kvcache.settings.sources import load as load_settings
from tests.contract.fake_engine import Engine
from tests.daemon.daemon_process import LAYOUT, bound_to, load, store

KiB = 1 << 10
RECORD = header_area(8 * KiB) + 8 * KiB
EXTENT = 16 * RECORD
"""Sixteen records."""


def prompt(number: int, blocks: int = 8) -> list[int]:
    return [number, *range(1, blocks * LAYOUT.block_tokens)]


def expected(seed: int, blocks: int = 8) -> list[bytes]:
    engine = Engine(LAYOUT)
    engine.fill(seed, list(range(blocks)))
    return [engine.block(i) for i in range(blocks)]


def blocks(handle: Any, tokens: list[int]) -> dict[str, int]:
    with handle.request() as r:
        return dict(r.match(tokens).by_tier)


Open = Callable[..., Cache]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Open]:
    caches: list[Cache] = []

    def open_cache(*, nvme: bool = False, slabs: int = 4, **more: Any) -> Cache:
        host = {"capacity_bytes": slabs * EXTENT, "slab_bytes": EXTENT}
        drive = {"enabled": nvme, "path": tmp_path / "nvme", "capacity_bytes": "64MiB", "min_free_bytes": 0}
        caches.append(Cache(load_settings(None, host=host, nvme=drive, **more), shared=True))
        return caches[-1]

    yield open_cache
    for cache in caches:
        cache.close()


def left(cache: Cache) -> tuple[bytes, list[int]]:
    """What it leaves at its end, as another process gets it."""
    got: list[tuple[bytes, list[int]]] = []

    def on_quiesced() -> None:
        table, descriptors = export_state(cache, 30)
        got.append((table, [os.dup(descriptor) for descriptor in descriptors]))

    cache.on_quiesced.append(on_quiesced)
    cache.close()
    return got[0]


def taken(cache: Cache, table: bytes, descriptors: list[int]) -> int:
    legacy = WarmRestart(table, descriptors)
    try:
        return legacy.take_in(cache)
    finally:
        legacy.close()


def open_extents() -> int:
    """Files of extents that this process has open."""
    found = 0
    for entry in os.scandir("/proc/self/fd"):
        with suppress(OSError):
            found += "kvcache-extent" in os.readlink(entry.path)
    return found


def changed(table: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    told = msgpack.unpackb(table[8:])
    change(told)
    packed: bytes = msgpack.packb(told)
    return xxh3_64_digest(packed) + packed


def change_rows(table: bytes, change: Callable[[Any], object]) -> bytes:
    def both(told: dict[str, Any]) -> None:
        for slab in told["extents"]:
            rows = np.frombuffer(slab["rows"], RECORD_ROW).copy()
            change(rows)
            slab["rows"] = rows.tobytes()

    return changed(table, both)


@pytest.mark.parametrize("nvme", [False, True])
def test_a_warm_restart_keeps_the_bytes_in_host_memory(make: Open, nvme: bool) -> None:
    old = make(nvme=nvme)
    for number in range(5):
        store(bound_to(old), prompt(number), number)
    new_table, descriptors = left(old)
    new = make(nvme=nvme)
    assert taken(new, new_table, descriptors) == 40
    assert new.check() == []
    handle = bound_to(new)
    for number in range(5):
        assert blocks(handle, prompt(number)) == {"host": 8}
        assert load(handle, prompt(number)) == expected(number)
    store(handle, prompt(9), 9)
    assert load(handle, prompt(9)) == expected(9)
    assert load(handle, prompt(0)) == expected(0)
    assert new.check() == []


@pytest.mark.parametrize("policy", ["lru", "hazard"])
def test_the_eviction_order_survives_a_warm_restart(make: Open, policy: str) -> None:
    """Both lives go on with the same requests, and lose the same blocks."""
    used = [3, 0, 2, 0, 1, 0]

    def begun(cache: Cache) -> None:
        for number in range(8):  # full
            store(bound_to(cache), prompt(number), number)
        for number in used:
            load(bound_to(cache), prompt(number))
        nothing = np.zeros_like(cache.index.evidence().reused)
        cache.index.learn(nothing, nothing)  # so that its table is of this moment, as the heir's will be

    def rest(cache: Cache) -> list[dict[str, int]]:
        for number in range(20, 23):
            store(bound_to(cache), prompt(number), number)
        return [blocks(bound_to(cache), prompt(number)) for number in range(8)]

    one, two = make(evict={"policy": policy}), make(evict={"policy": policy})
    begun(one)
    begun(two)
    clock, evidence = two.index.clock, two.index.evidence().waiting
    successor = make(evict={"policy": policy})
    assert taken(successor, *left(two)) == 64
    assert successor.index.clock == clock
    assert (successor.index.evidence().waiting == evidence).all()
    assert rest(successor) == rest(one)


def test_uses_of_another_policy_are_ignored(make: Open) -> None:
    old = make(evict={"policy": "hazard"})
    store(bound_to(old), prompt(1), 1)
    for _ in range(4):
        load(bound_to(old), prompt(1))
    successor = make(evict={"policy": "lru"})
    assert taken(successor, *left(old)) == 8
    assert load(bound_to(successor), prompt(1)) == expected(1)
    assert successor.check() == []


def test_a_smaller_arena_takes_the_most_recent_blocks(make: Open) -> None:
    old = make()
    for number in range(8):
        store(bound_to(old), prompt(number), number)
    load(bound_to(old), prompt(0))
    successor = make(slabs=2)
    assert taken(successor, *left(old)) == 32
    assert successor.host.arena.mapped_bytes <= successor.host.arena.capacity_bytes
    handle = bound_to(successor)
    assert blocks(handle, prompt(0)) == blocks(handle, prompt(7)) == {"host": 8}
    for number in range(20, 28):  # and it works in what it has
        store(handle, prompt(number), number)
        assert load(handle, prompt(number)) == expected(number)
    assert successor.check() == []


def test_tenants_keep_separate_extents_and_quotas(make: Open) -> None:
    shares = {"a": {"host_quota_bytes": EXTENT}, "b": {"host_guaranteed_bytes": 2 * EXTENT}}
    old = make(evict={"tenants": shares})
    for number in range(2):
        store(bound_to(old, tenant="a"), prompt(number), number)
        store(bound_to(old, tenant="b"), prompt(number), 10 + number)
    successor = make(evict={"tenants": shares})
    assert taken(successor, *left(old)) == 32
    assert {slab.tenant for slab in successor.host.arena.slabs()} == {"a", "b"}
    assert successor.cost_classes.used_bytes("host") == {"a": EXTENT, "b": EXTENT}, "before an engine comes"
    store(bound_to(successor, tenant="a"), prompt(5), 5)  # makes room by what is its own
    for number in range(2):
        assert load(bound_to(successor, tenant="b"), prompt(number)) == expected(10 + number)
    assert successor.cost_classes.used_bytes("host")["a"] <= EXTENT
    assert successor.check() == []


def test_a_tenants_blocks_can_be_erased_after_a_restart(make: Open) -> None:
    old = make()
    store(bound_to(old, tenant="a"), prompt(1), 1)
    store(bound_to(old, tenant="b"), prompt(1), 2)
    successor = make()
    assert taken(successor, *left(old)) == 16
    erased = successor.erasure.erase(tenant="a")
    assert (erased.records, erased.incomplete) == ({"host": 8}, {})
    assert blocks(bound_to(successor, tenant="a"), prompt(1)) == {}
    assert load(bound_to(successor, tenant="b"), prompt(1)) == expected(2)


def test_a_warm_restart_keeps_ttls(make: Open) -> None:
    old = make()
    store(bound_to(old, ttl_s=3600), prompt(1), 1)
    successor = make()
    assert taken(successor, *left(old)) == 8
    (slab,) = successor.host.arena.slabs()
    assert all(slot.expires_ms for slot in slab.slots.values())
    over = make()
    table, descriptors = left(successor)
    assert taken(over, change_rows(table, lambda rows: rows["expires_ms"].fill(1)), descriptors) == 8
    assert blocks(bound_to(over), prompt(1)) == {}


def test_a_slot_whose_header_differs_from_the_table_is_left(make: Open) -> None:
    old = make()
    store(bound_to(old), prompt(1), 1)
    table, descriptors = left(old)
    successor = make()
    with open(os.dup(descriptors[0]), "r+b") as file:
        file.seek(2 * RECORD + 64)  # the signature that stands in the third slot
        file.write(bytes(8))
    assert taken(successor, table, descriptors) == 7
    assert successor.check() == []
    got = load(bound_to(successor), prompt(1))
    assert got == expected(1)[: len(got)]


def test_a_forged_header_reaches_no_other_namespace(make: Open) -> None:
    """It may write to the slots of its tenant; the table says what is in them, and it cannot write to that."""
    old = make()
    store(bound_to(old, tenant="mallory"), prompt(1), 1)
    victim = bound_to(old, tenant="victim")
    table, descriptors = left(old)
    with open(os.dup(descriptors[0]), "r+b") as file:
        for i in range(8):
            file.seek(i * RECORD + 24)
            file.write(victim.id)
    successor = make()
    assert taken(successor, table, descriptors) == 0
    assert blocks(bound_to(successor, tenant="victim"), prompt(1)) == {}
    assert successor.check() == []


def test_payloads_are_verified_in_the_arena(make: Open) -> None:
    old = make()
    store(bound_to(old), prompt(1), 1)
    table, descriptors = left(old)
    with open(os.dup(descriptors[0]), "r+b") as file:
        file.seek(RECORD - 8)
        file.write(bytes(8))
    successor = make(host__verify_arena=True)
    assert taken(successor, table, descriptors) == 7


def test_an_extent_writable_by_a_client_is_not_taken(make: Open) -> None:
    old = make()
    store(bound_to(old), prompt(1), 1)
    lent = old.host.allocate(RECORD, "default")  # to a client that never answers
    assert lent is not None
    table, descriptors = left(old)
    assert descriptors == []
    assert taken(make(), table, descriptors) == 0
    old.host.arena.release(lent)


def test_slot_generations_continue(make: Open) -> None:
    """A reader of before sees that its slot was given out again, whatever the file said meanwhile."""
    old = make()
    store(bound_to(old), prompt(1), 1)
    (slab,) = old.host.arena.slabs()
    words = list(slab.generations[: slab.count])
    table, descriptors = left(old)
    with open(os.dup(descriptors[0]), "r+b") as file:
        file.seek(EXTENT)
        file.write(bytes(8 * slab.count))  # which a client may
    successor = make()
    taken(successor, table, descriptors)
    (slab,) = successor.host.arena.slabs()
    assert list(slab.generations[: slab.count]) == words
    assert list(slab.region._words[: slab.count]) == words  # type: ignore[index]
    slot = next(iter(slab.slots.values()))
    bound_to(successor).clear()
    assert slab.generations[slot.i] != words[slot.i]


@pytest.mark.parametrize(
    "change",
    [
        lambda told: told.update(legacy=2),
        lambda told: told.pop("legacy"),
        lambda told: told["extents"].append(told["extents"][0]),
        lambda told: told.update(places=[b""]),
        lambda told: told["extents"][0].update(bytes=told["extents"][0]["bytes"] * 2),
        lambda told: told["extents"][0].update(bytes="much"),
        lambda told: told["extents"][0].pop("bytes"),
        lambda told: told["extents"][0].update(slot_bytes=1),
        lambda told: told["extents"][0].update(slot_bytes=2 * RECORD),
        lambda told: told["extents"][0].update(generations=b"12345678"),
        lambda told: told["extents"][0].update(rows=told["extents"][0]["rows"] * 2),
    ],
)
def test_an_invalid_table_is_not_taken(make: Open, change: Callable[[dict[str, Any]], object]) -> None:
    old = make()
    store(bound_to(old), prompt(1), 1)
    table, descriptors = left(old)
    successor = make()
    successor.host._executor.submit(int).result()  # what it prepares is there
    before = open_extents()
    assert taken(successor, changed(table, change), descriptors) == 0
    assert open_extents() == before - 1
    assert successor.check() == []
    assert blocks(bound_to(successor), prompt(1)) == {}


def test_one_bad_extent_does_not_stop_the_others(make: Open) -> None:
    old = make()
    for number in range(6):  # three extents
        store(bound_to(old), prompt(number), number)
    table, descriptors = left(old)
    assert len(descriptors) == 3
    successor = make()
    assert taken(successor, changed(table, lambda told: told["extents"][0].update(slot_bytes=1)), descriptors) == 32
    assert successor.check() == []
    assert sum(blocks(bound_to(successor), prompt(number)) == {"host": 8} for number in range(6)) == 4


def test_a_damaged_table_is_not_taken(make: Open) -> None:
    old = make()
    store(bound_to(old), prompt(1), 1)
    table, descriptors = left(old)
    successor, rng = make(), Random(1)
    for torn in (b"", table[:7], table[:-1], table + b"\0", *(flipped(table, rng) for _ in range(50))):
        assert taken(successor, torn, [os.dup(descriptor) for descriptor in descriptors]) == 0
    assert successor.check() == []
    assert taken(successor, table, descriptors) == 8
    assert load(bound_to(successor), prompt(1)) == expected(1)


def flipped(data: bytes, rng: Random) -> bytes:
    torn = bytearray(data)
    torn[rng.randrange(len(torn))] ^= 1 << rng.randrange(8)
    return bytes(torn)


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_corrupt_table_never_gives_a_wrong_block(make: Open, data: st.DataObject) -> None:
    """Rows of a process that went wrong: each is what its header says, or left out."""
    old = make()
    store(bound_to(old), prompt(1), 1)
    store(bound_to(old), prompt(2), 2)
    table, descriptors = left(old)
    name = data.draw(st.sampled_from([n for n in RECORD_ROW.names or () if n != "unused"]))
    order = data.draw(st.permutations(range(16)))

    def shuffle(rows: Any) -> None:
        rows[name] = rows[name][order]

    successor = make()
    try:
        assert 0 <= taken(successor, change_rows(table, shuffle), descriptors) <= 16
        assert successor.check() == []
        for number in (1, 2):
            got = load(bound_to(successor), prompt(number))
            assert got == expected(number)[: len(got)]
    finally:
        successor.close()


def test_a_truncatable_file_is_no_extent(make: Open) -> None:
    old = make()
    store(bound_to(old), prompt(1), 1)
    table, (descriptor,) = left(old)
    size = os.fstat(descriptor).st_size
    os.close(descriptor)
    unsealed = os.memfd_create("kvcache-extent")
    os.ftruncate(unsealed, size)
    assert taken(make(), table, [unsealed]) == 0
