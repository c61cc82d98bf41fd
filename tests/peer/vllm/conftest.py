"""A real vLLM, where there is one: the interpreter that runs the tests (`scripts/test-peers vllm`), or `VLLM_VENV`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
VENV = os.environ.get("VLLM_VENV")
PYTHON = Path(VENV).expanduser() / "bin/python" if VENV else Path(sys.executable) if find_spec("vllm") else None
MODELS = Path(os.environ.get("VLLM_MODELS", "~/.cache/kvcache-tests/vllm")).expanduser()
WATCHDOG_S = 900  # an engine that has not ended by then hangs, and the test fails; a busy machine takes minutes

Run = Callable[..., dict[str, Any]]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.peer)
            item.add_marker(pytest.mark.timeout(3 * WATCHDOG_S))
            if PYTHON is None:
                item.add_marker(pytest.mark.skip(reason="no vLLM here: scripts/test-peers vllm, or name a VLLM_VENV"))


def version_of(python: Path) -> str:
    """Of the vLLM that this interpreter has."""
    command = [python, "-c", "import importlib.metadata as m; print(m.version('vllm'))"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Add what the tests said to the file that VLLM_RECORD names: docs/compatibility.md is written from it."""
    where = os.environ.get("VLLM_RECORD")
    if not where or PYTHON is None or not OUTCOMES:
        return
    path = Path(where)
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    default = version_of(PYTHON)
    for test, (version, outcome) in OUTCOMES.items():
        told = results.setdefault(version or default, {"date": "", "tests": {}})
        told["date"] = datetime.now(timezone.utc).date().isoformat()
        told["tests"][test] = outcome
    path.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")


OUTCOMES: dict[str, tuple[str, str]] = {}  # by test: the version that it names, and what it said


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if "tests/peer/vllm/" not in report.nodeid or (report.when != "call" and report.passed):
        return
    test = report.nodeid.partition("tests/peer/vllm/")[2]
    version = dict(report.user_properties).get("version", "")
    if OUTCOMES.get(test, ("", ""))[1] != "failed":
        OUTCOMES[test] = str(version), report.outcome


@pytest.fixture(scope="session")
def models() -> Path:
    """The folder of small models, made once."""
    assert PYTHON is not None
    quiet = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([PYTHON, HERE / "models.py", MODELS], check=True, capture_output=True, timeout=WATCHDOG_S, env=quiet)
    return MODELS


class ForkServer:
    """A process that has imported vLLM and forks for each engine, which saves most of an engine's start."""

    def __init__(self, python: Path) -> None:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, HERE))), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [python, HERE / "engine.py", "fork-server"],
            env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip

    def run(self, job: Path, result: Path, log: Path, env: dict[str, str], path: Sequence[str]) -> int:
        told = {"job": str(job), "result": str(result), "log": str(log), "env": env, "path": list(path)}
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps(told) + "\n")
        stdin.flush()
        pid = int(stdout.readline())
        watchdog = threading.Timer(WATCHDOG_S, os.kill, (pid, signal.SIGKILL))
        watchdog.start()
        try:
            return int(stdout.readline())
        finally:
            watchdog.cancel()
            watchdog.join()

    def close(self) -> None:
        with self._process:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait(60)


@pytest.fixture(scope="session")
def fork_server(models: Path) -> Iterator[ForkServer]:
    assert PYTHON is not None
    fork_server = ForkServer(PYTHON)
    yield fork_server
    fork_server.close()


@pytest.fixture
def run(tmp_path: Path, models: Path, fork_server: ForkServer) -> Run:
    """Runs an engine with a job of `engine.py` in a process of its own, and gives its result. `fresh`: in one that
    shares nothing with another, not even what Python's own hashes begin with."""
    return runner(tmp_path, models, fork_server)


@pytest.fixture(scope="session")
def uncached(tmp_path_factory: pytest.TempPathFactory, models: Path, fork_server: ForkServer) -> Run:
    """The same without a cache: what is asked for again is answered as before."""
    run, known = runner(tmp_path_factory.mktemp("bare"), models, fork_server), dict[str, dict[str, Any]]()

    def once(rounds: Sequence[Any], **job: Any) -> dict[str, Any]:
        key = json.dumps([rounds, job], sort_keys=True)
        if key not in known:
            known[key] = run(rounds, **job)
        return known[key]

    return once


def runner(tmp_path: Path, models: Path, fork_server: ForkServer) -> Run:
    count = 0

    def run(
        rounds: Sequence[Any],
        *,
        model: str = "tiny-llama",
        connector: dict[str, Any] | None = None,
        env: dict[str, str] | None = None,
        fresh: bool = False,
        **job: Any,
    ) -> dict[str, Any]:
        nonlocal count
        count += 1
        path, out, log = (tmp_path / f"{name}-{count}" for name in ("job", "result", "log"))
        path.write_text(
            json.dumps({"model": str(models / model), "connector": connector, "rounds": rounds, **job}),
            encoding="utf-8",
        )
        own = {"KVCACHE_DIR": str(tmp_path), **(env or {})}
        more = list(map(str, job.get("path", ())))
        status = run_in_new_process(path, out, log, own, more) if fresh else fork_server.run(path, out, log, own, more)
        said = log.read_text(errors="replace")
        assert status == 0, said[-6000:]
        result: dict[str, Any] = json.loads(out.read_text())
        result["log"] = said
        return result

    return run


def run_in_new_process(job: Path, result: Path, log: Path, env: dict[str, str], path: Sequence[str]) -> int:
    python_path = os.pathsep.join([*path, str(ROOT), str(HERE)])
    with log.open("wb") as stream:
        ended = subprocess.run(
            [PYTHON, HERE / "engine.py", job, result],
            env={**os.environ, "PYTHONPATH": python_path, **env},
            stdout=stream, stderr=subprocess.STDOUT, timeout=WATCHDOG_S, check=False,
        )  # fmt: skip
    return ended.returncode


def cache(path: Path, **options: Any) -> dict[str, Any]:
    """The connector's settings with a small cache at a place."""
    settings = {
        "host": {"capacity_bytes": "128MiB"},
        "nvme": {"path": str(path), "capacity_bytes": "512MiB", "min_free_bytes": 0},
        "control": {"enabled": False},
        "plan": {"enabled": False},  # how fast the machine is decides nothing, unless that is what is tested
    }
    return {"settings": settings, **options}
