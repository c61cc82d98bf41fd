"""A policy's state outlives its process: whole, or not at all; shares hold before an engine comes."""

from __future__ import annotations

import json
from base64 import b64encode
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.cache.cache import Cache
from kvcache.cache.factory import POLICIES
from kvcache.cache.policy_state import (
    FILE_NAME,
    FORMAT,
    LAST_USE,
    MAX_JSON_BYTES,
    MAX_NAMESPACES,
    MAX_ROWS,
    SAVE_INTERVAL_S,
    PolicyState,
    _pack_counts,
)
from kvcache.cache.usage import UsageLog
from kvcache.evict.policy import Evidence
from kvcache.evict.quotas import Quotas
from kvcache.index.block_run import SHARD_KEY_BYTES
from kvcache.index.cost_classes import CostClasses
from kvcache.index.index import Index
from kvcache.observe.metrics import Counters
from kvcache.os_env import Disk, InlineExecutor, LocalDisk, OsEnv, SystemClock
from kvcache.settings.sources import load
from tests.cache.test_reclaim import SMALL, found, put

KiB = 1 << 10


class Turned(SystemClock):
    ahead = 0.0

    def now(self) -> float:
        return super().now() + self.ahead


def opened(place: Path, *, policy: str = "hazard", clock: Any = None, disk: Disk | None = None, **evict: Any) -> Cache:
    settings = load(
        environ={},
        host={"capacity_bytes": 384 * KiB, "slab_bytes": 96 * KiB},
        nvme={
            "path": place,
            "capacity_bytes": "2MiB",
            "segment_bytes": "192KiB",
            "min_free_bytes": 0,
            "durability": "none",
        },
        evict={"policy": policy, **evict},
    )
    os_env = OsEnv(
        disk=disk or LocalDisk(), clock=clock or SystemClock(), executor=lambda threads, name: InlineExecutor()
    )
    return Cache(settings, os_env)


def live(cache: Cache, turns: int = 6) -> None:
    for _ in range(turns):
        for i in range(8):
            put(cache, SMALL, i, 8)
            found(cache, SMALL, i, 8)


def states(cache: Cache) -> dict[str, float]:
    tree: dict[str, float] = cache.counters.tree().get("policy_states", {})
    return tree


def test_a_policy_continues_from_its_saved_state(tmp_path: Path) -> None:
    with opened(tmp_path) as cache:
        live(cache)
        before, table = cache.index.evidence(), cache.index.policy.values(cache.index.evidence())
    assert before.reused.sum() > 100
    with opened(tmp_path) as cache:
        assert states(cache) == {"read": 1}
        after = cache.index.evidence()
        assert (after.reused == before.reused).all()
        waited = (before.forgotten + before.waiting).sum()
        assert abs(int((after.forgotten + after.waiting).sum()) - int(waited)) <= waited // 50, "each once"
        again, anew = cache.index.policy.values(after), cache.index.policy.values(Evidence.none(cache.index.policy))
        assert (
            np.abs(np.log(again[:, :60] / table[:, :60])).mean()
            < np.abs(np.log(anew[:, :60] / table[:, :60])).mean() / 5
        )
        live(cache, 1)
        assert cache.index.evidence().reused.sum() > before.reused.sum()
        assert cache.check() == []


def test_a_kill_loses_at_most_the_last_interval(tmp_path: Path) -> None:
    clock = Turned()
    cache = opened(tmp_path, clock=clock)
    live(cache, 2)
    assert not (tmp_path / FILE_NAME).exists()
    Turned.ahead = SAVE_INTERVAL_S
    try:
        live(cache, 1)
        kept = (tmp_path / FILE_NAME).read_bytes()
        live(cache, 3)  # within the next interval
        assert (tmp_path / FILE_NAME).read_bytes() == kept
    finally:
        Turned.ahead = 0.0
        (tmp_path / "copy").write_bytes(kept)
        cache.close()
    (tmp_path / FILE_NAME).write_bytes(kept)  # as a kill would have left it
    with opened(tmp_path) as cache:
        assert states(cache) == {"read": 1}
        assert cache.index.evidence().reused.sum() > 20


@pytest.mark.parametrize("at", [0, 20, 60, 90, -1])
def test_a_damaged_state_is_ignored_and_counted(tmp_path: Path, at: int) -> None:
    with opened(tmp_path) as cache:
        live(cache, 2)
    data = bytearray((tmp_path / FILE_NAME).read_bytes())
    data[at] ^= 0x10
    (tmp_path / FILE_NAME).write_bytes(data)
    with opened(tmp_path) as cache:
        assert sum(states(cache).values()) == 1
        assert states(cache).keys() <= {"damaged", "foreign"}
        assert cache.index.evidence().reused.sum() == 0
        assert found(cache, SMALL, 7, 8) == 8
    with opened(tmp_path) as cache:  # the next one is whole
        assert states(cache) == {"read": 1}


@pytest.mark.parametrize("length", [0, 5, 30, 200])
def test_a_torn_state_is_ignored(tmp_path: Path, length: int) -> None:
    with opened(tmp_path) as cache:
        live(cache, 1)
    data = (tmp_path / FILE_NAME).read_bytes()
    (tmp_path / FILE_NAME).write_bytes(data[:length])
    with opened(tmp_path) as cache:
        assert states(cache).keys() <= {"damaged", "foreign"}
        assert cache.index.evidence().reused.sum() == 0


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
PACKED = [
    _pack_counts(np.full(3, 7)),
    _pack_counts(np.full(100_000, 1)),
    _pack_counts(np.full((3, 96), -1)),
    "AAAA",
    "x",
]
ROWS: list[Any] = [
    [["00" * SHARD_KEY_BYTES, ["t", ["m"], 16], [0, 0], [0, 0]]],
    [["00" * SHARD_KEY_BYTES, ["t", ["m"], 16], [-8, 8], [8, 8]]],
    [["00", ["t", ["m"], 16], [8, 8], [8, 8]]],
    [["00" * SHARD_KEY_BYTES, [["t"], ["m"], 16], [8, 8], [8, 8]]],
    [["00" * SHARD_KEY_BYTES, ["t", ["m"], "16"], [8, 8], [1e9, 8]]],
]


@given(
    st.tuples(st.sampled_from(["kinds", "reused", "forgotten", "policy", "edges"]), JSON)
    | st.tuples(st.sampled_from(["reused", "forgotten"]), st.sampled_from(PACKED))
    | st.tuples(st.just("kinds"), st.sampled_from(ROWS))
    | st.tuples(
        st.just("rows"),
        st.binary(min_size=1, max_size=31) | st.binary(min_size=33, max_size=39) | st.just(b"\xff" * 40),
    )
    | st.tuples(st.just(""), JSON)
)
@settings(max_examples=60, deadline=None)
def test_a_foreign_state_is_ignored_and_counted(change: tuple[str, Any]) -> None:
    name, value = change
    index = Index(["host", "nvme"], POLICIES["hazard"]())
    cost_classes, counters = CostClasses(index, ["host", "nvme"], Quotas()), Counters()
    with TemporaryDirectory() as place:
        context: Any = SimpleNamespace(
            index=index,
            cost_classes=cost_classes,
            usage_log=UsageLog(SystemClock()),
            counters=counters,
            os_env=OsEnv(),
            background=SimpleNamespace(submit=lambda save: save()),
        )
        state = PolicyState(context, place)
        state.save()
        head, _, rows = (Path(place) / FILE_NAME).read_bytes().split(b"\n", 2)[2].partition(b"\n")
        told = json.loads(head)
        assert told["kinds"] == []
        told = told if name == "rows" else {**told, name: value} if name else value
        body = json.dumps(told).encode() + b"\n" + (value if name == "rows" else rows)
        (Path(place) / FILE_NAME).write_bytes(FORMAT + sha256(body).hexdigest().encode() + b"\n" + body)
        state.load()
    states = counters.tree()["policy_states"]
    assert states in ({"written": 1, "foreign": 1}, {"written": 1, "read": 1})
    if "read" in states:
        assert name == "kinds"
        assert value in ([], {}, "")
    assert index.evidence().reused.sum() == 0
    assert cost_classes.used_bytes("host") == {}
    assert cost_classes.weights("host") == [1.0]
    assert cost_classes.evict("host", 1, tenant="t") == []


def test_last_uses_of_namespaces_survive_a_restart(tmp_path: Path) -> None:
    with opened(tmp_path) as cache:
        live(cache, 1)
        (before,) = cache.usage_log.namespaces().items()
    for policy in ("hazard", "lru"):
        with opened(tmp_path, policy=policy) as cache:
            ((namespace, use),) = cache.usage_log.namespaces().items()
            assert (namespace, use.last) == (before[0], before[1].last)
            assert use.requests == 0, "those are of this life"


def test_only_recent_and_past_uses_are_restored() -> None:
    class Played(SystemClock):
        time = 1000.0

        def wall(self) -> float:
            return self.time

    clock = Played()
    uses = UsageLog(clock)
    for i in range(MAX_NAMESPACES + 9):
        clock.time += 1
        uses.touch(bytes([i % 256, i // 256]) * 16)
    uses.touch(bytes(32))
    told = uses.export(MAX_NAMESPACES)
    assert len(told) == MAX_NAMESPACES
    assert told[-1][0] == bytes(32)
    other = UsageLog(clock)
    other.restore([*told, (b"f" * 32, 1e300)])
    assert [(name, use.last) for name, use in other.namespaces().items()][:-1] == told
    assert other.namespaces()[b"f" * 32].last == clock.time


@pytest.mark.parametrize("used", [[], 7, "AAAA", b64encode(LAST_USE.pack(b"n", float("nan"))).decode()])
def test_a_state_with_invalid_uses_counts_as_foreign(tmp_path: Path, used: Any) -> None:
    with opened(tmp_path) as cache:
        live(cache, 1)
    head, _, body = (tmp_path / FILE_NAME).read_bytes().split(b"\n", 2)
    told, _, rows = body.partition(b"\n")
    body = json.dumps({**json.loads(told), "used": used}).encode() + b"\n" + rows
    (tmp_path / FILE_NAME).write_bytes(b"\n".join([head, sha256(body).hexdigest().encode(), body]))
    with opened(tmp_path) as cache:
        assert cache.counters.tree()["policy_states"] == {"foreign": 1}
        assert cache.usage_log.namespaces() == {}


def test_another_policys_state_is_ignored(tmp_path: Path) -> None:
    with opened(tmp_path) as cache:
        live(cache, 1)
    with opened(tmp_path, policy="lru") as cache:
        assert states(cache) == {"foreign": 1}


def test_a_failed_state_write_affects_nothing_else(tmp_path: Path) -> None:
    class Refusing(LocalDisk):
        def open(self, path: str, *, create: bool = False, direct: bool = False) -> Any:
            if Path(path).name.startswith(FILE_NAME):
                raise OSError(28, "no space left on device")
            return super().open(path, create=create, direct=direct)

    with opened(tmp_path, disk=Refusing()) as cache:
        live(cache, 1)
    assert states(cache) == {"failed": 1}
    assert not (tmp_path / FILE_NAME).exists()


def test_a_share_holds_after_a_restart_without_its_tenant(tmp_path: Path) -> None:
    size = 8 * KiB
    share: Any = {"tenants": {"small": {"nvme_guaranteed_bytes": 40 * size}}}
    with opened(tmp_path, **share) as cache:
        for i in range(6):
            put(cache, SMALL, i, 8, "small")
        had = cache.cost_classes.used_bytes("nvme")["small"]
        assert had >= 40 * size
    with opened(tmp_path, **share) as cache:
        assert cache.cost_classes.used_bytes("nvme") == {"small": had}
        for i in range(40):
            put(cache, SMALL, 100 + i, 8, "greedy")
            assert cache.cost_classes.used_bytes("nvme")["small"] >= 40 * size
        assert cache.index.check() == []


def test_the_state_file_is_bounded(tmp_path: Path) -> None:
    with opened(tmp_path) as cache:
        for i in range(600):
            cache.namespace(SMALL, model=f"a model with a name of some length {i}", revision="r")
        live(cache, 1)
    data = (tmp_path / FILE_NAME).read_bytes()
    assert data.startswith(FORMAT)
    head, _, rows = data.split(b"\n", 2)[2].partition(b"\n")
    assert MAX_JSON_BYTES // 2 < len(head) <= MAX_JSON_BYTES
    assert len(rows) <= 32 + 8 * MAX_ROWS
    with opened(tmp_path) as cache:
        assert states(cache) == {"read": 1}
