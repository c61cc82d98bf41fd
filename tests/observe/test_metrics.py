"""Counters, and that whatever the code counts, and whatever reason it gives, stands in a table with its meaning."""

from __future__ import annotations

import ast
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcache.observe.metrics import METRICS, Counters
from kvcache.observe.reasons import REASONS, meaning
from kvcache.tier.tier import Outcome

ROOT = Path(__file__).parents[2]
FREE = {"tier", "codec", "times"}
"""Labels whose values are names and not reasons."""


def test_counts_by_labels() -> None:
    counters = Counters()
    counters.add("requests")
    counters.add("hit_tokens", 32, tier="host")
    counters.add("hit_tokens", 16, tier="nvme")
    counters.add("hit_tokens", 0, tier="redis")
    counters.add("evicted_blocks", 2, tier="host", kept="yes")
    assert counters.get("hit_tokens") == 48
    assert counters.get("hit_tokens", tier="nvme") == 16
    assert counters.tree() == {
        "requests": 1,
        "hit_tokens": {"host": 32, "nvme": 16},
        "evicted_blocks": {"host,yes": 2},
    }


@pytest.mark.parametrize(("name", "labels"), [("nonsense", {}), ("drops", {}), ("drops", {"cause": "cold"})])
def test_a_counter_missing_from_the_table_raises(name: str, labels: dict[str, str]) -> None:
    with pytest.raises(KeyError):
        Counters().add(name, **labels)


def test_no_count_is_lost_between_threads() -> None:
    counters = Counters()

    def count() -> None:
        for _ in range(1000):
            counters.add("drops", 2, reason="orphan")

    threads = [threading.Thread(target=count) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counters.get("drops", reason="orphan") == 16_000


def test_the_table_lists_every_label_value() -> None:
    labels = {(metric.name, label) for metric in METRICS.values() for label in metric.labels if label not in FREE}
    assert labels == set(REASONS)
    assert all(text for values in REASONS.values() for text in values.values())


def test_a_tiers_reason_is_found_by_any_tier_name() -> None:
    assert meaning("drops", "reason", "nvme queue") == meaning("drops", "reason", "redis queue")
    assert meaning("drops", "reason", "no room") == REASONS["drops", "reason"]["no room"]
    with pytest.raises(KeyError):
        meaning("drops", "reason", "bad luck")


def test_every_failed_outcome_has_a_description() -> None:
    outcomes = {outcome.value for outcome in Outcome} - {"done", "pending"}
    assert outcomes <= set(REASONS["load_failures", "outcome"])
    assert outcomes == set(REASONS["write_failures", "outcome"])


def written(node: ast.expr) -> str | None:
    """A reason as the source has it; a tier's name in it becomes `{tier}`; None where it is worked out elsewhere."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{tier}" for part in node.values)
    return None


def said(source: str) -> Iterator[tuple[str, str, str]]:
    """(metric, label, value) of each count whose value is written where it is counted."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or not node.args:
            continue
        name = written(node.args[0])
        if node.func.attr == "add" and name in METRICS:
            for keyword in node.keywords:
                value = written(keyword.value)
                if keyword.arg is not None and keyword.arg not in FREE and value is not None:
                    yield name, keyword.arg, value
        elif node.func.attr in {"drop", "_drop"} and len(node.args) > 1:
            value = written(node.args[1])
            if value is not None:
                yield "drops", "reason", value


def test_every_reason_that_the_code_gives_is_in_the_table() -> None:
    found = {row for path in sorted((ROOT / "kvcache").rglob("*.py")) for row in said(path.read_text(encoding="utf-8"))}
    assert ("drops", "reason", "orphan") in found, "the search finds nothing: has the way of counting changed?"
    assert [(metric, label, value) for metric, label, value in found if value not in REASONS[metric, label]] == []
