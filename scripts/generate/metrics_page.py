"""docs/metrics.md, written from the tables of metrics, reasons and events; a test keeps them the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from kvcache.observe.events import EVENT_KINDS, MERGE_WINDOW_S, Event
from kvcache.observe.exporter import PREFIX
from kvcache.observe.metrics import METRICS
from kvcache.observe.reasons import REASONS

_HEAD = """\
# Metrics

What a cache counts, and the reasons that it can give. `kvcache stats` shows them for a running cache, `-o json` as a
tree and `-o prometheus` as text for a scraper. In an engine that serves Prometheus itself they are registered beside
its own:

```python
from prometheus_client import REGISTRY
from kvcache.observe.exporter import Collector

REGISTRY.register(Collector(cache.stats))
```

A block of a model with several groups is one record a group, and what counts blocks below counts each record.
Counters begin at 0 with the cache; a counter's name ends in `_total` where Prometheus reads it.

This page is written by `python -m scripts.generate.metrics_page`.
"""

_REASONS = """\
## Reasons

Every value that a label can have. `{tier}` stands for the name of a tier.
"""

_EVENTS = f"""\
## Events

Counters say how often. `kvcache events` says what happened last, in order: a run of blocks that met the same fate one
after another, within {MERGE_WINDOW_S:g} s, is one event. The ring holds the last 1,024.

Each has {", ".join(f"`{field.name}`" for field in fields(Event))}: the time of the run's first block in seconds since
1970, the first 8 digits of the namespace's id, and the id of the request on whose behalf it was done, where there was
one, with the agent and the session that it named. What happens on a tier's own threads has none. `bytes` is 0 where a
tier does not tell.
"""


def metrics_page() -> str:
    return "\n".join([_HEAD, *_metrics(), _REASONS, *_reasons(), _EVENTS, *_kinds()])


def _metrics() -> Iterator[str]:
    yield "## The table\n\n| metric | kind | labels | what it is |\n| --- | --- | --- | --- |"
    for metric in METRICS.values():
        name = PREFIX + metric.name + ("_total" if metric.kind == "counter" else "")
        yield f"| `{name}` | {metric.kind} | {', '.join(f'`{label}`' for label in metric.labels)} | {metric.help} |"
    yield ""


def _reasons() -> Iterator[str]:
    yield "| metric | label | value | what it means |\n| --- | --- | --- | --- |"
    for (metric, label), values in REASONS.items():
        for value, meaning in values.items():
            yield f"| `{metric}` | `{label}` | `{value}` | {meaning} |"
    yield ""


def _kinds() -> Iterator[str]:
    yield "| kind | what happened to the blocks |\n| --- | --- |"
    for kind, meaning in EVENT_KINDS.items():
        yield f"| `{kind}` | {meaning} |"
    yield ""


if __name__ == "__main__":
    print(metrics_page(), end="")
