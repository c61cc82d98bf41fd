"""The table of metrics, and the counters behind it. Exporter and documentation are generated from the table.

`reasons.py` lists the values of the labels `reason`, `outcome`, `check`, `kept` and `path`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    kind: Literal["counter", "gauge"]
    labels: tuple[str, ...]
    help: str
    source: str = ""
    """Path of a gauge's value in the statistics of a cache. `*` stands for a label, in the order of `labels`."""


METRICS: dict[str, Metric] = {
    m.name: m
    for m in (
        Metric("requests", "counter", (), "requests that asked for a prefix"),
        Metric("asked_tokens", "counter", (), "tokens of full blocks asked for, counted when admitted"),
        Metric("hit_tokens", "counter", ("tier",), "tokens found, by the nearest tier that had them, when admitted"),
        Metric("loaded_blocks", "counter", ("tier",), "blocks brought into pages, by the tier they came from"),
        Metric("loaded_bytes", "counter", ("tier",), "bytes brought into pages, by the tier they came from"),
        Metric("stored_blocks", "counter", (), "blocks taken from pages"),
        Metric("stored_bytes", "counter", (), "bytes taken from pages"),
        Metric("misses", "counter", ("reason",), "requests whose prefix ended before its last full block, by reason"),
        Metric(
            "declined", "counter", ("reason",), "requests that a connector let go by uncached; in its engine's metrics"
        ),
        Metric("lookups", "counter", ("answer",), "prompts that a shared tier was asked about, by what came of it"),
        Metric("missed_tokens", "counter", ("reason",), "tokens of full blocks behind that end, left to compute"),
        Metric(
            "planned_seconds",
            "counter",
            (),
            "time that loads took, and computing what they left, where there was a choice",
        ),
        Metric(
            "plan_regret_seconds", "counter", (), "of that, what another choice would have saved, as known afterwards"
        ),
        Metric(
            "saved_seconds", "counter", (), "of a trial: time to first tokens that loads would have saved, as estimated"
        ),
        Metric("load_failures", "counter", ("outcome",), "blocks promised and not delivered, by outcome: recomputed"),
        Metric("drops", "counter", ("reason",), "blocks that were offered and not kept, by reason"),
        Metric("written_blocks", "counter", ("tier",), "blocks written to a tier below host"),
        Metric("write_failures", "counter", ("tier", "outcome"), "blocks not written to a tier below host"),
        Metric("encoded_bytes", "counter", ("tier", "codec"), "payload bytes given to a codec; raw: left as they are"),
        Metric("encoded_stored_bytes", "counter", ("tier", "codec"), "bytes that the codec made of them"),
        Metric("promoted_blocks", "counter", ("tier",), "blocks brought up into host from a tier below"),
        Metric(
            "evicted_blocks", "counter", ("tier", "kept"), "blocks that left a tier; kept: yes where one below has it"
        ),
        Metric("expired_blocks", "counter", ("tier",), "blocks whose end had come, which then left a tier"),
        Metric("refused_records", "counter", ("tier", "check"), "records that failed a check: a miss, never a hit"),
        Metric(
            "canary_blocks", "counter", ("result",), "loaded blocks that an engine computed again, by how they compare"
        ),
        Metric(
            "canary_worst", "gauge", (), "largest difference, as a part of the block's largest number", "canary.worst"
        ),
        Metric("tier_records", "gauge", ("tier",), "records in a tier", "tiers.*.records"),
        Metric("tier_used_bytes", "gauge", ("tier",), "bytes of records in a tier", "tiers.*.used_bytes"),
        Metric("tier_capacity_bytes", "gauge", ("tier",), "bytes a tier may hold", "tiers.*.capacity_bytes"),
        Metric(
            "tier_in_trouble",
            "gauge",
            ("tier",),
            "drives or servers that take no new records now",
            "tiers.*.in_trouble",
        ),
        Metric(
            "policy_states",
            "counter",
            ("result",),
            "the policy's state, read at start and written down, by result",
        ),
        Metric(
            "curve_hit_rate",
            "gauge",
            ("tier", "times"),
            "share of tokens that would be found with so many times the tier's memory, from a sample",
            "curve.*.*",
        ),
        Metric("held_bytes", "gauge", ("tier",), "bytes that requests keep from leaving a tier", "tiers.*.held_bytes"),
        Metric("pinned_bytes", "gauge", ("tier",), "bytes that an operator keeps in a tier", "tiers.*.pinned_bytes"),
        Metric(
            "tier_faults",
            "gauge",
            ("tier", "fault"),
            "what went wrong in a tier that others share since the start, by kind",
            "tiers.*.faults.*",
        ),
        Metric("queued_blocks", "gauge", (), "blocks waiting to be written to a tier below host", "queued_blocks"),
        Metric("bypass", "gauge", ("path",), "1 while an operator keeps the cache out of this path", "bypass.*"),
    )
}


class Counters:
    """Counts by metric and labels. An unknown name or label raises KeyError: a defect of the caller.

    Thread safety: any thread may call it.
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[str, tuple[str, ...]], float] = {}
        self._lock = threading.Lock()

    def add(self, name: str, amount: float = 1, **labels: str) -> None:
        metric = METRICS[name]
        key = (name, tuple(labels[label] for label in metric.labels))
        if amount:
            with self._lock:
                self._counts[key] = self._counts.get(key, 0) + amount

    def get(self, name: str, **labels: str) -> float:
        """Return the count under these labels, summed over labels that are not given."""
        metric = METRICS[name]
        with self._lock:
            rows = list(self._counts.items())
        return sum(
            count
            for (row, values), count in rows
            if row == name and all(labels.get(label, v) == v for label, v in zip(metric.labels, values, strict=True))
        )

    def rows(self) -> Iterator[tuple[str, dict[str, str], float]]:
        with self._lock:
            rows = sorted(self._counts.items())
        for (name, values), count in rows:
            yield name, dict(zip(METRICS[name].labels, values, strict=True)), count

    def tree(self) -> dict[str, Any]:
        """Return for each metric a number, or numbers by label values joined with a comma."""
        tree: dict[str, Any] = {}
        for name, labels, count in self.rows():
            if labels:
                tree.setdefault(name, {})[",".join(labels.values())] = count
            else:
                tree[name] = count
        return tree
