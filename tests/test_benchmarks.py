"""The benchmark harness, and that benchmarks print what they measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine import tiny_model

ROOT = Path(__file__).parents[1]
ENVIRON = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}  # these sources, whatever is installed
BENCHMARKS = sorted((ROOT / "benchmarks").glob("*.py"))


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import harness

    return harness


def test_a_better_value_has_a_ratio_above_one(harness) -> None:
    slow = harness.Row("a", 20.0, "ms", floor=10.0, peer=30.0)
    assert (slow.ratio, slow.vs_peer) == (0.5, 1.5)
    rate = harness.Row("b", 5.0, "GB/s", floor=10.0, peer=2.0)
    assert (rate.ratio, rate.vs_peer) == (0.5, 2.5)


def test_missing_limit_and_peer_are_null(harness) -> None:
    assert harness.Row("a", 0.0, "ms").plain() == {
        "id": "a",
        "value": 0.0,
        "unit": "ms",
        "floor": None,
        "peer": None,
        "ratio": None,
        "vs_peer": None,
    }
    assert harness.Row("a", 0.0, "ms", floor=1.0).ratio is None


@pytest.mark.parametrize(("value", "unit"), [(float("nan"), "ms"), (-1.0, "ms"), (float("inf"), "s"), (1.0, "parsec")])
def test_an_invalid_figure_is_refused(harness, value: float, unit: str) -> None:
    with pytest.raises(ValueError, match="row/1"):
        harness.Row("row/1", value, unit)


def test_rows_are_written_as_documented_json(harness, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "rows.json"
    harness.publish(
        "some",
        [harness.Row("x/1", 1234.5, "us", peer=2469.0), harness.Row("x/2", 2.0, "GB/s")],
        target,
        notes=["of some"],
    )
    document = json.loads(target.read_text())
    assert list(document) == ["benchmark", "date", "machine", "notes", "rows"]
    assert (document["benchmark"], document["notes"]) == ("some", ["of some"])
    assert document["machine"]["cores"] >= 1
    assert [(row["id"], row["value"], row["vs_peer"]) for row in document["rows"]] == [
        ("x/1", 1234.5, 2.0),
        ("x/2", 2.0, None),
    ]
    printed = capsys.readouterr().out
    assert "x/1" in printed
    assert "1,234" in printed or "1,235" in printed


def test_a_duplicate_row_id_is_refused(harness, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="x/1"):
        harness.publish("some", [harness.Row("x/1", 1.0, "us"), harness.Row("x/1", 2.0, "us")], tmp_path / "rows.json")


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem)
def test_every_benchmark_takes_the_same_options(path: Path) -> None:
    done = subprocess.run([sys.executable, path, "--help"], stdout=subprocess.PIPE, text=True, check=True, env=ENVIRON)
    assert "--quick" in done.stdout
    assert "--json FILE" in done.stdout


def test_ttft_reports_each_tier_of_a_tiny_model(tmp_path: Path) -> None:
    model = tiny_model.make(tmp_path / "model", "smollm2")
    target = tmp_path / "ttft.json"
    command = [sys.executable, ROOT / "benchmarks" / "ttft.py", "--model", model, "--json", target]
    command += ["--lengths", "64,100", "--repeats", "1"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=ENVIRON)
    rows = {row["id"]: row for row in json.loads(target.read_text())["rows"]}
    ways = ("transformers", "cold", "hbm", "host", "nvme", "restart")
    assert list(rows) == [f"engine/ttft/{length}/{way}" for length in (64, 100) for way in ways]
    assert {row["unit"] for row in rows.values()} == {"ms"}
    assert rows["engine/ttft/64/transformers"]["peer"] is None
    assert rows["engine/ttft/64/cold"]["peer"] == rows["engine/ttft/64/transformers"]["value"]
    for way in ways[2:]:
        assert rows[f"engine/ttft/100/{way}"]["peer"] == rows["engine/ttft/100/cold"]["value"]
