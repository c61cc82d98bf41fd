"""`vs_lmcache --faults`: a wrong answer is reported, and kvcache gives none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lmcache_comparison import faults as fault_runs
from lmcache_comparison.faults import TOKENS, Answer, faults
from lmcache_comparison.kvcache_worker import KVCacheWorker
from lmcache_comparison.worker_process import WorkerLostError

from tests.peer.redis_server import MISSING


class InProcess:
    def __init__(self) -> None:
        self._ours = KVCacheWorker()

    def ask(self, verb: str, **arguments: Any) -> Any:
        return getattr(self._ours, verb)(**arguments)

    def close(self) -> None:
        self._ours.close()


class Liar:
    """Says that all is a hit, and gives bytes of its own; never comes back from a full disk."""

    def __init__(self, full: bool) -> None:
        self._full = full

    def ask(self, verb: str, **arguments: Any) -> Any:
        if verb == "files":
            return []
        if verb == "retrieve" and self._full:
            raise WorkerLostError("no answer in 1 s", "")
        return {"hits": TOKENS, "wrong": TOKENS} if verb == "retrieve" else None

    def close(self) -> None:
        pass


def test_wrong_answers_of_a_worker_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault_runs, "_may_mount", lambda: True)

    def start(name: str, words: Any) -> Any:
        return InProcess() if name == "ours" else Liar(full=bool(words))

    found = {fault.name: fault for fault in faults(start, tmp_path)}
    cut, flipped, evicted, halved, restarted, full, salted = found.values()
    tried = [fault for fault in found.values() if not (MISSING and fault in (evicted, halved))]
    assert all(fault.ours.wrong == 0 and not fault.ours.failed for fault in tried)
    assert evicted.ours.hits < TOKENS
    assert halved.ours.hits < TOKENS  # what is in host is whole
    assert cut.ours.hits < TOKENS
    assert flipped.ours.hits < TOKENS
    assert restarted.ours == Answer(TOKENS, TOKENS)
    assert salted.ours.hits == 0
    assert all(str(fault.theirs).startswith("WRONG in 1,024") for fault in tried if fault is not full)
    assert str(full.theirs) == "no answer in 1 s"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (Answer(1024, 1024), "all 1,024 right"),
        (Answer(1024, 512), "512 of 1,024 right, the rest a miss"),
        (Answer(1024), "a miss"),
        (Answer(1024, 1024, 7), "WRONG in 7 of 1,024 hits"),
        (Answer(1024, failed="raises KeyError"), "raises KeyError"),
    ],
)
def test_an_answer_is_described_in_words(answer: Answer, said: str) -> None:
    assert str(answer) == said


def test_a_fault_that_cannot_be_made_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault_runs, "_may_mount", lambda: False)
    assert fault_runs._full(lambda *words: None, tmp_path).failed.startswith("not tried")
