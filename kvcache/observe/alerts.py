"""Rules by which Prometheus calls somebody, written from the table of metrics: `kvcache metrics alerts`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvcache.observe.grafana import name_of
from kvcache.observe.reasons import meaning

_HEAD = """\
# Written by `kvcache metrics alerts` from the table of metrics; changes are lost.
groups:
  - name: kvcache
    rules:
"""


@dataclass(frozen=True, slots=True)
class Alert:
    """`lasts`: for how long it must hold, as Prometheus writes it. `do`: what helps, beside what it means."""

    name: str
    query: str
    lasts: str
    severity: str
    means: str
    do: str


def _of(metric: str, *pairs: tuple[str, str]) -> str:
    """A metric with labels; KeyError where the tables have none of this name, or no such value of a label."""
    for label, value in pairs:
        if not value.startswith("~"):
            meaning(metric, label, value)
    inner = ", ".join(
        f"{label}=~{json.dumps(v[1:])}" if v[0] == "~" else f"{label}={json.dumps(v)}" for label, v in pairs
    )
    return name_of(metric) + (f"{{{inner}}}" if inner else "")


def alerts() -> Sequence[Alert]:
    hits, asked = (f"sum by (instance) (rate({_of(name)}[%s]))" for name in ("hit_tokens", "asked_tokens"))
    lately, before = (f"({hits % over} / {asked % over})" for over in ("30m", "1d"))
    return (
        Alert(
            "KVCacheDiffers",
            f"increase({_of('canary_blocks', ('result', 'different'))}[1h]) > 0",
            "0m",
            "critical",
            "An engine computed a loaded block again, and it is not the same.",
            "Bypass the cache (`kvcache bypass on`); its log names the block.",
        ),
        Alert(
            "KVCacheRecordsDamaged",
            f"sum by (instance, tier) (increase({_of('refused_records', ('check', 'damaged'))}[1h])) > 0",
            "0m",
            "warning",
            "Records in {{ $labels.tier }} failed their check. They were misses, and were removed.",
            "Look at the drive or the server: `kvcache doctor`, `kvcache check`.",
        ),
        Alert(
            "KVCacheTierInTrouble",
            f"{_of('tier_in_trouble')} > 0",
            "5m",
            "warning",
            "A part of {{ $labels.tier }} takes no new records.",
            "`kvcache stats -o json` names it under `troubles`.",
        ),
        Alert(
            "KVCacheBypassed",
            f"max by (instance, path) ({_of('bypass')}) > 0",
            "30m",
            "warning",
            "An operator has taken the cache out of {{ $labels.path }}.",
            "`kvcache bypass off` puts it back.",
        ),
        Alert(
            "KVCacheLoadsFail",
            f"sum by (instance) (rate({_of('load_failures')}[15m])) "
            f"> 0.01 * sum by (instance) (rate({_of('loaded_blocks')}[15m]))",
            "15m",
            "warning",
            "More than one of a hundred blocks that were promised did not come; engines computed them.",
            "`kvcache explain` tells of the last; the metric's outcome says what happened.",
        ),
        Alert(
            "KVCacheWritesFail",
            f"sum by (instance, tier) (rate({_of('write_failures')}[15m])) > 0",
            "15m",
            "warning",
            "Blocks are not written to {{ $labels.tier }}.",
            "The metric's outcome says why; `kvcache doctor` looks at the tier.",
        ),
        Alert(
            "KVCacheQueueFull",
            f"sum by (instance, reason) (rate({_of('drops', ('reason', '~.* queue'))}[15m])) > 0",
            "30m",
            "warning",
            "More is stored than the tier below can take ({{ $labels.reason }}).",
            "A faster tier, or one that is written on second use only.",
        ),
        Alert(
            "KVCacheHitsFell",
            f"{lately} < 0.25 * {before} and {asked % '30m'} > 0",
            "30m",
            "warning",
            "Less than a quarter of the last day's hit rate is found.",
            "`kvcache stats` tells the reasons of misses, `kvcache explain` those of one prompt.",
        ),
        Alert(
            "KVCachePlansWrong",
            f"sum by (instance) (rate({_of('plan_regret_seconds')}[1h])) "
            f"> 0.2 * sum by (instance) (rate({_of('planned_seconds')}[1h]))",
            "1h",
            "info",
            "A fifth of the time of loads and prefills would have been saved by other choices.",
            "Rates change more than can be followed: is the tier shared with other work?",
        ),
    )


def rules() -> str:
    """As Prometheus reads them (YAML)."""
    return _HEAD + "".join(line for alert in alerts() for line in _lines(alert))


def _lines(alert: Alert) -> Iterator[str]:
    yield f"      - alert: {alert.name}\n"
    yield f"        expr: {json.dumps(alert.query)}\n"
    yield f"        for: {alert.lasts}\n"
    yield f"        labels:\n          severity: {alert.severity}\n"
    yield "        annotations:\n"
    yield f"          summary: {json.dumps(alert.means)}\n"
    yield f"          description: {json.dumps(alert.do)}\n"
