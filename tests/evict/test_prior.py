"""The data that `hazard` begins with: of its own classes, never dearer with age, gone when it saw enough itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcache.evict.hazard import PRIOR_END_BLOCKS, PRIOR_FILE, Hazard, load_prior
from kvcache.evict.policy import AGE_BINS, AGE_EDGES, Evidence, class_count
from kvcache.trace.formats import Trace, read_trace
from kvcache.trace.simulate import simulate

ROOT = Path(__file__).parents[2]
DATA = ROOT.parent / "shared" / "data"
TEXT = DATA / "text" / "agent-sessions.jsonl.gz"
PAGE = ROOT / "docs" / "eviction.md"
BEHIND = {"conversation": 0.25, "synthetic": 3.1, "agents, tools shared": 0.1, "agents, ids local": 0.1}
"""The most that hazard was ever behind LRU in what it had found, in points of all that was asked for in the end."""


def test_the_data_are_of_the_policy_s_classes() -> None:
    prior = load_prior(Hazard())
    assert prior.reused.shape == prior.risk.shape == (class_count(Hazard()), AGE_BINS)
    assert prior.risk[:, 0].sum() == pytest.approx(1, abs=1e-4)
    assert (prior.reused <= prior.risk + 1e-6).all()


def test_the_prior_file_has_one_row_per_line() -> None:
    told, lines = (
        json.loads(PRIOR_FILE.read_text(encoding="utf-8")),
        PRIOR_FILE.read_text(encoding="utf-8").splitlines(),
    )
    rows = [told["bounds"], told["gaps"], told["edges"], *told["reused"], *told["risk"]]
    found = [line.rstrip(",").rpartition(": ")[2] for line in lines if "]" in line and "[" in line]
    assert [json.loads(line) for line in found] == rows


def test_reuse_chance_never_grows_with_age() -> None:
    prior, widths = load_prior(Hazard()), np.diff(AGE_EDGES, append=2 * AGE_EDGES[-1])
    for reused, risk in zip(prior.reused, prior.risk, strict=True):
        seen = (risk > 1e-3) & (widths > 0)  # counts are rounded to millionths
        rates = reused[seen] / risk[seen] / widths[seen]
        assert (np.diff(rates) <= 1e-3 * rates[:-1] + 1e-6 / risk[seen][1:]).all()


def test_a_policy_of_other_classes_begins_without() -> None:
    class Coarse(Hazard):
        bounds = (1, 4)

    assert not load_prior(Coarse()).risk.any()
    assert np.isfinite(Coarse().values(Evidence.none(Coarse()))).all()


def test_the_prior_fades_with_observed_blocks() -> None:
    prior = load_prior(Hazard())
    assert (
        prior.weight(0)
        > prior.weight(PRIOR_END_BLOCKS / 2)
        > prior.weight(PRIOR_END_BLOCKS)
        == prior.weight(2 * PRIOR_END_BLOCKS)
        == 0
    )


def test_without_evidence_new_blocks_are_worth_most() -> None:
    values = Hazard().values(Evidence.none(Hazard()))
    assert (values[:, 0] >= values[:, 1:].max()).all()


@pytest.fixture(scope="module")
def made() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        import hazard_prior

        yield hazard_prior


@pytest.mark.skipif(not (DATA / "traces").exists(), reason="the traces are not shipped")
def test_hazard_is_behind_lru_at_most_as_documented(made: Any, request: pytest.FixtureRequest) -> None:
    """On the halves that had no part in the prior; the agents', which take minutes, where all is asked for."""
    told = of_the_page()
    played: list[tuple[str, Trace]] = list(islice(made.reported_on(DATA), None if _long(request) else 2))
    for name, trace in played:
        for size in made.SIZES[name]:
            _, behind = made.ahead(trace, round(size / 100 * trace.unique))
            assert told[f"{name}, {size:g} %"] == pytest.approx(behind, abs=0.00501), "told in hundredths"
            assert behind <= BEHIND.get(name, 0)


def of_the_page() -> dict[str, float]:
    """By trace and size, the last column of the prior's table."""
    page = PAGE.read_text(encoding="utf-8")
    table = page.partition("table: benchmarks/hazard_prior.py --write")[2].partition("end of the prior's table")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if "%" in line]
    return {row[0]: float(row[-1]) for row in rows[1:]}


def _long(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--long"))


@pytest.mark.skipif(not TEXT.exists(), reason="the coding agents' log is not shipped")
@pytest.mark.parametrize("share", [0.02, 0.05, 0.1, 0.2])
def test_single_sessions_hit_as_often_as_under_lru(share: float) -> None:
    """LRU is the best there is for these; they had no part in the data."""
    trace = read_trace(TEXT, "text")
    capacity = round(share * trace.unique)
    hazard, lru = (np.cumsum(simulate(trace, policy, capacity).hits) for policy in ("hazard", "lru"))
    assert (hazard >= lru).all()
