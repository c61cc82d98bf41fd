"""The Grafana dashboard and the Prometheus alert rules, generated from the table of metrics.

`kvcache metrics grafana` prints the dashboard. Its first row is written here by hand. After it every metric of the
table has a panel with its help text. `kvcache metrics alerts` prints the alert rules.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvcache.observe.exporter import PREFIX
from kvcache.observe.metrics import METRICS, Metric
from kvcache.observe.reasons import meaning

DATASOURCE = {"type": "prometheus", "uid": "${source}"}
INSTANCE_FILTER = 'instance=~"$instance"'
PANEL_WIDTH, PANEL_HEIGHT = 12, 8  # a panel, of 24 columns

SECTIONS: Mapping[str, Sequence[str]] = {
    "Requests": (
        "requests",
        "asked_tokens",
        "hit_tokens",
        "misses",
        "missed_tokens",
        "declined",
        "lookups",
        "curve_hit_rate",
    ),
    "Loads": (
        "loaded_blocks",
        "loaded_bytes",
        "load_failures",
        "promoted_blocks",
        "planned_seconds",
        "plan_regret_seconds",
        "saved_seconds",
    ),
    "Stores": ("stored_blocks", "stored_bytes", "drops", "written_blocks", "write_failures", "queued_blocks"),
    "Tiers": ("tier_records", "tier_used_bytes", "tier_capacity_bytes", "held_bytes", "pinned_bytes", "evicted_blocks"),
    "Faults": ("tier_in_trouble", "tier_faults", "refused_records", "canary_blocks", "canary_worst", "bypass"),
}
"""Metrics by row title. A metric in no row is shown in the last row, `Others`."""


def prometheus_name(metric: str) -> str:
    """Return a metric's name in Prometheus. Raises KeyError for a metric that is not in the table."""
    return PREFIX + metric + ("_total" if METRICS[metric].kind == "counter" else "")


def rate(metric: str, *by: str, where: str = INSTANCE_FILTER, over: str = "$__rate_interval") -> str:
    """Return the expression of a counter's growth a second."""
    return f"{_sum(by)}(rate({prometheus_name(metric)}{{{where}}}[{over}]))"


def gauge(metric: str, *by: str, where: str = INSTANCE_FILTER) -> str:
    return f"{_sum(by)}({prometheus_name(metric)}{{{where}}})"


def _sum(by: Sequence[str]) -> str:
    return f"sum by ({', '.join(by)}) " if by else "sum "


def dashboard() -> dict[str, Any]:
    ids = itertools.count(1)
    panels: list[dict[str, Any]] = []
    y = 0
    for title, rows in (("At a glance", list(_glance())), *_sections()):
        panels.append(_row(title, next(ids), y))
        y += 1
        for i, (name, about, unit, queries) in enumerate(rows):
            place = {"h": PANEL_HEIGHT, "w": PANEL_WIDTH, "x": PANEL_WIDTH * (i % 2), "y": y + PANEL_HEIGHT * (i // 2)}
            panels.append(_panel(name, about, unit, queries, next(ids), place))
        y += PANEL_HEIGHT * -(-len(rows) // 2)
    return {
        "uid": "kvcache",
        "title": "kvcache",
        "description": "Written by `kvcache metrics grafana` from the table of metrics; changes are lost.",
        "tags": ["kvcache"],
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "schemaVersion": 39,
        "time": {"from": "now-3h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": [_source(), _instance()]},
        "panels": panels,
    }


Query = tuple[str, str]  # expression, legend
PanelSpec = tuple[str, str, str, Sequence[Query]]  # title, description, unit, queries


def _glance() -> Iterator[PanelSpec]:
    requested = rate("asked_tokens")
    yield (
        "Hit rate",
        "Share of requested tokens found, by the fastest tier that had them.",
        "percentunit",
        [(f"{rate('hit_tokens', 'tier')} / ignoring (tier) group_left {requested}", "{{tier}}")],
    )
    yield (
        "How full each tier is",
        "Share of its capacity. Shared tiers are not included.",
        "percentunit",
        [(f"{gauge('tier_used_bytes', 'tier')} / ({gauge('tier_capacity_bytes', 'tier')} > 0)", "{{tier}}")],
    )
    yield (
        "Bytes loaded and stored",
        "Into and out of engines' pages.",
        "Bps",
        [(rate("loaded_bytes", "tier"), "loaded from {{tier}}"), (rate("stored_bytes"), "stored")],
    )
    yield (
        "Misses",
        "Requests whose prefix ended before its last full block, by reason.",
        "reqps",
        [(rate("misses", "reason"), "{{reason}}")],
    )


def _sections() -> Iterator[tuple[str, list[PanelSpec]]]:
    named = {name for names in SECTIONS.values() for name in names}
    others = [name for name in METRICS if name not in named]
    for title, names in (*SECTIONS.items(), ("Others", others)):
        if names:
            yield title, [_panel_spec(METRICS[name]) for name in names]


def _panel_spec(metric: Metric) -> PanelSpec:
    legend = " ".join(f"{{{{{label}}}}}" for label in metric.labels) or metric.name
    if metric.kind == "counter":
        query, unit = (
            rate(metric.name, *metric.labels),
            {"bytes": "Bps", "seconds": "percentunit"}.get(_last(metric), "cps"),
        )
    else:
        query, unit = gauge(metric.name, *metric.labels), {"bytes": "bytes"}.get(_last(metric), "short")
    title = metric.name.replace("_", " ")
    return title[0].upper() + title[1:], metric.help[0].upper() + metric.help[1:] + ".", unit, [(query, legend)]


def _last(metric: Metric) -> str:
    return metric.name.rpartition("_")[2]


def _row(title: str, number: int, y: int) -> dict[str, Any]:
    place = {"h": 1, "w": 24, "x": 0, "y": y}
    return {"id": number, "type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}


def _panel(
    title: str, about: str, unit: str, queries: Sequence[Query], number: int, place: Mapping[str, int]
) -> dict[str, Any]:
    return {
        "id": number,
        "type": "timeseries",
        "title": title,
        "description": about,
        "datasource": DATASOURCE,
        "gridPos": dict(place),
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": DATASOURCE, "expr": query, "legendFormat": legend}
            for i, (query, legend) in enumerate(queries)
        ],
    }


def _source() -> dict[str, Any]:
    return {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def _instance() -> dict[str, Any]:
    return {
        "name": "instance",
        "type": "query",
        "datasource": DATASOURCE,
        "query": f"label_values({prometheus_name('requests')}, instance)",
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }


# Alert rules

_HEAD = """\
# Written by `kvcache metrics alerts` from the table of metrics; changes are lost.
groups:
  - name: kvcache
    rules:
"""


@dataclass(frozen=True, slots=True)
class Alert:
    """An alert rule. `for_duration` is how long the query must hold, in Prometheus's notation."""

    name: str
    query: str
    for_duration: str
    severity: str
    summary: str
    remedy: str


def _selector(metric: str, *pairs: tuple[str, str]) -> str:
    """Return a metric with labels. Raises KeyError for an unknown metric or an unknown value of a label."""
    for label, value in pairs:
        if not value.startswith("~"):
            meaning(metric, label, value)
    inner = ", ".join(
        f"{label}=~{json.dumps(v[1:])}" if v[0] == "~" else f"{label}={json.dumps(v)}" for label, v in pairs
    )
    return prometheus_name(metric) + (f"{{{inner}}}" if inner else "")


_HITS, _REQUESTED = (f"sum by (instance) (rate({_selector(name)}[%s]))" for name in ("hit_tokens", "asked_tokens"))
_RECENT_HIT_RATE, _DAY_HIT_RATE = (f"({_HITS % over} / {_REQUESTED % over})" for over in ("30m", "1d"))

ALERTS: Sequence[Alert] = (
    Alert(
        "KVCacheDiffers",
        f"increase({_selector('canary_blocks', ('result', 'different'))}[1h]) > 0",
        "0m",
        "critical",
        "The canary recomputed a loaded block, and the result differs.",
        "Bypass the cache (`kvcache bypass on`); its log names the block.",
    ),
    Alert(
        "KVCacheRecordsDamaged",
        f"sum by (instance, tier) (increase({_selector('refused_records', ('check', 'damaged'))}[1h])) > 0",
        "0m",
        "warning",
        "Records in {{ $labels.tier }} failed their check. They were misses, and were removed.",
        "Check the drive or the server: `kvcache doctor`, `kvcache check`.",
    ),
    Alert(
        "KVCacheTierInTrouble",
        f"{_selector('tier_in_trouble')} > 0",
        "5m",
        "warning",
        "A part of {{ $labels.tier }} accepts no new records.",
        "`kvcache stats -o json` names it under `troubles`.",
    ),
    Alert(
        "KVCacheBypassed",
        f"max by (instance, path) ({_selector('bypass')}) > 0",
        "30m",
        "warning",
        "An operator bypasses the cache on {{ $labels.path }}.",
        "`kvcache bypass off` ends the bypass.",
    ),
    Alert(
        "KVCacheLoadsFail",
        f"sum by (instance) (rate({_selector('load_failures')}[15m])) "
        f"> 0.01 * sum by (instance) (rate({_selector('loaded_blocks')}[15m]))",
        "15m",
        "warning",
        "More than 1 % of the found blocks did not load; engines computed them.",
        "`kvcache explain` shows the last one; the metric's outcome label gives the reason.",
    ),
    Alert(
        "KVCacheWritesFail",
        f"sum by (instance, tier) (rate({_selector('write_failures')}[15m])) > 0",
        "15m",
        "warning",
        "Blocks are not written to {{ $labels.tier }}.",
        "The metric's outcome label gives the reason; `kvcache doctor` checks the tier.",
    ),
    Alert(
        "KVCacheQueueFull",
        f"sum by (instance, reason) (rate({_selector('drops', ('reason', '~.* queue'))}[15m])) > 0",
        "30m",
        "warning",
        "Stores exceed the rate of a lower tier ({{ $labels.reason }}).",
        "Use a faster tier, or write it on second use only.",
    ),
    Alert(
        "KVCacheHitsFell",
        f"{_RECENT_HIT_RATE} < 0.25 * {_DAY_HIT_RATE} and {_REQUESTED % '30m'} > 0",
        "30m",
        "warning",
        "The hit rate is below a quarter of the last day's.",
        "`kvcache stats` shows miss reasons, `kvcache explain` those of one prompt.",
    ),
    Alert(
        "KVCachePlansWrong",
        f"sum by (instance) (rate({_selector('plan_regret_seconds')}[1h])) "
        f"> 0.2 * sum by (instance) (rate({_selector('planned_seconds')}[1h]))",
        "1h",
        "info",
        "Other choices would have saved a fifth of the time of loads and prefills.",
        "Read rates vary too fast for the plan: check whether the tier is shared with other work.",
    ),
)


def rules() -> str:
    """Return the alert rules as YAML for Prometheus."""
    return _HEAD + "".join(line for alert in ALERTS for line in _lines(alert))


def _lines(alert: Alert) -> Iterator[str]:
    yield f"      - alert: {alert.name}\n"
    yield f"        expr: {json.dumps(alert.query)}\n"
    yield f"        for: {alert.for_duration}\n"
    yield f"        labels:\n          severity: {alert.severity}\n"
    yield "        annotations:\n"
    yield f"          summary: {json.dumps(alert.summary)}\n"
    yield f"          description: {json.dumps(alert.remedy)}\n"
