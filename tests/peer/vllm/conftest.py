"""A real vLLM, where there is one: `VLLM_VENV`, by default `~/vllm-venv`, which `scripts/test-peers vllm` builds."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
VENV = Path(os.environ.get("VLLM_VENV", "~/vllm-venv")).expanduser()
MODELS = Path(os.environ.get("VLLM_MODELS", "~/vllm-models/models")).expanduser()
WATCHDOG_S = 240  # an engine that has not ended by then hangs, and the test fails

Run = Callable[..., dict[str, Any]]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    python = VENV / "bin/python"
    why = "" if python.exists() else f"no vLLM in {VENV}: scripts/test-peers vllm builds one"
    if not why and not os.environ.get("TEST_PEERS"):
        why = "a real vLLM takes minutes: set TEST_PEERS=1, or run scripts/test-peers vllm"
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.peer)
            if why:
                item.add_marker(pytest.mark.skip(reason=why))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs an engine with a job of `engine.py` in a process of its own, and gives its result."""
    count = 0

    def run(
        rounds: Sequence[Any],
        *,
        model: str = "tiny-llama",
        connector: dict[str, Any] | None = None,
        env: dict[str, str] | None = None,
        **job: Any,
    ) -> dict[str, Any]:
        nonlocal count
        count += 1
        path, out, log = (tmp_path / f"{name}-{count}" for name in ("job", "result", "log"))
        path.write_text(
            json.dumps({"model": str(MODELS / model), "connector": connector, "rounds": rounds, **job}),
            encoding="utf-8",
        )
        python_path = os.pathsep.join(map(str, (ROOT, HERE, *job.get("path", ()))))
        with log.open("wb") as stream:
            ended = subprocess.run(
                [VENV / "bin/python", HERE / "engine.py", path, out],
                env={**os.environ, "PYTHONPATH": python_path, "KVCACHE_DIR": str(tmp_path), **(env or {})},
                stdout=stream,
                stderr=subprocess.STDOUT,
                timeout=WATCHDOG_S,
                check=False,
            )
        said = log.read_text(errors="replace")
        assert ended.returncode == 0, said[-6000:]
        result: dict[str, Any] = json.loads(out.read_text())
        result["log"] = said
        return result

    return run


def cache(path: Path, **options: Any) -> dict[str, Any]:
    """The connector's settings with a small cache at a place."""
    settings = {
        "host": {"capacity_bytes": "128MiB"},
        "nvme": {"path": str(path), "capacity_bytes": "512MiB", "free_floor_bytes": 0},
        "control": {"enabled": False},
    }
    return {"settings": settings, **options}
