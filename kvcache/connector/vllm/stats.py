"""Adds the cache's metrics to vLLM's `/metrics` and log, as growth since the last sample."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvcache.cache.api import KVCache
from kvcache.connector.guard import recover
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
    """Statistics that cross processes. `data` maps metric, then label values joined by commas, to a growth or a gauge's
    value."""

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
    """Samples the cache once a second, on its own thread since a daemon takes a while to answer."""

    def __init__(self, cache: KVCache | ObserveMode, own: Counters) -> None:
        """`own` holds the connector's own counters."""
        self._cache, self._own = cache, own
        self._answered: Mapping[str, Any] = {}  # the last statistics that the cache returned
        self._reported: dict[str, dict[str, float]] = {}
        self._now: dict[str, dict[str, float]] = {}
        self._end = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="kvcache-stats", daemon=True)
        self._thread.start()

    def take(self) -> ConnectorStats | None:
        """Return what has changed since the last call; None without changes."""
        with self._lock:
            now, last = self._now, self._reported
            self._reported = now
        if now is last:
            return None
        grown: dict[str, dict[str, float]] = {}
        for name, rows in now.items():
            before = last.get(name, {})
            changed = {labels: value for labels, value in rows.items() if value != before.get(labels, 0)}
            if METRICS[name].kind == "counter":  # a counter that went down began again, in another daemon
                changed = {k: v - before.get(k, 0) if v > before.get(k, 0) else v for k, v in changed.items()}
            if changed:
                grown[name] = changed
        return ConnectorStats(data=grown) if grown else None

    def close(self) -> None:
        self._end.set()
        self._thread.join(SAMPLE_INTERVAL_S)

    def sample(self) -> None:
        """Sample once; the thread does so every second.

        Where a daemon does not answer, its last rows stay. Otherwise counts reported once would be reported again when
        it answers.
        """
        stats = self._cache.stats()
        if "unreachable" not in stats:
            self._answered = stats
        counters = {**self._answered.get("counters", {}), **self._own.tree()}
        now = metric_rows({**self._answered, "counters": counters})
        with self._lock:
            self._now = now

    def _run(self) -> None:
        while not self._end.wait(SAMPLE_INTERVAL_S):
            recover(self.sample, lambda error: _log.debug("statistics are not available: cause=%s", error))


def metric_rows(stats: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    return {m.name: {",".join(labels): value for labels, value in samples(stats, m)} for m in METRICS.values()}


class PrometheusMetrics(KVConnectorPromMetrics):
    """A metric family for each row of the metrics table, with vLLM's labels and the row's own."""

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
