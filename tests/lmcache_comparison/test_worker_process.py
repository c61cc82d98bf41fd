"""A side is a process that is asked: it answers, says what went wrong, or is lost, and never holds up who asks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from lmcache_comparison.worker_process import WorkerLostError, WorkerProcess

STUB = [sys.executable, str(Path(__file__).with_name("stub_worker.py"))]


@pytest.fixture
def side(tmp_path: Path) -> Iterator[WorkerProcess]:
    with WorkerProcess(STUB, tmp_path / "log", threads=3, timeout_s=60) as made:
        yield made


def test_library_output_does_not_mix_with_answers(side: WorkerProcess, tmp_path: Path) -> None:
    assert side.ask("name") == "stub"
    assert side.ask("double", number=1.5) == 3.0
    side.close()
    assert "libraries print what they like" in (tmp_path / "log").read_text()


def test_a_worker_answers_after_an_error(side: WorkerProcess) -> None:
    with pytest.raises(RuntimeError, match="fail: ValueError: no such thing"):
        side.ask("fail")
    assert side.ask("double", number=2) == 4


def test_an_ended_process_is_reported_as_lost(side: WorkerProcess) -> None:
    with pytest.raises(WorkerLostError) as raised:
        side.ask("leave")
    assert raised.value.what == "the process ended"
    with pytest.raises(WorkerLostError):
        side.ask("name")


def test_a_silent_process_is_killed_and_reported_as_lost(tmp_path: Path) -> None:
    side = WorkerProcess(STUB, tmp_path / "log", threads=1, timeout_s=60)
    assert side.ask("name") == "stub"
    side._line.settimeout(0.1)
    with pytest.raises(WorkerLostError) as raised:
        side.ask("dawdle")
    assert raised.value.what == "no answer in 0.1 s"
    side.close()
    assert side._process.returncode is not None


def test_a_worker_gets_threads_and_no_user_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCACHE_HOST__CAPACITY_BYTES", "1GiB")
    monkeypatch.setenv("LMCACHE_CHUNK_SIZE", "16")
    with WorkerProcess(STUB, tmp_path / "log", threads=3, timeout_s=60) as side:
        environ = side.ask("environ")
    assert not {"KVCACHE_HOST__CAPACITY_BYTES", "LMCACHE_CHUNK_SIZE"} & set(environ)
    assert (environ["OMP_NUM_THREADS"], environ["LMCACHE_TRACK_USAGE"]) == ("3", "false")
