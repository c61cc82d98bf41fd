"""The hazard policy block by block: each with its own age, uses and value, and no index, no classes in lists, no bins
but those by which reuse is counted. What the native index takes by the policy's table is what this model takes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcache import native
from kvcache.block.chain import SIGNATURE_BYTES
from kvcache.block.layout import Shard
from kvcache.evict.hazard import (
    CLASS_PSEUDO_COUNT,
    DEFAULT_REUSE_CHANCE,
    PRIOR_BLOCKS,
    PRIOR_END_BLOCKS,
    PSEUDO_COUNT,
    Hazard,
    load_prior,
)
from kvcache.evict.policy import AGE_BINS, AGE_EDGES, age_bin
from kvcache.index.block_run import pack_shard_key
from kvcache.index.index import evidence_of, value_table
from kvcache.index.reference.eviction_order import MAX_USES
from kvcache.index.reference.index import ReferenceIndex

SPACE = bytes(SIGNATURE_BYTES)
Values = dict[tuple[int, int], float]  # by class and bin of age
SHARD_KEY = pack_shard_key(SPACE, 0, Shard(0, 1, 0, 1))
BOUNDS, GAPS = Hazard.bounds, Hazard.gaps
TOLD = load_prior(Hazard())
ENDS = (*AGE_EDGES[1:], 2 * AGE_EDGES[-1])
WIDE = [b for b in range(AGE_BINS) if ENDS[b] > AGE_EDGES[b]]  # bins that some age is in
PART = {b: (ENDS[b] - AGE_EDGES[b]) / (AGE_EDGES[b] + ENDS[b]) for b in WIDE}


CLASSES = range(1 + len(BOUNDS) * (len(GAPS) + 1))


def counted(rows: list[tuple[int, int]]) -> Counter[tuple[int, int]]:
    """By class and bin of age."""
    return Counter((c, age_bin(age)) for c, age in rows)


@dataclass
class Block:
    name: bytes
    depth: int
    parent: bytes
    stamp: int
    uses: int = 0  # after the first
    gap: int = 0  # before the last of them

    @property
    def of_uses(self) -> int:
        return sum(bound <= self.uses for bound in BOUNDS)

    @property
    def use_class(self) -> int:
        return 1 + (self.of_uses - 1) * (len(GAPS) + 1) + sum(g <= self.gap for g in GAPS) if self.uses else 0


class Model:
    """Every block by itself, every use again and every wait as it was seen."""

    def __init__(self) -> None:
        self.now = 0
        self.here: dict[bytes, Block] = {}
        self.gone: dict[bytes, Block] = {}  # in order of leaving
        self.departures: list[Block] = []  # those that came back since among them
        self.seen: list[tuple[int, int]] = []  # class and age of each use again
        self.ended: list[tuple[int, int]] = []  # class and age of each ghost that was forgotten

    def values(self) -> Values:
        """Of a class at an age: the best, over all ends, of expected uses until then over the expected time held, from
        the age on that it has outlived."""
        waits = [(b.use_class, self.now - b.stamp) for b in (*self.here.values(), *self.gone.values())]
        seen, unseen = counted(self.seen), counted([*waits, *self.ended])
        of_others = PRIOR_BLOCKS * max(0.0, 1 - (seen.total() + unseen.total()) / PRIOR_END_BLOCKS)
        alike = {c: 0 if c == 0 else 1 + (c - 1) // (len(GAPS) + 1) for c in CLASSES}
        hazard: dict[tuple[int, int], float] = {}
        risks: dict[int, dict[int, float]] = {}  # by bin and class
        later = dict.fromkeys(CLASSES, 0)
        for b in reversed(WIDE):
            later = {c: later[c] + seen[c, b] + unseen[c, b] for c in CLASSES}
            risks[b] = {c: later[c] - unseen[c, b] / 2 + of_others * TOLD.risk[c, b] for c in CLASSES}
        uses = {(c, b): seen[c, b] + of_others * TOLD.reused[c, b] for c in CLASSES for b in WIDE}
        rate = DEFAULT_REUSE_CHANCE / PART[WIDE[-2]]
        for b in WIDE:
            risk = risks[b]
            every = (sum(uses[c, b] for c in CLASSES) + PSEUDO_COUNT * rate * PART[b]) / (
                sum(risk.values()) + PSEUDO_COUNT
            )
            rate = every / PART[b]
            for c in CLASSES:
                same = [o for o in CLASSES if alike[o] == alike[c]]
                of_uses = (sum(uses[o, b] for o in same) + PSEUDO_COUNT * every) / (
                    sum(risk[o] for o in same) + PSEUDO_COUNT
                )
                own = (uses[c, b] + CLASS_PSEUDO_COUNT * of_uses) / (risk[c] + CLASS_PSEUDO_COUNT)
                hazard[c, b] = min(own, 1 - 1e-6)
        values = {(c, b): self.best(hazard, c, b) for c in CLASSES for b in range(AGE_BINS)}
        if seen.total() + unseen.total() < PRIOR_BLOCKS:
            values |= dict.fromkeys([(c, 0) for c in CLASSES], max(values.values()))
        return values

    def best(self, hazard: dict[tuple[int, int], float], c: int, b: int) -> float:
        begins = 0 if b == 0 else age_bin(AGE_EDGES[b] + 1)
        waiting, uses, held, best = 1.0, 0.0, 0.0, 0.0
        first = max(at for at, o in enumerate(WIDE) if o <= begins)
        for later in WIDE[first:]:
            left = waiting * (1 - hazard[c, later])
            held += (ENDS[later] - AGE_EDGES[later]) * (waiting + left) / 2
            uses, waiting = uses + waiting - left, left
            best = max(best, uses / held)
        return best * (1 - 1e-6 * b)

    def use(self, chain: list[bytes]) -> None:
        """A request: what is here of it from the first block on is used again, the rest comes."""
        self.now += 1
        hit = True
        parent = SPACE
        for depth, name in enumerate(chain):
            hit = hit and name in self.here
            if hit:
                block = self.here[name]
                self.again(block)
            else:
                block = Block(name, depth, parent, self.now)
                ghost = self.gone.pop(name, None)
                if ghost is not None:
                    self.again(ghost)
                    block.uses, block.gap = ghost.uses, ghost.gap
                self.here[name] = block
            parent = name

    def again(self, block: Block) -> None:
        age = self.now - block.stamp
        self.seen.append((block.use_class, age))
        block.uses, block.gap, block.stamp = min(block.uses + 1, MAX_USES), age, self.now

    def take(self, count: int, values: Values) -> list[bytes]:
        """Victims, the least valuable first; never a block with a child here, nor one of this request."""
        taken = []
        for _ in range(count):
            parents = {block.parent for block in self.here.values()}
            free = [b for b in self.here.values() if b.name not in parents and b.stamp < self.now]
            if not free:
                break

            def rank(block: Block) -> tuple[float, int, int, bytes]:
                bin_ = age_bin(self.now - block.stamp)
                return values[block.use_class, bin_], block.stamp, -block.depth, block.name

            worst = min(free, key=rank)
            del self.here[worst.name]
            self.gone[worst.name] = worst
            self.departures.append(worst)
            taken.append(worst.name)
            while len(self.departures) > int(Hazard.ghosts * len(self.here)):
                ghost = self.departures.pop(0)
                if self.gone.get(ghost.name) is ghost:
                    self.ended.append((ghost.use_class, self.now - ghost.stamp))
                    del self.gone[ghost.name]
        return taken


def name(path: tuple[int, ...]) -> bytes:
    return sha256(repr(path).encode()).digest()


def chain(path: tuple[int, ...]) -> list[bytes]:
    """A block is named by all that is before it."""
    return [name(path[: i + 1]) for i in range(len(path))]


requests = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple), min_size=1)


class Served:
    """An index and the model, given the same."""

    def __init__(self, core: Any) -> None:
        self.index, self.model = core(1, BOUNDS, AGE_EDGES, Hazard.ghosts, GAPS), Model()

    def serve(self, path: tuple[int, ...], room: int) -> tuple[Any, list[bytes], list[bytes]]:
        """The table, and who left: by the index, by the model."""
        blocks = chain(path)
        packed = b"".join(blocks)
        now = self.index.tick()
        found, _ = self.index.match([SHARD_KEY], [1 << 60], packed)
        self.index.touch(SHARD_KEY, packed[: 32 * found], now)
        parent = blocks[found - 1] if found else SPACE
        self.index.insert(SHARD_KEY, packed[32 * found :], parent, 0)
        self.model.use(blocks)
        table = value_table(Hazard(), evidence_of(self.index))
        values = {(c, b): float(table[c, b]) for c in CLASSES for b in range(AGE_BINS)}
        lacking = max(0, self.index.resident(0) - room)
        taken = [victim[1] for victim in self.index.evict(0, table, lacking, now, False)]
        return table, taken, self.model.take(lacking, values)


@pytest.fixture(params=["plain", "native"])
def core(request: pytest.FixtureRequest) -> Any:
    if request.param == "native" and not native.built:
        pytest.skip("the compiled core was not built")
    return ReferenceIndex if request.param == "plain" else native.core.Index


@given(paths=requests.filter(lambda paths: len(paths) <= 15), room=st.integers(1, 12))
@settings(
    deadline=None,
    max_examples=5,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much],
)
def test_values_equal_a_per_block_model(core: Any, paths: list[Any], room: int) -> None:
    """Of few requests: later the index rounds the ages of those that wait to spans."""
    served = Served(core)
    for path in paths:
        _, taken, modelled = served.serve(path, room)
        assert taken == modelled
    expected = served.model.values()
    table = Hazard().values(evidence_of(served.index))
    assert np.allclose([table[c, b] for c, b in expected], list(expected.values()), rtol=1e-9, atol=0)


@given(paths=requests, room=st.integers(1, 20), seed=st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_long_runs_evict_the_same_blocks_as_the_model(core: Any, paths: list[Any], room: int, seed: Any) -> None:
    served = Served(core)
    for path in [*paths, *(seed.choice(paths) for _ in range(50))]:
        _, taken, modelled = served.serve(path, room)
        assert taken == modelled
    evidence, model = evidence_of(served.index), served.model
    for counts, rows in ((evidence.reused, model.seen), (evidence.forgotten, model.ended)):
        assert {(c, b): int(counts[c, b]) for c, b in np.argwhere(counts)} == counted(rows)
    waiting = Counter(b.use_class for b in (*model.here.values(), *model.gone.values()))
    assert list(evidence.waiting.sum(1)) == [waiting[c] for c in CLASSES]
    assert served.index.check() == []
