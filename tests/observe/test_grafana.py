"""The dashboard and the alert rules: what is committed is what the table says, in forms that their programs read."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvcache.observe.dashboards import ALERTS, SECTIONS, dashboard, prometheus_name, rules
from kvcache.observe.exporter import exposition
from kvcache.observe.metrics import METRICS

ROOT = Path(__file__).parents[2]
DASHBOARD, RULES = ROOT / "deploy" / "grafana" / "kvcache.json", ROOT / "deploy" / "prometheus" / "alerts.yml"
PROMTOOL = shutil.which("promtool")
NO_PROMTOOL = "no promtool on this machine (apt-get install prometheus)"

EXPOSED = set(re.findall(r"^# TYPE (\S+)", exposition({"tiers": {}, "counters": {}, "bypass": {}}), re.MULTILINE))


def queries() -> list[str]:
    return [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", [])]


def test_committed_files_equal_the_generated_ones() -> None:
    said = "write it anew: kvcache metrics grafana > deploy/grafana/kvcache.json; alerts > deploy/prometheus/alerts.yml"
    assert json.loads(DASHBOARD.read_text(encoding="utf-8")) == dashboard(), said
    assert RULES.read_text(encoding="utf-8") == rules(), said


def test_every_metric_has_a_panel_and_every_query_a_metric() -> None:
    assert {name for names in SECTIONS.values() for name in names} <= set(METRICS)
    asked = {name for query in queries() for name in re.findall(r"kvcache_\w+", query)}
    assert asked == {prometheus_name(metric) for metric in METRICS}
    assert asked <= EXPOSED


def test_queries_use_labels_of_their_metric() -> None:
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", []):
            for by, name in re.findall(r"sum by \(([^)]*)\) \(?(?:rate\()?kvcache_(\w+)", target["expr"]):
                assert set(by.split(", ")) <= set(METRICS[name.removesuffix("_total")].labels)
            shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            assert shown <= {label for metric in METRICS.values() for label in metric.labels}


def test_panels_have_unique_ids_and_do_not_overlap() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        assert place["x"] + place["w"] <= 24
        taken |= cells


def test_the_dashboard_parses_by_grafanas_schema() -> None:
    """By the types that Grafana generates from its schema: what they do not know is wrong."""
    sdk = pytest.importorskip("grafana_foundation_sdk", reason="needs grafana-foundation-sdk")
    assert sdk
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    register_default_plugins()
    made = dashboard()
    read = json.loads(JSONEncoder(sort_keys=True).encode(Dashboard.from_json(made)))
    assert missing(made, read) == []


def missing(wanted: Any, found: Any, at: str = "") -> list[str]:
    """What stands in the one and not, or otherwise, in the other."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        return [line for key, value in wanted.items() for line in missing(value, found.get(key), f"{at}.{key}")]
    if isinstance(wanted, list) and isinstance(found, list) and len(wanted) == len(found):
        return [line for i, pair in enumerate(zip(wanted, found, strict=True)) for line in missing(*pair, f"{at}[{i}]")]
    empty = wanted in ([], {}, False) and found in (None, [], {}, False)
    return [] if wanted == found or empty else [f"{at}: {wanted!r} was read as {found!r}"]


def test_alerts_use_existing_metrics() -> None:
    names = [alert.name for alert in ALERTS]
    assert len(set(names)) == len(names)
    for alert in ALERTS:
        found = set(re.findall(r"kvcache_\w+", alert.query))
        assert found
        assert found <= {prometheus_name(metric) for metric in METRICS}
        labels = {label for metric in METRICS.values() for label in metric.labels} | {"instance"}
        assert set(re.findall(r"\$labels\.(\w+)", alert.summary + alert.remedy)) <= labels
        assert alert.severity in {"critical", "warning", "info"}


@pytest.mark.skipif(PROMTOOL is None, reason=NO_PROMTOOL)
def test_prometheus_reads_the_rules() -> None:
    done = subprocess.run([str(PROMTOOL), "check", "rules", str(RULES)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(ALERTS)} rules found" in done.stdout


@pytest.mark.skipif(PROMTOOL is None, reason=NO_PROMTOOL)
def test_alert_rules_fire_as_promtool_expects(tmp_path: Path) -> None:
    """Played by Prometheus itself: a minute a sample."""
    series = {
        'kvcache_tier_in_trouble{instance="a", tier="nvme"}': "0x10 1x20",
        'kvcache_tier_in_trouble{instance="b", tier="nvme"}': "0 1 0x30",
        'kvcache_bypass{instance="a", path="loads"}': "0x200",
        'kvcache_refused_records_total{instance="a", tier="nvme", check="damaged"}': "0x20 3x20",
        'kvcache_canary_blocks_total{instance="a", result="equal"}': "0+5x40",
        'kvcache_load_failures_total{instance="a", outcome="late"}': "0+10x60",
        'kvcache_loaded_blocks_total{instance="a", tier="host"}': "0+100x60",
        'kvcache_load_failures_total{instance="b", outcome="late"}': "0+1x60",
        'kvcache_loaded_blocks_total{instance="b", tier="host"}': "0+1000x60",
    }
    means = {alert.name: alert for alert in ALERTS}
    expected = [
        ("KVCacheTierInTrouble", "12m", []),
        ("KVCacheTierInTrouble", "18m", [{"instance": "a", "tier": "nvme"}]),
        ("KVCacheRecordsDamaged", "15m", []),
        ("KVCacheRecordsDamaged", "25m", [{"instance": "a", "tier": "nvme"}]),
        ("KVCacheDiffers", "30m", []),
        ("KVCacheBypassed", "60m", []),
        ("KVCacheLoadsFail", "5m", []),
        ("KVCacheLoadsFail", "40m", [{"instance": "a"}]),
    ]
    cases = [
        {
            "alertname": name,
            "eval_time": when,
            "exp_alerts": [
                {
                    "exp_labels": {"severity": means[name].severity, **labels},
                    "exp_annotations": {
                        "summary": means[name].summary.replace("{{ $labels.tier }}", labels.get("tier", "")),
                        "description": means[name].remedy,
                    },
                }
                for labels in called
            ],
        }
        for name, when, called in expected
    ]
    played = {
        "rule_files": [str(RULES)],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": name, "values": values} for name, values in series.items()],
                "alert_rule_test": cases,
            }
        ],
    }
    file = tmp_path / "played.yml"
    file.write_text(json.dumps(played), encoding="utf-8")
    done = subprocess.run([str(PROMTOOL), "test", "rules", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
