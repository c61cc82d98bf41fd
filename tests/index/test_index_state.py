"""What an index kept of single blocks, told to a new one: the same uses, the same ages, the same ghosts; and after a
restart in the middle of real traffic, the same hits."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcache import native
from kvcache.evict.hazard import Hazard
from kvcache.evict.policy import AGE_EDGES, LRU, Policy, age_bin, table_interval_requests
from kvcache.index.index import evidence_of, value_table
from kvcache.index.reference.index import MAX_FORGOTTEN_PER_TICK, ReferenceIndex
from kvcache.trace.formats import Trace, read_trace
from kvcache.trace.simulate import SHARD_KEY, signatures, simulate
from tests.trace.test_simulate import traffic

TRACE = Path(__file__).parents[3] / "shared" / "data" / "traces" / "mooncake-conversation.jsonl.gz"
CORES = ["plain", "native"]


def core(kind: str, policy: Policy) -> Any:
    if kind == "native" and not native.built:
        pytest.skip("the compiled core was not built")
    made: Any = ReferenceIndex if kind == "plain" else native.core.Index
    return made(1, policy.bounds, AGE_EDGES, policy.ghosts, policy.gaps)


def live(index: Any, policy: Policy, trace: Trace, capacity: int, first: int, end: int) -> int:
    """Blocks found."""
    names, hits = signatures(trace.unique), np.zeros(end - first, np.int32)
    while first < end:
        stop = min(end, first + table_interval_requests(first))
        part = trace.starts, trace.blocks, names, first, stop, capacity, value_table(policy, evidence_of(index))
        at = hits[len(hits) - (end - first) :][: stop - first]
        index.replay(SHARD_KEY, *part, at)
        first = stop
    return int(hits.sum())


def restarted(index: Any, other: Any, trace: Trace, most: int = 1 << 20) -> None:
    """As a cache does: what was kept, then what is still there, parents first, then the policy's state."""
    waited = evidence_of(index)
    other.import_state(index.export_state(most))
    known = evidence_of(other).waiting
    other.learn(waited.reused, np.maximum(waited.forgotten + waited.waiting - known, 0))
    names = signatures(trace.unique)
    there = {index.names(0)[i + 42 : i + 74] for i in range(0, len(index.names(0)), 74)}
    told: set[bytes] = set()
    for chain in trace:
        parent = SHARD_KEY[:32]
        for block in chain.tolist():
            name = names[block].tobytes()
            if name not in there:
                break
            if name not in told:
                other.insert(SHARD_KEY, name, parent, 0)
                told.add(name)
            parent = name
    assert told == there


@pytest.mark.parametrize("make", [Hazard, LRU])
@pytest.mark.parametrize("kind", CORES)
@pytest.mark.parametrize("other", CORES)
def test_restored_blocks_and_ghosts_keep_their_state(make: type[Policy], kind: str, other: str) -> None:
    policy, trace = make(), traffic(5, 300)
    index, again = core(kind, policy), core(other, policy)
    live(index, policy, trace, 40, 0, 300)
    restarted(index, again, trace)
    assert again.clock == index.clock
    assert (again.resident(0), again.ghosts()) == (index.resident(0), index.ghosts())
    names = signatures(trace.unique)
    assert again.uses(SHARD_KEY, names.tobytes()) == index.uses(SHARD_KEY, names.tobytes())
    for name in names:
        old, new = (each.clock - each.stamp(SHARD_KEY, name.tobytes()) for each in (index, again))
        assert age_bin(old) == age_bin(new)
    assert again.check() == []
    assert again.tick() == index.tick()  # from now on, what comes is used
    assert again.ghosts() == index.ghosts()
    live(again, policy, trace, 40, 0, 300)
    assert again.check() == []


@pytest.mark.parametrize("kind", CORES)
def test_the_oldest_ghosts_are_dropped_if_space_is_short(kind: str) -> None:
    policy, trace = Hazard(), traffic(6, 300)
    index = core(kind, policy)
    live(index, policy, trace, 10, 0, 300)
    here = index.resident(0)
    assert index.ghosts() > 10
    for most in (0, here // 2, here, here + 7):
        told = index.export_state(most)
        assert len(told) <= 32 + 8 * most
        again = core(kind, policy)
        again.import_state(told)
        assert again.ghosts() == (len(told) - 32) // 8
        assert again.check() == []


def strangers(count: int) -> bytes:
    """As an index keeps them: blocks that are nowhere."""
    rows = np.random.default_rng(count).integers(0, 1 << 48, count, "<u8")
    return struct.pack("<4Q", 1, 2, 3, 1000) + rows.tobytes()


@pytest.mark.parametrize("make", [Hazard, LRU])
@pytest.mark.parametrize("kind", CORES)
def test_a_request_drops_a_bounded_number_of_ghosts(make: type[Policy], kind: str) -> None:
    policy, count = make(), 20 * MAX_FORGOTTEN_PER_TICK + 1
    index = core(kind, policy)
    index.import_state(strangers(count))
    for ticks in range(1, 22):
        index.tick()
        if ticks == 3:  # what leaves makes no room, and is not a reason to forget them all
            name = b"a" * 32
            index.insert(SHARD_KEY, name, SHARD_KEY[:32], 0)
            index.discard(SHARD_KEY, name, 0, False)
        assert index.ghosts() <= max(0, count - MAX_FORGOTTEN_PER_TICK * ticks) + (ticks >= 3)
        assert index.ghosts() >= count - MAX_FORGOTTEN_PER_TICK * ticks
    assert index.ghosts() == 0
    assert evidence_of(index).forgotten.sum() == count + (make is Hazard)
    assert index.check() == []


@pytest.mark.parametrize("make", [Hazard, LRU])
@pytest.mark.parametrize("kind", CORES)
def test_surplus_ghosts_are_dropped_over_some_requests(make: type[Policy], kind: str) -> None:
    policy, count = make(), 10 * MAX_FORGOTTEN_PER_TICK
    index = core(kind, policy)
    index.import_state(strangers(count))
    index.insert(SHARD_KEY, signatures(20).tobytes(), SHARD_KEY[:32], 0)
    assert index.ghosts() == count
    for _ in range(12):
        index.tick()
    assert index.ghosts() == 20 * policy.ghosts
    assert evidence_of(index).forgotten.sum() == count - 20 * policy.ghosts
    assert index.check() == []


@pytest.mark.skipif(not native.built, reason="the compiled core was not built")
def test_both_cores_keep_the_same_rows() -> None:
    policy = Hazard()
    plain, compiled = core("plain", policy), core("native", policy)
    for index in (plain, compiled):
        index.import_state(strangers(13_000))
        for chain in signatures(5000).reshape(50, -1):
            index.insert(SHARD_KEY, chain.tobytes(), SHARD_KEY[:32], 0)
        index.tick()
    assert compiled.ghosts() == 13_000
    for most in (0, 1, 4095, 4096, 4097, 5000, 5001, 9095, 9096, 9097, 18_000, 1 << 21):
        told = compiled.export_state(most)
        assert told == plain.export_state(most)
        assert len(told) == 32 + 8 * min(most, 18_000)


@pytest.mark.parametrize("kind", CORES)
def test_invalid_state_is_refused_and_changes_nothing(kind: str) -> None:
    policy, trace = Hazard(), traffic(7, 50)
    index = core(kind, policy)
    for told in (
        b"",
        b"\0" * 31,
        b"\0" * 36,
        struct.pack("<4Q", 1, 2, 3, 1 << 40),
        struct.pack("<5Q", 1, 2, 3, 9, 200 << 56),
        struct.pack("<5Q", 1, 2, 3, 9, 0xE1 << 48),
    ):
        with pytest.raises(ValueError, match=r"told|multiple|state does not fit"):
            index.import_state(told)
    assert (index.clock, index.ghosts()) == (0, 0)
    live(index, policy, trace, 20, 0, 50)
    with pytest.raises(ValueError, match="new"):
        index.import_state(index.export_state(100))
    assert index.check() == []


@pytest.mark.skipif(not TRACE.exists(), reason="the traces are not shipped")
@pytest.mark.skipif(not native.built, reason="without the compiled core it takes minutes")
@pytest.mark.parametrize("percent", [1, 5, 20])
def test_a_restart_in_a_trace_costs_few_hits(percent: int) -> None:
    trace = read_trace(TRACE, "mooncake").part(0, 4000)
    policy, capacity, middle = Hazard(), trace.unique * percent // 100, 2000
    whole = simulate(trace, policy, capacity).hits[middle:].sum()
    index, again = core("native", policy), core("native", policy)
    live(index, policy, trace, capacity, 0, middle)
    restarted(index, again, trace)
    asked = int(trace.starts[-1] - trace.starts[middle])
    # a block's age is kept to a fifth of an octave, so other blocks leave now and then
    assert live(again, policy, trace, capacity, middle, 4000) > whole - 0.005 * asked
