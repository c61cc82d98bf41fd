"""The compiled index and its twin, side by side: the same calls, the same answers, the same victims."""

from __future__ import annotations

import math
import struct
import threading
from collections.abc import Callable
from hashlib import sha256
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvcache import native
from kvcache.block.chain import digest_chain_reference
from kvcache.block.layout import Shard
from kvcache.evict.policy import AGE_BINS, AGE_EDGES
from kvcache.index.block_run import ALL_BLOCKS, pack_shard_key
from kvcache.index.reference.eviction_order import USES_BITS
from kvcache.index.reference.index import ReferenceIndex

pytestmark = pytest.mark.skipif(not native.built, reason="the compiled core was not built")

SPACES = [bytes([s]) * 32 for s in range(2)]
SHARD_KEYS = [pack_shard_key(SPACES[0], 0, Shard(0, 2, 0, 4)), pack_shard_key(SPACES[0], 1, Shard(0, 1, 0, 1))]
SHARD_KEYS += [pack_shard_key(SPACES[1], 0, Shard(0, 2, 0, 4))]
BOUNDS, GAPS = (1, 2, 5), (3, 12)
CLASSES = 1 + 3 * 3
TABLES = [
    np.repeat(-np.arange(AGE_BINS, dtype=np.float64)[None, :], CLASSES, axis=0),
    np.arange(CLASSES, dtype=np.float64)[:, None] - np.arange(AGE_BINS)[None, :] // 9,
    np.zeros((CLASSES, AGE_BINS)),
    np.random.default_rng(3).standard_normal((CLASSES, AGE_BINS)),
    np.random.default_rng(4).integers(0, 3, (CLASSES, AGE_BINS)).astype(np.float64),
]
TABLES.append(np.where(TABLES[3] > 0, np.inf, TABLES[3]))  # half of all stay
WEIGHTS = [(), (1.0, 3.0), (0.5, math.inf, 2.0), (math.inf, 1.0, 1.0, 1.0)]  # by kind


def branch(number: int, length: int) -> bytes:
    """A chain that shares its first blocks with others: branches 0 and 1 three, 2 and 3 five."""
    shared = 3 if number < 2 else 5
    ids = [(number // 2 if i < shared else 10 + number, i) for i in range(length)]
    return b"".join(sha256(repr(ids[: i + 1]).encode()).digest() for i in range(length))


CHAINS = [branch(number, 9) for number in range(4)]
ODD = [sha256(b"odd %d" % i).digest() for i in range(5)]
chains = st.integers(0, len(CHAINS) - 1)
shard_keys = st.integers(0, len(SHARD_KEYS) - 1)
tiers = st.integers(0, 2)
gaps = st.lists(st.sampled_from([0, 1, 2, 5, 20]), min_size=1, max_size=12)
ends = st.tuples(st.integers(0, 9), st.integers(0, 9)).map(sorted)


def rows(packed: bytes) -> list[bytes]:
    """Place and signature of each."""
    return [packed[at : at + 74] for at in range(0, len(packed), 74)]


def in_any_order(told: bytes) -> tuple[list[int], list[int]]:
    """What comes before the rows, and the rows."""
    words = struct.unpack(f"<{len(told) // 8}Q", told)
    return list(words[:4]), sorted(words[4:])


def life(others: int) -> bytes:
    """What an index kept that had so many blocks, and half of the first branches of the first shard."""
    index, random = ReferenceIndex(3, BOUNDS, AGE_EDGES, 0, GAPS), Random(others)
    for _ in range(50):
        index.tick()
    for chain in CHAINS[:2]:
        index.insert(SHARD_KEYS[0], chain[: 5 * 32], SPACES[0], 0)
    index.touch(SHARD_KEYS[0], CHAINS[0][: 3 * 32], index.clock)
    index.tick()
    strangers = [
        random.getrandbits(48) | random.choice([0, 1, 3]) << 48 | random.randrange(9) << 56 for _ in range(others)
    ]
    return index.export_state(10**6) + struct.pack(f"<{others}Q", *strangers)


class Twins(RuleBasedStateMachine):
    @initialize(ghosts=st.sampled_from([0.0, 0.5, 2.0]), others=st.none() | st.sampled_from([0, 30, 300]))
    def begin(self, ghosts: float, others: int | None) -> None:
        """`others`: of a life that is remembered, blocks that never come, beside some that do."""
        self.twins: list[Any] = [
            core(3, BOUNDS, AGE_EDGES, ghosts, GAPS) for core in (ReferenceIndex, native.core.Index)
        ]
        self.held: list[tuple[bytes, bytes]] = []
        self.remembers = others is not None
        if others is not None:
            told = life(others)
            self.both(lambda twin: twin.import_state(told))

    def both(self, call: Callable[[Any], Any]) -> Any:
        plain, compiled = (call(twin) for twin in self.twins)
        assert plain == compiled
        return plain

    @rule(times=st.sampled_from([1, 1, 3, 30, 400]))
    def tick(self, times: int) -> None:
        for _ in range(times):
            self.both(lambda twin: twin.tick())

    @rule(chain=chains, ends=ends, shard_key=shard_keys, tier=tiers, known=st.booleans())
    def insert(self, chain: int, ends: list[int], shard_key: int, tier: int, known: bool) -> None:
        first, end = ends
        parent = CHAINS[chain][32 * first - 32 : 32 * first] if first else SHARD_KEYS[shard_key][:32]
        run = CHAINS[chain][32 * first : 32 * end]
        self.both(lambda twin: twin.insert(SHARD_KEYS[shard_key], run, parent if known else b"", tier))

    @rule(i=st.integers(0, 4), parent=st.integers(0, 4), shard_key=shard_keys, tier=tiers)
    def insert_odd(self, i: int, parent: int, shard_key: int, tier: int) -> None:
        """Of a few blocks any may claim to follow any, as no chain of ours would, itself among them."""
        self.both(lambda twin: twin.insert(SHARD_KEYS[shard_key], ODD[i], ODD[parent], tier))

    @rule(i=st.integers(0, 4), shard_key=shard_keys, tier=tiers)
    def discard_odd(self, i: int, shard_key: int, tier: int) -> None:
        self.both(lambda twin: twin.discard(SHARD_KEYS[shard_key], ODD[i], tier, False))

    @rule(first=st.integers(0, 40), gaps=gaps, tier=tiers)
    def insert_loners(self, first: int, gaps: list[int], tier: int) -> None:
        """Chains of one block, so that many of one class wait in bins here and there."""
        for i, gap in enumerate(gaps):
            for _ in range(gap):
                self.both(lambda twin: twin.tick())
            signature = sha256(b"%d" % (first + i)).digest()
            self.both(lambda twin: twin.insert(SHARD_KEYS[0], signature, SPACES[0], tier))  # noqa: B023  called at once

    @rule(chain=chains, i=st.integers(0, 8), shard_key=shard_keys, tier=tiers, unless_held=st.booleans())
    def discard(self, chain: int, i: int, shard_key: int, tier: int, unless_held: bool) -> None:
        self.both(
            lambda twin: twin.discard(SHARD_KEYS[shard_key], CHAINS[chain][32 * i : 32 * i + 32], tier, unless_held)
        )

    @rule(chain=chains, ends=ends, shard_key=shard_keys)
    def refuse(self, chain: int, ends: list[int], shard_key: int) -> None:
        self.both(lambda twin: twin.refuse(SHARD_KEYS[shard_key], CHAINS[chain][32 * ends[0] : 32 * ends[1]]))

    @rule(chain=chains, ends=ends, shard_key=shard_keys, back=st.integers(0, 3))
    def touch(self, chain: int, ends: list[int], shard_key: int, back: int) -> None:
        run = CHAINS[chain][32 * ends[0] : 32 * ends[1]]
        self.both(lambda twin: twin.touch(SHARD_KEYS[shard_key], run, max(0, twin.clock - back)))

    @rule(
        chain=chains,
        ends=ends,
        shard_key=shard_keys,
        back=st.integers(0, 90),
        uses=st.integers(0, 5),
        gap=st.integers(0, 2),
    )
    def recall(self, chain: int, ends: list[int], shard_key: int, back: int, uses: int, gap: int) -> None:
        run, byte = CHAINS[chain][32 * ends[0] : 32 * ends[1]], uses | gap << USES_BITS
        self.both(lambda twin: twin.restore_use(SHARD_KEYS[shard_key], run, max(0, twin.clock - back), byte))

    @rule(chain=chains, ends=ends, shard_key=shard_keys, room=st.lists(st.integers(0, 9), min_size=3, max_size=3))
    def hold(self, chain: int, ends: list[int], shard_key: int, room: list[int]) -> None:
        run = CHAINS[chain][32 * ends[0] : 32 * ends[1]]
        held = self.both(lambda twin: twin.hold(SHARD_KEYS[shard_key], run, room))
        self.held.append((SHARD_KEYS[shard_key], run[: 32 * sum(held)]))

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.held:
            shard_key, run = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
            self.both(lambda twin: twin.release(shard_key, run))

    @rule(
        tier=tiers,
        table=st.integers(0, len(TABLES) - 1),
        count=st.integers(1, 40),
        back=st.none() | st.sampled_from([0, 1, 5, 100]),
        below=st.booleans(),
        weights=st.sampled_from(WEIGHTS),
        most=st.sampled_from([math.inf, 0.5]),
    )
    def evict(
        self,
        tier: int,
        table: int,
        count: int,
        back: int | None,
        below: bool,
        weights: tuple[float, ...] = (),
        most: float = math.inf,
    ) -> None:
        self.both(
            lambda twin: twin.evict(
                tier, TABLES[table], count, None if back is None else max(0, twin.clock - back), below, weights, most
            )
        )

    @rule(
        tier=tiers,
        of=tiers,
        table=st.integers(0, len(TABLES) - 1),
        some=st.integers(1, 3),
        which=st.sampled_from(WEIGHTS),
    )
    def worth(self, tier: int, of: int, table: int, some: int, which: tuple[float, ...]) -> None:
        """Of all, or of every second or third, that this tier has or another one."""
        records = b"".join(sorted(rows(self.twins[0].names(of)))[::some])
        worth = self.both(lambda twin: twin.worth(tier, TABLES[table], records, which))
        alone = [self.twins[0].worth(tier, TABLES[table], row, which) for row in rows(records)]
        assert worth == math.inf if math.inf in alone else math.isclose(worth, math.fsum(alone), abs_tol=1e-9)

    @rule(shard_key=shard_keys, kind=st.integers(0, 3))
    def assign(self, shard_key: int, kind: int) -> None:
        """Whether blocks are there or not, and again."""
        self.both(lambda twin: twin.assign([SHARD_KEYS[shard_key]], kind))

    @rule(chain=chains, end=st.integers(0, 9), window=st.integers(1, 4))
    def match(self, chain: int, end: int, window: int) -> None:
        run = CHAINS[chain][: 32 * end]
        for groups, needs in (
            ([0], [ALL_BLOCKS]),
            ([0, 1], [ALL_BLOCKS, window]),
            ([1], [1]),
            ([2, 1, 0], [window, 1, ALL_BLOCKS]),
        ):
            self.both(lambda twin: twin.match([SHARD_KEYS[g] for g in groups], needs, run))  # noqa: B023  called at once

    @invariant()
    def agree(self) -> None:
        if not hasattr(self, "twins"):
            return
        for shard_key in SHARD_KEYS:
            for chain in CHAINS:
                self.both(lambda twin: (twin.tier_masks(shard_key, chain), twin.stamp(shard_key, chain[-32:])))  # noqa: B023
                self.both(lambda twin: twin.uses(shard_key, chain))  # noqa: B023
        self.both(lambda twin: (len(twin), twin.ghosts(), twin.held(), [twin.resident(t) for t in range(3)]))
        self.both(lambda twin: [twin.resident_by_class(t) for t in range(3)])
        self.both(lambda twin: [sorted(rows(twin.names(t))) for t in range(3)])
        self.both(lambda twin: bytes(memoryview(twin.waiting()).cast("B")))
        self.both(lambda twin: bytes(memoryview(twin.reused()).cast("B")))
        self.both(lambda twin: bytes(memoryview(twin.forgotten()).cast("B")))
        if self.remembers:  # by the same secret
            self.both(lambda twin: in_any_order(twin.export_state(10**6)))
            self.both(lambda twin: len(twin.export_state(7)))
        self.both(lambda twin: twin.check())

    def teardown(self) -> None:
        if hasattr(self, "twins"):
            for shard_key, run in self.held:
                self.both(lambda twin: twin.release(shard_key, run))  # noqa: B023
            for tier in range(3):
                self.both(lambda twin: twin.evict(tier, TABLES[0], 10**6, None, False))  # noqa: B023
            assert self.both(len) == 0


TestTwins = Twins.TestCase
TestTwins.settings = settings(max_examples=2 * settings.default.max_examples, stateful_step_count=50)


@pytest.mark.parametrize("seed", range(40))
def test_long_lives(seed: int) -> None:
    """The same, but many of one class wait in bins here and there, and what leaves is a few of them: what short lives
    that are made to shrink seldom come to."""
    random, twins = Random(seed), Twins()
    twins.begin(random.choice([0.0, 0.5, 2.0]), random.choice([None, 0, 300]))
    for _ in range(60):
        chain, shard_key, tier = random.randrange(4), random.randrange(3), random.randrange(3)
        ends, some = sorted(random.choices(range(10), k=2)), random.random() < 0.5
        match random.randrange(14):
            case 0:
                twins.tick(random.choice([1, 3, 30, 400]))
            case 1 | 2:
                twins.insert(chain, ends, shard_key, tier, some)
            case 3:
                twins.insert_loners(random.randrange(200), random.choices([0, 1, 2, 5, 20], k=12), tier)
            case 4:
                twins.discard(chain, random.randrange(9), shard_key, tier, some)
            case 5:
                twins.touch(chain, ends, shard_key, random.randrange(4))
            case 6:
                twins.hold(chain, ends, shard_key, random.choices(range(10), k=3))
            case 7:
                twins.match(chain, ends[1], random.randrange(1, 5))
            case 8:
                twins.insert_odd(random.randrange(5), random.randrange(5), shard_key, tier)
            case 9:
                twins.discard_odd(random.randrange(5), shard_key, tier)
            case 10:
                twins.assign(shard_key, random.randrange(4))
            case 11:
                twins.worth(tier, tier, random.randrange(len(TABLES)), random.randrange(1, 4), random.choice(WEIGHTS))
            case _:
                back = random.choice([None, None, 0, 1, 5, 100])
                weights, most = random.choice(WEIGHTS), random.choice([math.inf, 0.5])
                twins.evict(tier, random.randrange(len(TABLES)), random.choice([1, 4, 16]), back, some, weights, most)
        twins.agree()
    twins.teardown()


def new(tiers: int = 2, ghosts: float = 0.0) -> Any:
    return native.core.Index(tiers, (), AGE_EDGES, ghosts)


def signatures(seed: int, blocks: int) -> bytes:
    return np.random.default_rng(seed).bytes(32 * blocks)


def test_ask_is_digest_and_match() -> None:
    tokens = np.arange(16 * 100, dtype=np.uint32)
    expected = digest_chain_reference(SPACES[0], tokens, 16, None)
    index = new()
    index.insert(SHARD_KEYS[0], expected[: 32 * 40], SPACES[0], 0)
    index.insert(SHARD_KEYS[0], expected[: 32 * 60], SPACES[0], 1)
    for form in (tokens, tokens.astype(np.int64)):
        for blocks, found in ((100, (60, (40, 20))), (50, (50, (40, 10))), (7, (7, (7, 0)))):
            asked = index.hash_and_match(SPACES[0], form[: 16 * blocks], 16, None, [SHARD_KEYS[0]], [ALL_BLOCKS])
            assert asked == (expected[: 32 * blocks], *found)
    with pytest.raises(OverflowError):
        index.hash_and_match(SPACES[0], np.array([1, -1]), 1, None, [SHARD_KEYS[0]], [ALL_BLOCKS])


def test_threads_at_once() -> None:
    """Each works on chains of its own and one that all share, while others evict; the audit is clean after it."""
    index, shared = new(ghosts=1.0), signatures(0, 200)
    faults: list[str] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            for turn in range(60):
                own = signatures(1000 * seed + turn, 100)
                stamp = index.tick()
                index.insert(SHARD_KEYS[0], own, SPACES[0], turn % 2)
                index.insert(SHARD_KEYS[0], shared, SPACES[0], 0)
                held = index.hold(SHARD_KEYS[0], shared, [150, 150])
                index.touch(SHARD_KEYS[0], shared, stamp)
                for t in range(2):
                    index.evict(t, TABLES[0][:1].copy(), int(rng.integers(1, 150)), None, False)
                if index.tier_masks(SHARD_KEYS[0], shared[: 32 * sum(held)]).count(0):
                    faults.append("a held block left")
                index.release(SHARD_KEYS[0], shared[: 32 * sum(held)])
        except Exception as error:  # noqa: BLE001  an error in a thread must fail the test
            faults.append(repr(error))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    assert index.check() == []
    assert index.held() == 0


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda i: i.insert(b"short", bytes(32), b"", 0), "a shard key of 5 bytes: expected 42"),
        (lambda i: i.insert(SHARD_KEYS[0], bytes(31), b"", 0), "signatures of 31 bytes"),
        (lambda i: i.insert(SHARD_KEYS[0], bytes(32), b"x", 0), "a parent of 1 bytes"),
        (lambda i: i.insert(SHARD_KEYS[0], bytes(32), b"", 2), "tier 2: there are 2"),
        (lambda i: i.hold(SHARD_KEYS[0], bytes(32), [1]), "room in 1 tiers: expected one each of 2"),
        (lambda i: i.release(SHARD_KEYS[0], bytes(32)), "not held"),
        (lambda i: i.match([SHARD_KEYS[0]], [1, 2], bytes(32)), "1 shard keys and 2 needs"),
        (lambda i: i.evict(0, np.zeros(3), 1, None, False), "expected float64 of"),
        (lambda i: i.evict(0, np.zeros((1, AGE_BINS)), 1, None, False, [0.0]), "not more than 0"),
        (lambda i: i.worth(0, np.zeros(3), b""), "expected float64 of"),
        (lambda i: i.worth(2, np.zeros((1, AGE_BINS)), b""), "tier 2: there are 2"),
        (lambda i: i.worth(0, np.zeros((1, AGE_BINS)), bytes(75)), "records of 75 bytes"),
        (lambda i: i.assign([SHARD_KEYS[0]], 1 << 12), "kind 4096: expected less than 4096"),
        (lambda i: i.assign([b"short"], 1), "a shard key of 5 bytes"),
        (lambda i: native.core.Index(5, (), AGE_EDGES, 0.0), "5 tiers: expected 1 to 4"),
        (lambda i: native.core.Index(1, (3, 2), AGE_EDGES, 0.0), "ascending numbers up to 31"),
        (lambda i: native.core.Index(1, (1, 32), AGE_EDGES, 0.0), "ascending numbers up to 31"),
        (lambda i: native.core.Index(1, (1,), AGE_EDGES, 0.0, (4, 4)), "gaps between uses out of order"),
        (lambda i: native.core.Index(1, (1,), AGE_EDGES, 0.0, range(8)), "7 at most"),
        (lambda i: native.core.Index(1, (), (1, 2), 0.0), "begin with 0"),
    ],
)
def test_what_is_refused(call: Callable[[Any], Any], said: str) -> None:
    index = new()
    with pytest.raises(ValueError, match=said):
        call(index)
    assert len(index) == 0
