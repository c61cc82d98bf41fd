"""The rows say what the two sides answered, and nothing where an answer was not right."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from lmcache_comparison import measurements
from lmcache_comparison.kvcache_worker import KVCacheWorker
from lmcache_comparison.measurements import (
    Alternation,
    Sizes,
    WrongResult,
    measure_disk,
    measure_host,
    measure_match,
    measure_memory,
    measure_redis,
    measure_redis_lookup,
)
from lmcache_comparison.workload import SMALL

from tests.peer.redis_server import MISSING, empty

SIZES = Sizes(match_tokens=4096, tokens=64, shape=SMALL, rounds=3, shared_tokens=64, records=64)
ROWS = [
    "match/tensor",
    "match/list",
    "match/hold",
    "evict/256_tokens",
    "evict",
    "host/store",
    "host/retrieve",
    "disk/store/direct",
    "disk/store/direct/synced",
    "disk/retrieve/direct",
    "disk/store/buffered",
    "disk/store/buffered/synced",
    "disk/retrieve/buffered",
    "bytes_a_token/in-process",
    "bytes_a_token/multiprocess",
]


class Fixed:
    """A side that answers as it is told, in the time it is told, and writes down that it was asked."""

    def __init__(self, name: str, seconds: float, asked: list[tuple[str, str]], **instead: Any) -> None:
        self._name, self._seconds, self._asked, self._instead = name, seconds, asked, instead
        self._disk = False

    def ask(self, verb: str, **arguments: Any) -> Any:
        self._asked.append((self._name, verb))
        s = self._seconds
        if verb == "open":
            self._disk = "directory" in arguments or "url" in arguments
            if "directory" in arguments:
                Path(arguments["directory"]).mkdir()
        if verb == "store":
            warm = 1 if arguments["seed"] >= measurements.WARM else 100
            return {"stored_s": warm * s, "found_s": 2 * warm * s, "durable_s": 4 * warm * s}
        if verb == "retrieve":
            near = 0 if self._disk else SIZES.tokens
            return {"seconds": s, "hits": SIZES.tokens, "near": near, "wrong": 0, **self._instead}
        if verb in {"match", "hold", "evict", "contains"}:
            return [s] * arguments["runs"]
        return 8 * s if verb == "structure" else None


class InProcess:
    """Our side without a process of its own."""

    def __init__(self) -> None:
        self._ours = KVCacheWorker()

    def ask(self, verb: str, **arguments: Any) -> Any:
        return getattr(self._ours, verb)(**arguments)


@pytest.fixture(autouse=True)
def floors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurements, "copy_rate", lambda: 10e9)
    monkeypatch.setattr(measurements, "drive_rate", lambda directory: 2e9)


def measure(ours: Any, theirs: Any, directory: Path) -> Sequence[measurements.Measurement]:
    turns = Alternation(ours, theirs)
    return [
        *measure_match(turns, SIZES),
        *measure_host(turns, SIZES),
        *measure_disk(turns, SIZES, directory),
        *measure_memory(ours, dict.fromkeys(measurements.STRUCTURES, theirs), SIZES),
    ]


def test_a_worker_twice_as_fast_has_ratio_two_in_all_rows(tmp_path: Path) -> None:
    asked: list[tuple[str, str]] = []
    found = {f.id: f for f in measure(Fixed("ours", 0.001, asked), Fixed("theirs", 0.002, asked), tmp_path)}
    assert list(found) == ROWS
    rows = {name: figure.row for name, figure in found.items()}
    better = {name: pytest.approx(2) for name in ROWS} | {"evict": pytest.approx(32)}  # ours: one block of sixteen
    better |= dict.fromkeys(["disk/store/direct", "disk/store/buffered"], pytest.approx(1))  # durable against found
    assert {name: row.vs_peer for name, row in rows.items()} == better
    assert {name: f.best.vs_peer for name, f in found.items()} == better
    assert (rows["match/list"].value, rows["match/list"].unit) == (1.0, "ms")
    rate = SIZES.prompt_bytes / 0.001 / 1e9
    assert rows["host/store"].value == pytest.approx(rate)  # without the rounds that warmed up
    assert rows["host/store"].ratio == pytest.approx(rate / 10)
    assert rows["disk/store/direct"].value == pytest.approx(rate / 4)


def test_workers_alternate_in_asking_order(tmp_path: Path) -> None:
    asked: list[tuple[str, str]] = []
    list(measure_host(Alternation(Fixed("ours", 1, asked), Fixed("theirs", 1, asked)), SIZES))
    pairs = list(zip(asked[::2], asked[1::2], strict=True))
    assert all(one[1] == other[1] and one[0] != other[0] for one, other in pairs)
    firsts = [one[0] for one, _ in pairs]
    assert firsts == [("ours", "theirs")[i % 2] for i in range(len(pairs))]


@pytest.mark.parametrize("instead", [{"hits": 48}, {"wrong": 1}, {"near": 16}])
@pytest.mark.parametrize("who", ["ours", "theirs"])
def test_a_wrong_answer_ends_the_measurement(who: str, instead: dict[str, int]) -> None:
    sides = [Fixed(name, 1, [], **(instead if name == who else {})) for name in ("ours", "theirs")]
    with pytest.raises(WrongResult, match=who):
        list(measure_host(Alternation(*sides), SIZES))


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
def test_the_kvcache_worker_measures_redis(tmp_path: Path) -> None:
    found = []
    for measured in (measure_redis, measure_redis_lookup):
        turns = Alternation(InProcess(), Fixed("theirs", 0.001, []))
        found += list(measured(turns, SIZES, empty(tmp_path / measured.__name__).unix))
        turns.ours.ask("close")
    assert [figure.id for figure in found] == ["redis/store", "redis/retrieve", "redis/contains"]
    assert all(figure.row.value > 0 for figure in found)


def test_the_kvcache_worker_measures_every_row(tmp_path: Path) -> None:
    """With no retrieval that is not a whole hit of the right bytes, from where it should come."""
    found = measure(InProcess(), Fixed("theirs", 0.001, []), tmp_path)
    assert [figure.id for figure in found] == ROWS
    assert all(figure.row.value > 0 for figure in found[:-2])
