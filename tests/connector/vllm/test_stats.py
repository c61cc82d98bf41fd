"""vLLM's own metrics count each event of the connector once, whatever the daemon behind it does meanwhile."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import kvcache.connector.vllm as package
from kvcache.observe.metrics import Counters

STATS = "kvcache.connector.vllm.stats"
OF_VLLM = "vllm.distributed.kv_transfer.kv_connector.v1.metrics"


class Daemon:
    """A cache's statistics as a client of a daemon gets them."""

    def __init__(self) -> None:
        self.away = False
        self.counters = Counters()
        self.records = 0

    def stats(self) -> dict[str, Any]:
        if self.away:
            return {"tiers": {}, "unreachable": "no answer"}
        return {"tiers": {"host": {"records": self.records}}, "counters": self.counters.tree()}


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """What a sampler tells after one more sample; its own thread takes none."""
    base: Any = ModuleType(OF_VLLM)
    base.KVConnectorStats, base.KVConnectorPromMetrics = SimpleNamespace, object
    monkeypatch.setitem(sys.modules, OF_VLLM, base)
    monkeypatch.delitem(sys.modules, STATS, raising=False)
    module: Any = importlib.import_module(STATS)
    monkeypatch.setattr(module, "SAMPLE_INTERVAL_S", 3600.0)
    made: dict[Any, Any] = {}

    def sample(cache: Any, own: Counters) -> dict[str, Any]:
        sampler = made.setdefault(cache, None) or module.StatsSampler(cache, own)
        made[cache] = sampler
        sampler.sample()
        told = sampler.take()
        return {} if told is None else dict(told.data)

    yield sample
    for sampler in made.values():
        sampler.close()
    sys.modules.pop(STATS, None)
    vars(package).pop("stats", None)


def test_counts_are_not_repeated_after_a_missed_answer(sampled: Callable[..., Any]) -> None:
    daemon, own = Daemon(), Counters()
    daemon.counters.add("requests", 1000)
    daemon.counters.add("hit_tokens", 64, tier="host")
    daemon.records = 5
    first = sampled(daemon, own)
    assert first == {"requests": {"": 1000}, "hit_tokens": {"host": 64}, "tier_records": {"host": 5}}
    daemon.away = True
    own.add("declined", reason="off")
    assert sampled(daemon, own) == {"declined": {"off": 1}}, "what is ours goes on"
    assert sampled(daemon, own) == {}
    daemon.away = False
    daemon.counters.add("requests", 2)
    assert sampled(daemon, own) == {"requests": {"": 2}}


def test_own_counters_are_reported_without_the_daemon(sampled: Callable[..., Any]) -> None:
    daemon, own = Daemon(), Counters()
    daemon.away = True
    own.add("declined", reason="failed")
    assert sampled(daemon, own) == {"declined": {"failed": 1}}
    daemon.away = False
    daemon.counters.add("requests", 3)
    assert sampled(daemon, own) == {"requests": {"": 3}}


def test_a_new_daemons_counters_start_at_zero(sampled: Callable[..., Any]) -> None:
    daemon, own = Daemon(), Counters()
    daemon.counters.add("requests", 1000)
    sampled(daemon, own)
    daemon.counters = Counters()
    daemon.counters.add("requests", 7)
    assert sampled(daemon, own) == {"requests": {"": 7}}
