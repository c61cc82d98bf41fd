"""The index against a plain model: a set of records a tier, and a search through all of them for each victim."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from numpy.typing import NDArray

from kvcache.block.address import Address
from kvcache.block.layout import Shard
from kvcache.evict.lru import LRU
from kvcache.evict.policy import AGE_BINS, Policy, age_bin
from kvcache.hierarchy.index import Index

SPACE = bytes(32)
WHOLE = Shard(0, 1, 0, 1)
TIERS = ("host", "nvme", "redis")


class Ranks:
    """A policy with classes, so that the model has something to get wrong."""

    name = "ranks"
    bounds = (1, 3)

    def values(self, counts: NDArray[np.int64]) -> NDArray[np.float64]:
        return np.arange(3)[:, None] * 2.0 - np.arange(AGE_BINS)[None, :] // 4


def chain(seed: int, length: int) -> list[Address]:
    addresses, parent = [], SPACE
    for i in range(length):
        signature = sha256(b"%d %d" % (seed, i)).digest()
        addresses.append(Address(SPACE, signature, parent, 0, WHOLE))
        parent = signature
    return addresses


@dataclass
class Known:
    address: Address
    depth: int
    parent: bytes
    uses: int = 0
    stamp: int = 0
    holds: int = 0


class IndexMachine(RuleBasedStateMachine):
    policy: Policy

    @initialize()
    def begin(self) -> None:
        self.index = Index(TIERS, self.policy)
        self.chains = [chain(i, 6) for i in range(4)]
        self.known: dict[bytes, Known] = {}
        self.resident: list[set[bytes]] = [set() for _ in TIERS]
        self.held: list[bytes] = []

    def forget(self) -> None:
        """A record that nobody has and nobody holds is forgotten, its uses with it."""
        for name in list(self.known):
            if not any(name in tier for tier in self.resident) and not self.known[name].holds:
                if any(self.known[n].parent == name for tier in self.resident for n in tier):
                    continue
                del self.known[name]

    @rule()
    def tick(self) -> None:
        self.index.tick()

    @rule(which=st.integers(0, 3), length=st.integers(1, 6), tier=st.integers(0, 2))
    def insert(self, which: int, length: int, tier: int) -> None:
        """Heads first, as every store does."""
        for i, address in enumerate(self.chains[which][:length]):
            self.index.insert(address, TIERS[tier])
            if address.name not in self.known:
                parent = self.chains[which][i - 1].name if i else b""
                self.known[address.name] = Known(address, i, parent, stamp=self.index.clock)
            self.resident[tier].add(address.name)

    @rule(which=st.integers(0, 3), at=st.integers(0, 5), tier=st.integers(0, 2))
    def discard(self, which: int, at: int, tier: int) -> None:
        address = self.chains[which][at]
        assert self.index.discard(address, TIERS[tier]) == (address.name in self.resident[tier])
        self.resident[tier].discard(address.name)
        self.forget()

    @rule(which=st.integers(0, 3), length=st.integers(1, 6))
    def touch(self, which: int, length: int) -> None:
        stamp = self.index.tick()
        names = [address.name for address in self.chains[which][:length]]
        self.index.touch(names, stamp)
        for name in names:
            if name in self.known:
                self.known[name].uses += 1
                self.known[name].stamp = stamp

    @rule(which=st.integers(0, 3), length=st.integers(1, 6))
    def hold(self, which: int, length: int) -> None:
        names = [address.name for address in self.chains[which][:length]]
        there = [name for name in names if any(name in tier for tier in self.resident)]
        assert self.index.hold(names) == there
        for name in there:
            self.known[name].holds += 1
        self.held += there

    @rule()
    def release(self) -> None:
        self.index.release(self.held)
        for name in self.held:
            self.known[name].holds -= 1
        self.held = []
        self.forget()

    @rule(tier=st.integers(0, 2), stored_below=st.booleans(), back=st.none() | st.integers(0, 4))
    def evict(self, tier: int, stored_below: bool, back: int | None) -> None:
        before = None if back is None else self.index.clock - back
        values = self.policy.values(np.zeros((len(self.policy.bounds) + 1, AGE_BINS), np.int64))
        candidates = []
        for name in self.resident[tier]:
            k = self.known[name]
            below = any(name in t for t in self.resident[tier + 1 :])
            if k.holds or any(self.known[n].parent == name for n in self.resident[tier]):
                continue
            if (stored_below and not below) or (before is not None and k.stamp >= before):
                continue
            c = sum(k.uses >= bound for bound in self.policy.bounds)
            candidates.append((values[c, age_bin(self.index.clock - k.stamp)], -below, k.stamp, -k.depth, name))
        victim = self.index.evict(TIERS[tier], before=before, stored_below=stored_below)
        if victim is None:
            # the index looks at the oldest of each class: there may be none old enough only if there is none at all
            assert not candidates
            return
        best = min(candidates)[:4]
        assert victim[0].name in [c[4] for c in candidates if c[:4] == best]
        self.resident[tier].discard(victim[0].name)
        assert victim[1] == any(victim[0].name in t for t in self.resident)
        self.forget()

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "index"):
            names = [address.name for c in self.chains for address in c]
            assert self.index.where(names) == [
                sum(1 << t for t, tier in enumerate(self.resident) if name in tier) for name in names
            ]
            assert [self.index.resident(tier) for tier in TIERS] == [len(tier) for tier in self.resident]
            assert self.index.check() == []

    def teardown(self) -> None:
        if hasattr(self, "index"):
            self.release()
            for tier in TIERS:
                while self.index.evict(tier):
                    pass
            assert len(self.index) == 0
            assert self.index.held() == 0


class LRUMachine(IndexMachine):
    policy = LRU()


class RanksMachine(IndexMachine):
    policy = Ranks()


TestLRU = LRUMachine.TestCase
TestRanks = RanksMachine.TestCase
# steps cost little and victims need some history: more of both than the profile's
TestLRU.settings = TestRanks.settings = settings(max_examples=6 * settings.default.max_examples, stateful_step_count=60)


def test_tails_leave_before_heads_and_the_oldest_chain_first() -> None:
    index = Index(["host"], LRU())
    chains = [chain(i, 4) for i in range(3)]
    for addresses in chains:
        stamp = index.tick()
        for address in addresses:
            index.insert(address, "host")
        index.touch([a.name for a in addresses], stamp)
    order = []
    while (victim := index.evict("host")) is not None:
        order.append(victim[0])
    assert order == [address for addresses in chains for address in reversed(addresses)]


def test_lists_stay_short_however_often_blocks_are_used() -> None:
    index = Index(["host"], LRU())
    addresses = chain(0, 8)
    for address in addresses:
        index.insert(address, "host")
    for _ in range(2000):
        index.touch([addresses[-1].name], index.tick())
    assert sum(len(entries) for below in index._lists[0] for entries in below) < 100
