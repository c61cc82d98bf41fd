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
        Metric("requests", "counter", (), "requests with a lookup"),
        Metric("asked_tokens", "counter", (), "requested tokens in full blocks, counted at admission"),
        Metric(
            "hit_tokens", "counter", ("tier",), "tokens found, by the fastest tier that had them, counted at admission"
        ),
        Metric("loaded_blocks", "counter", ("tier",), "blocks loaded into pages, by source tier"),
        Metric("loaded_bytes", "counter", ("tier",), "bytes loaded into pages, by source tier"),
        Metric("stored_blocks", "counter", (), "blocks stored from pages"),
        Metric("stored_bytes", "counter", (), "bytes stored from pages"),
        Metric("misses", "counter", ("reason",), "requests whose prefix ended before its last full block, by reason"),
        Metric("declined", "counter", ("reason",), "requests that a connector did not cache; in its engine's metrics"),
        Metric("lookups", "counter", ("answer",), "lookups in shared tiers, by answer"),
        Metric(
            "missed_tokens", "counter", ("reason",), "tokens of full blocks after that end, which the engine computes"
        ),
        Metric(
            "planned_seconds",
            "counter",
            (),
            "time of loads and of computing the rest, where the plan had a choice",
        ),
        Metric(
            "plan_regret_seconds",
            "counter",
            (),
            "part of that time that another choice would have saved, as known afterwards",
        ),
        Metric(
            "saved_seconds", "counter", (), "observe mode: estimated time to first token that loads would have saved"
        ),
        Metric(
            "load_failures",
            "counter",
            ("outcome",),
            "blocks found and not loaded, by outcome; the engine computes them",
        ),
        Metric("drops", "counter", ("reason",), "blocks offered to a tier and dropped, by reason"),
        Metric("written_blocks", "counter", ("tier",), "blocks written to a lower tier"),
        Metric("write_failures", "counter", ("tier", "outcome"), "blocks not written to a lower tier"),
        Metric(
            "encoded_bytes", "counter", ("tier", "codec"), "payload bytes before encoding, by codec; raw: unchanged"
        ),
        Metric("encoded_stored_bytes", "counter", ("tier", "codec"), "bytes after encoding"),
        Metric("promoted_blocks", "counter", ("tier",), "blocks promoted from a lower tier into host memory"),
        Metric(
            "evicted_blocks",
            "counter",
            ("tier", "kept"),
            "blocks evicted from a tier; kept: yes if a lower tier has them",
        ),
        Metric("expired_blocks", "counter", ("tier",), "expired blocks removed from a tier"),
        Metric("refused_records", "counter", ("tier", "check"), "records that failed a check and counted as misses"),
        Metric("canary_blocks", "counter", ("result",), "loaded blocks that the canary recomputed, by result"),
        Metric(
            "canary_worst", "gauge", (), "largest difference, relative to the block's largest value", "canary.worst"
        ),
        Metric("tier_records", "gauge", ("tier",), "records in a tier", "tiers.*.records"),
        Metric("tier_used_bytes", "gauge", ("tier",), "bytes of records in a tier", "tiers.*.used_bytes"),
        Metric("tier_capacity_bytes", "gauge", ("tier",), "capacity of a tier in bytes", "tiers.*.capacity_bytes"),
        Metric(
            "tier_in_trouble",
            "gauge",
            ("tier",),
            "drives or servers that accept no new records now",
            "tiers.*.in_trouble",
        ),
        Metric(
            "policy_states",
            "counter",
            ("result",),
            "loads and saves of the policy's state, by result",
        ),
        Metric(
            "curve_hit_rate",
            "gauge",
            ("tier", "times"),
            "estimated hit rate with a multiple of the tier's capacity, from a sample",
            "curve.*.*",
        ),
        Metric("held_bytes", "gauge", ("tier",), "bytes that requests hold in a tier", "tiers.*.held_bytes"),
        Metric("pinned_bytes", "gauge", ("tier",), "bytes pinned in a tier", "tiers.*.pinned_bytes"),
        Metric(
            "tier_faults",
            "gauge",
            ("tier", "fault"),
            "faults of a shared tier since the start, by kind",
            "tiers.*.faults.*",
        ),
        Metric("queued_blocks", "gauge", (), "blocks that wait to be written to a lower tier", "queued_blocks"),
        Metric("bypass", "gauge", ("path",), "1 while an operator bypasses the cache on this path", "bypass.*"),
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
