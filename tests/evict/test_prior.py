"""The data that `hazard` begins with: of its own classes, never dearer with age, gone when it saw enough itself."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from kvcache.evict.hazard import Hazard
from kvcache.evict.policy import AGE_BINS, AGE_EDGES, Evidence, classes
from kvcache.evict.prior import FILE, UNTIL, prior_of
from kvcache.trace.formats import read
from kvcache.trace.simulate import simulate

TEXT = Path(__file__).parents[3] / "shared" / "data" / "text" / "agent-sessions.jsonl.gz"


def test_the_data_are_of_the_policy_s_classes() -> None:
    prior = prior_of(Hazard())
    assert prior.reused.shape == prior.risk.shape == (classes(Hazard()), AGE_BINS)
    assert prior.risk[:, 0].sum() == pytest.approx(1, abs=1e-4)
    assert (prior.reused <= prior.risk + 1e-6).all()


def test_the_file_has_one_row_a_line() -> None:
    told, lines = json.loads(FILE.read_text(encoding="utf-8")), FILE.read_text(encoding="utf-8").splitlines()
    rows = [told["bounds"], told["gaps"], told["edges"], *told["reused"], *told["risk"]]
    found = [line.rstrip(",").rpartition(": ")[2] for line in lines if "]" in line and "[" in line]
    assert [json.loads(line) for line in found] == rows


def test_within_a_class_the_chance_of_a_request_does_not_grow_with_age() -> None:
    prior, widths = prior_of(Hazard()), np.diff(AGE_EDGES, append=2 * AGE_EDGES[-1])
    for reused, risk in zip(prior.reused, prior.risk, strict=True):
        seen = (risk > 1e-3) & (widths > 0)  # counts are rounded to millionths
        rates = reused[seen] / risk[seen] / widths[seen]
        assert (np.diff(rates) <= 1e-3 * rates[:-1] + 1e-6 / risk[seen][1:]).all()


def test_a_policy_of_other_classes_begins_without() -> None:
    class Coarse(Hazard):
        bounds = (1, 4)

    assert not prior_of(Coarse()).risk.any()
    assert np.isfinite(Coarse().values(Evidence.none(Coarse()))).all()


def test_it_is_gone_when_enough_was_seen() -> None:
    prior = prior_of(Hazard())
    assert prior.weight(0) > prior.weight(UNTIL / 2) > prior.weight(UNTIL) == prior.weight(2 * UNTIL) == 0


@pytest.mark.skipif(not TEXT.exists(), reason="the coding agents' log is not shipped")
@pytest.mark.parametrize("share", [0.02, 0.05, 0.1, 0.2])
def test_sessions_that_come_one_at_a_time_find_what_lru_finds_from_the_first_request_on(share: float) -> None:
    """LRU is the best there is for these; they had no part in the data."""
    trace = read(TEXT, "text")
    capacity = round(share * trace.unique)
    hazard, lru = (np.cumsum(simulate(trace, policy, capacity).hits) for policy in ("hazard", "lru"))
    assert (hazard >= lru).all()
