"""What Prometheus reads is what the cache says of itself; what the page says is what Prometheus reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

import kvcache
from kvcache.block.layout import KVLayout
from kvcache.observe.exporter import PREFIX, Collector, exposition
from kvcache.observe.metrics import METRICS
from kvcache.observe.reasons import REASONS
from kvcache.transfer.pages import GroupPages
from scripts.generate.metrics_page import metrics_page

ROOT = Path(__file__).parents[2]
LAYOUT = KVLayout.mha(layers=1, kv_heads=1, head_dim=8, dtype="fp32", block_tokens=4)


def used(tmp_path: Path) -> Any:
    """A cache with something in every gauge and in most counters."""
    cache: Any = kvcache.open(
        host={"capacity_bytes": "1MiB"},
        nvme={"path": tmp_path / "nvme", "capacity_bytes": "64MiB", "min_free_bytes": 0},
        control__enabled=False,
    )
    pages = [GroupPages.from_tensors(LAYOUT, np.zeros((1, 2, 8, 4, 1, 8), np.float32), axes=AXES)]
    with cache.namespace(LAYOUT, model="m", revision="r").request() as r:
        r.match(range(20))
        r.admit()
        assert r.store(pages, [[0, 1, 2, 3, 4]]).wait(30)
    with cache.namespace(LAYOUT, model="m", revision="r").request() as r:
        hit = r.match(range(24))
        r.admit()
        assert r.load(hit.blocks, pages, [[0, 1, 2, 3, 4]]).wait(30)
        assert cache.flush(30)
    return cache


AXES = ("kv", "page", "token", "head", "dim")


def test_every_figure_of_a_cache_is_exported(tmp_path: Path) -> None:
    cache = used(tmp_path)
    stats = cache.stats()
    cache.close()
    rows = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(exposition(stats))
        for sample in family.samples
    }
    assert rows["kvcache_requests_total",] == 2
    assert rows["kvcache_stored_blocks_total",] == 5
    assert rows["kvcache_hit_tokens_total", ("tier", "host")] == 20
    assert rows["kvcache_misses_total", ("reason", "cold")] == 2
    assert rows["kvcache_tier_records", ("tier", "nvme")] == 5
    assert rows["kvcache_tier_capacity_bytes", ("tier", "host")] == 1 << 20
    assert rows["kvcache_queued_blocks",] == 0
    assert rows["kvcache_bypass", ("path", "loads")] == 0
    counted = sum(len(found) if isinstance(found, dict) else 1 for found in stats["counters"].values())
    without = sum(m.kind == "counter" and not m.labels and m.name not in stats["counters"] for m in METRICS.values())
    told = "read_bytes_per_s"  # the plan's estimate, for `simulate --measured`; a rate is Prometheus' own to work out
    tiers = sum(
        not isinstance(value, (list, dict))
        for tier in stats["tiers"].values()
        for name, value in tier.items()
        if name != told
    )
    curve = sum(map(len, stats["curve"].values()))
    assert len(rows) == counted + without + tiers + curve + len(stats["bypass"]) + len(stats["canary"]) + 1


def test_a_registry_reads_stats_at_each_scrape() -> None:
    asked = []

    def stats() -> dict[str, Any]:
        asked.append(1)
        return {"counters": {"requests": len(asked)}}

    registry = CollectorRegistry(auto_describe=True)
    registry.register(Collector(stats))
    assert asked == []
    assert [registry.get_sample_value("kvcache_requests_total") for _ in range(2)] == [1, 2]
    with pytest.raises(ValueError, match="Duplicated"):
        registry.register(Collector(stats))


def test_missing_statistics_are_left_out() -> None:
    text = exposition({"tiers": {"host": {"records": 3}}})
    assert 'kvcache_tier_records{tier="host"} 3.0' in text
    assert "kvcache_tier_used_bytes{" not in text


def test_a_daemon_that_did_not_answer_has_no_counter_at_nought() -> None:
    told: dict[str, Any] = {"tiers": {}, "counters": {"requests": 7}}
    registry = CollectorRegistry()
    registry.register(Collector(lambda: told))
    assert registry.get_sample_value("kvcache_requests_total") == 7
    told = {"tiers": {}, "unreachable": "no answer"}
    assert registry.get_sample_value("kvcache_requests_total") is None


def test_the_metrics_page_equals_the_tables() -> None:
    written = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert written == metrics_page(), "write it anew: python -m scripts.generate.metrics_page > docs/metrics.md"
    for metric in METRICS.values():
        assert f"`{PREFIX}{metric.name}{'_total' if metric.kind == 'counter' else ''}`" in written
    for values in REASONS.values():
        assert all(f"`{value}`" in written for value in values)
