"""`kvcache simulate` on a small trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvcache.cli.main import build_app
from kvcache.errors import ConfigError
from kvcache.trace.formats import read_trace
from kvcache.trace.simulate import POLICIES, TierSpec, price_tiers, simulate


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Ten conversations that take turns and grow."""
    path = tmp_path / "trace.jsonl"
    rows = []
    for turn in range(6):
        for who in range(10):
            ids = [1000 * who + i for i in range(4 * turn + 4)]
            rows.append({"timestamp": len(rows), "input_length": 512 * len(ids), "output_length": 9, "hash_ids": ids})
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def run(*words: object) -> None:
    build_app()([str(word) for word in words], standalone_mode=False)


def test_rows_equal_the_simulator(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    run(
        "simulate", trace, "--capacity", "25%", "--capacity", "100", "--policy", "lru", "--policy", "opt", "--json", out
    )
    rows = json.loads(out.read_text())["rows"]
    assert [(row["policy"], row["capacity"]) for row in rows] == [
        ("lru", "25%"),
        ("opt", "25%"),
        ("lru", "100"),
        ("opt", "100"),
    ]
    assert [row["blocks"] for row in rows] == [60, 60, 100, 100]
    for row in rows:
        assert row["hit_rate"] == simulate(read_trace(trace), row["policy"], row["blocks"]).hit_rate
    assert 0 < rows[1]["hit_rate"] < 1


def test_all_policies_are_simulated_by_default(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("simulate", trace, "--capacity", "7GiB")
    shown = capsys.readouterr().out
    assert all(policy in shown for policy in POLICIES)


def test_plot_draws_the_curve(trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="drawing is of the extra demo")
    run("simulate", trace, "--policy", "lru", "--png", tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "words", [("--capacity", "much"), ("--policy", "mru"), ("--seed", "3"), ("--tiers", "tape:3GiB")]
)
def test_invalid_arguments_are_refused(trace: Path, words: tuple[str, str]) -> None:
    with pytest.raises(ConfigError):
        run("simulate", trace, *words)


def test_a_hierarchy_is_priced_by_its_rates(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    run("simulate", trace, "--tiers", "host:2GiB,nvme:1TiB@1GB", "--json", out)
    row = json.loads(out.read_text())["rows"][0]
    played = read_trace(trace)
    levels = [TierSpec("host", 2 << 30, 20e9), TierSpec("nvme", 1 << 40, 1e9)]
    priced = price_tiers(played, levels, "hazard", token_bytes=128 << 10, prefill_per_s=8000)
    assert row["found"] == priced.hit_rates
    assert sum(priced.hit_rates.values()) == pytest.approx(simulate(played, "hazard", 1 << 14).hit_rate)
    assert row["mean_s"] == pytest.approx(priced.first_token_s.mean())
    assert row["mean_s"] < row["without_mean_s"]
    alone = price_tiers(played, levels[1:], "hazard", token_bytes=128 << 10, prefill_per_s=8000)
    last = 20 * 512 * (128 << 10) / 1e9 + 4 * 512 / 8000  # of 24 blocks 20 were seen
    assert alone.first_token_s[-1] == pytest.approx(last)
    assert alone.without_s[-1] == pytest.approx(24 * 512 / 8000)


def test_default_rates_are_those_of_a_running_cache(trace: Path, tmp_path: Path) -> None:
    """Where none is given beside the size."""
    stats, out = tmp_path / "stats.json", tmp_path / "out.json"
    stats.write_text(json.dumps({"tiers": {"host": {"read_bytes_per_s": None}, "nvme": {"read_bytes_per_s": 2e8}}}))
    run("simulate", trace, "--tiers", "host:2GiB@9GB,nvme:1TiB", "--measured", stats, "--json", out)
    assert json.loads(out.read_text())["tiers"] == {"host": [2 << 30, 9e9], "nvme": [1 << 40, 2e8]}
    rates = ("null", "0", '"x"', "[1]", "-1", "NaN", "Infinity", "1" + "0" * 400)
    tiers = ["null", "[]", "7", *(f'{{"read_bytes_per_s": {rate}}}' for rate in rates)]
    nothing = ["{}", "[]", "no JSON", '{"tiers": []}', *(f'{{"tiers": {{"nvme": {tier}}}}}' for tier in tiers)]
    for said in nothing:
        stats.write_text(said)
        with pytest.raises(ConfigError, match=r"stats --json"):
            run("simulate", trace, "--tiers", "host:2GiB", "--measured", stats)
