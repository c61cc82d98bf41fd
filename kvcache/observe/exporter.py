"""The metrics for Prometheus, from the table of metrics and the statistics of a cache.

REGISTRY.register(Collector(cache.stats))  # beside the engine's metrics, in its process
exposition(stats)                          # as text, for statistics from any source
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector as _Collector

from kvcache.observe.metrics import METRICS, Metric

PREFIX = "kvcache_"

Family = CounterMetricFamily | GaugeMetricFamily
Stats = Mapping[str, Any]


class Collector(_Collector):
    """Reads the statistics at each scrape; keeps no state."""

    def __init__(self, stats: Callable[[], Stats]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Family]:
        stats = self._stats()
        for metric in METRICS.values():
            family = _family(metric)
            for labels, value in samples(stats, metric):
                family.add_metric(labels, value)
            yield family

    def describe(self) -> Iterator[Family]:
        """Return the names alone, so that registration does not call the cache."""
        return map(_family, METRICS.values())


def exposition(stats: Stats) -> str:
    registry = CollectorRegistry()
    registry.register(Collector(lambda: stats))
    return generate_latest(registry).decode()


def samples(stats: Stats, metric: Metric) -> Iterator[tuple[tuple[str, ...], float]]:
    """Yield the label values and the value of each row in the statistics.

    A counter without labels starts at 0. Statistics of an unreachable daemon yield no rows, because Prometheus takes a
    counter at 0 for a reset and counts the whole value again.
    """
    if "unreachable" in stats:
        return
    if metric.kind == "gauge":
        yield from _gauge(stats, metric.source.split("."), ())
        return
    found = stats.get("counters", {}).get(metric.name, {} if metric.labels else 0)
    if metric.labels:
        for joined, count in found.items():
            yield tuple(joined.split(",")), count
    else:
        yield (), found


def _gauge(at: Any, path: list[str], labels: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], float]]:
    if not path:
        yield labels, float(at)
    elif path[0] == "*":
        for name, inner in at.items():
            yield from _gauge(inner, path[1:], (*labels, name))
    elif path[0] in at:
        yield from _gauge(at[path[0]], path[1:], labels)


def _family(metric: Metric) -> Family:
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    return kind(PREFIX + metric.name, metric.help, labels=metric.labels)
