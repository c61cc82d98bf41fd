"""Real kills on a real file system; see `kill_loop.py`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_kills_lose_no_record_reported_done(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    kills = 300 if request.config.getoption("--long") else 20
    command = [sys.executable, "-m", "tests.fault.kill_loop", str(tmp_path / "store"), str(kills), "1"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert ended.returncode == 0, ended.stderr
    assert f"{kills} kills" in ended.stdout
    assert "at most 0 blocks" not in ended.stdout
