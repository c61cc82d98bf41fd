"""The cache's metrics in vLLM's own `/metrics` and log: the rows of our one table, as they grow."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvcache.cache.api import KVCache
from kvcache.connector.vllm.observe_mode import ObserveMode
from kvcache.observe.exporter import PREFIX, samples
from kvcache.observe.metrics import METRICS, Counters

SAMPLE_INTERVAL_S = 1.0
_LOGGED_METRICS = (
    "asked_tokens",
    "hit_tokens",
    "loaded_blocks",
    "stored_blocks",
    "load_failures",
    "drops",
    "declined",
    "saved_seconds",
)

_log = logging.getLogger("kvcache.connector.vllm")


class ConnectorStats(KVConnectorStats):
    """`data` is what crosses processes: by metric, by label values joined with a comma, a growth or a gauge's value."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> ConnectorStats:
        for name, rows in other.data.items():
            mine = self.data.setdefault(name, {})
            for labels, value in rows.items():
                mine[labels] = value + (mine.get(labels, 0) if METRICS[name].kind == "counter" else 0)
        return self

    def reduce(self) -> dict[str, int | float]:
        return {name: sum(self.data[name].values()) for name in _LOGGED_METRICS if name in self.data}


class StatsSampler:
    """Asks the cache once a second on a thread of its own, since a daemon's answer takes a while."""

    def __init__(self, cache: KVCache | ObserveMode, own: Counters) -> None:
        """`own`: what the connector counts itself."""
        self._cache, self._own = cache, own
        self._answered: Mapping[str, Any] = {}  # the last statistics of the cache that came
        self._told: dict[str, dict[str, float]] = {}
        self._now: dict[str, dict[str, float]] = {}
        self._end = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="kvcache-stats", daemon=True)
        self._thread.start()

    def take(self) -> ConnectorStats | None:
        """What has changed since the last call; None for nothing."""
        with self._lock:
            now, last = self._now, self._told
            self._told = now
        if now is last:
            return None
        grown: dict[str, dict[str, float]] = {}
        for name, rows in now.items():
            before = last.get(name, {})
            changed = {labels: value for labels, value in rows.items() if value != before.get(labels, 0)}
            if METRICS[name].kind == "counter":  # one that went back began anew, with another daemon
                changed = {k: v - before.get(k, 0) if v > before.get(k, 0) else v for k, v in changed.items()}
            if changed:
                grown[name] = changed
        return ConnectorStats(data=grown) if grown else None

    def close(self) -> None:
        self._end.set()
        self._thread.join(SAMPLE_INTERVAL_S)

    def sample(self) -> None:
        """The thread's, once a second. Where a daemon does not answer, the rows that it told last stand: counts that
        were told once would else be told again when it does."""
        stats = self._cache.stats()
        if "unreachable" not in stats:
            self._answered = stats
        counters = {**self._answered.get("counters", {}), **self._own.tree()}
        now = metric_rows({**self._answered, "counters": counters})
        with self._lock:
            self._now = now

    def _run(self) -> None:
        while not self._end.wait(SAMPLE_INTERVAL_S):
            try:
                self.sample()
            except Exception as error:  # noqa: BLE001  law: never in the way
                _log.debug("no statistics this time: %s", error)


def metric_rows(stats: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    return {m.name: {",".join(labels): value for labels, value in samples(stats, m)} for m in METRICS.values()}


class PrometheusMetrics(KVConnectorPromMetrics):
    """A family for each row of the table, with vLLM's labels beside its own."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine)
        self._engines = per_engine
        self._families = {
            metric.name: (self._counter_cls if metric.kind == "counter" else self._gauge_cls)(
                name=PREFIX + metric.name, documentation=metric.help, labelnames=[*labelnames, *metric.labels]
            )
            for metric in METRICS.values()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, rows in transfer_stats_data.items():
            for labels, value in rows.items():
                values = [*self._engines[engine_idx], *(labels.split(",") if METRICS[name].labels else ())]
                child = self._families[name].labels(*values)
                if METRICS[name].kind == "counter":
                    child.inc(value)
                else:
                    child.set(value)
