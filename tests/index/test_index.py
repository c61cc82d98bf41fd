"""The index and its twin against a plain model: a set of records a tier, and a search through all for each victim."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from itertools import chain as links

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from numpy.typing import NDArray

from kvcache import native
from kvcache.block.layout import Shard
from kvcache.block.record import Address
from kvcache.evict.policy import AGE_BINS, LRU, Evidence, Policy, age_bin
from kvcache.index.block_run import BlockRun, pack_shard_key
from kvcache.index.index import Index

SPACE = bytes(32)
WHOLE = Shard(0, 1, 0, 1)
TIERS = ("host", "nvme", "redis")


class Ranks:
    """A policy with classes, so that the model has something to get wrong."""

    name = "ranks"
    bounds = (1, 3)
    gaps = (2, 6)
    ghosts = 0.0

    def values(self, evidence: Evidence) -> NDArray[np.float64]:
        return np.arange(7)[:, None] * 2.0 + (AGE_BINS - np.arange(AGE_BINS))[None, :] // 4


class Holes(Ranks):
    """The oldest are not the least valuable, and many are equal: any bin of any class may be the one to take from."""

    def values(self, evidence: Evidence) -> NDArray[np.float64]:
        values = np.random.default_rng(1).integers(0, 5, (7, AGE_BINS)).astype(np.float64)
        values[values == 4] = np.inf  # these stay
        return values


def run(addresses: list[Address]) -> BlockRun:
    return BlockRun(pack_shard_key(SPACE, 0, WHOLE), b"".join(address.signature for address in addresses))


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
    gap: int = 0  # before the last of them
    stamp: int = 0
    holds: int = 0


class IndexMachine(RuleBasedStateMachine):
    policy: Policy
    plain = False

    @initialize()
    def begin(self) -> None:
        self.index = Index(TIERS, self.policy, plain=self.plain)
        self.chains = [chain(i, 6) for i in range(4)]
        self.known: dict[bytes, Known] = {}
        self.resident: list[set[bytes]] = [set() for _ in TIERS]
        self.held: list[BlockRun] = []

    def forget(self) -> None:
        """A record that no tier has and no request holds is forgotten, its uses with it."""
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
        addresses = self.chains[which][:length]
        self.index.touch(run(addresses), stamp)
        for address in addresses:
            if address.name in self.known:
                known = self.known[address.name]
                known.uses, known.gap, known.stamp = known.uses + 1, stamp - known.stamp, stamp

    @rule(
        which=st.integers(0, 3),
        first=st.integers(0, 5),
        length=st.integers(1, 6),
        room=st.none() | st.lists(st.integers(0, 3), min_size=3, max_size=3),
    )
    def hold(self, which: int, first: int, length: int, room: list[int] | None) -> None:
        addresses = self.chains[which][first : first + length]
        left, expected = list(room or [9] * 3), [0] * 3
        for address in addresses:
            nearest = next((t for t, tier in enumerate(self.resident) if address.name in tier), None)
            if nearest is None or left[nearest] == 0:
                break
            left[nearest] -= 1
            expected[nearest] += 1
        assert self.index.hold(run(addresses), room) == tuple(expected)
        held = addresses[: sum(expected)]
        for address in held:
            self.known[address.name].holds += 1
        self.held.append(run(held))

    @rule(some=st.booleans())
    def release(self, some: bool) -> None:
        given = self.held[::2] if some else self.held
        self.held = self.held[1::2] if some else []
        for run in given:
            self.index.release(run)
            for i in range(run.blocks):
                self.known[run.signatures[32 * i : 32 * i + 16] + self.chains[0][0].name[16:]].holds -= 1
        self.forget()

    @rule(
        tier=st.integers(0, 2),
        stored_below=st.booleans(),
        back=st.none() | st.integers(0, 4),
        count=st.integers(1, 5),
    )
    def evict(self, tier: int, stored_below: bool, back: int | None, count: int) -> None:
        before = None if back is None else max(0, self.index.clock - back)
        values = self.policy.values(Evidence.none(self.policy))
        victims = self.index.evict(TIERS[tier], count, before=before, stored_below=stored_below)
        for i in range(count):
            candidates = []
            for name in self.resident[tier]:
                k = self.known[name]
                below = any(name in t for t in self.resident[tier + 1 :])
                if k.holds or any(self.known[n].parent == name for n in self.resident[tier]):
                    continue
                if (stored_below and not below) or (before is not None and k.stamp >= before):
                    continue
                c = self.use_class(k)
                if values[c, age_bin(self.index.clock - k.stamp)] == np.inf:
                    continue
                candidates.append((values[c, age_bin(self.index.clock - k.stamp)], -below, k.stamp, -k.depth, name))
            if not candidates:
                assert len(victims) == i
                break
            address, kept = victims[i].address, victims[i].kept
            assert address.name == min(candidates)[4]
            assert address == self.known[address.name].address
            self.resident[tier].discard(address.name)
            assert kept == any(address.name in t for t in self.resident)
            self.forget()
        else:
            assert len(victims) == count

    @rule(tier=st.integers(0, 2), which=st.integers(0, 3), length=st.integers(0, 6))
    def worth(self, tier: int, which: int, length: int) -> None:
        values, expected = self.policy.values(Evidence.none(self.policy)), 0.0
        for address in self.chains[which][:length]:
            k = self.known.get(address.name)
            if k is None or k.holds or address.name not in self.resident[tier]:
                expected = np.inf
                break
            expected += values[self.use_class(k), age_bin(self.index.clock - k.stamp)]
        assert self.index.worth(TIERS[tier], self.chains[which][:length]) == pytest.approx(expected)

    def use_class(self, known: Known) -> int:
        c = sum(known.uses >= bound for bound in self.policy.bounds)
        if not c:
            return 0
        # the second, third... group of as many classes as there are gaps, and one
        return 1 + (c - 1) * (len(self.policy.gaps) + 1) + sum(known.gap >= gap for gap in self.policy.gaps)

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "index"):
            for addresses in self.chains:
                names = [address.name for address in addresses]
                masks = [sum(1 << t for t, tier in enumerate(self.resident) if name in tier) for name in names]
                assert list(self.index.tier_masks(run(addresses))) == masks
                assert [self.index.stamp(a) for a in addresses] == [
                    self.known[name].stamp if name in self.known else self.index.clock for name in names
                ]
            assert [self.index.resident(tier) for tier in TIERS] == [len(tier) for tier in self.resident]
            assert [self.index.names(tier) for tier in TIERS] == self.resident
            assert self.index.check() == []

    def teardown(self) -> None:
        if hasattr(self, "index"):
            self.release(some=False)
            for tier in TIERS:
                while self.index.evict(tier):
                    pass
                for address in links.from_iterable(self.chains):  # what a policy lets stay
                    self.index.discard(address, tier)
            assert len(self.index) == 0
            assert self.index.held() == 0


def machine(policy: Policy, plain: bool) -> type:
    made = type(IndexMachine.__name__, (IndexMachine,), {"policy": policy, "plain": plain}).TestCase
    # steps cost little and victims need some history: more of both than the profile's
    made.settings = settings(max_examples=2 * settings.default.max_examples, stateful_step_count=60)
    return made


TestPlainLRU, TestPlainRanks, TestPlainHoles = (machine(policy, True) for policy in (LRU(), Ranks(), Holes()))
if native.built:
    TestNativeLRU, TestNativeRanks, TestNativeHoles = (machine(policy, False) for policy in (LRU(), Ranks(), Holes()))


@pytest.fixture(params=["plain", "native"])
def plain(request: pytest.FixtureRequest) -> bool:
    if request.param == "native" and not native.built:
        pytest.skip("the compiled core was not built")
    return bool(request.param == "plain")


def test_tails_leave_before_heads_and_the_oldest_chain_first(plain: bool) -> None:
    index = Index(["host"], LRU(), plain=plain)
    chains = [chain(i, 4) for i in range(3)]
    for addresses in chains:
        stamp = index.tick()
        for address in addresses:
            index.insert(address, "host")
        index.touch(run(addresses), stamp)
    order = [victim.address for victim in index.evict("host", 100)]
    assert order == [address for addresses in chains for address in reversed(addresses)]
