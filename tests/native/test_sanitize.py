"""The host core under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CXX = os.environ.get("CXX", "g++")


def unable(tmp_path: Path) -> str:
    """Why the sanitizers cannot run here; empty where they can."""
    if not shutil.which(CXX):
        return f"no compiler {CXX}"
    source, program = tmp_path / "empty.cpp", tmp_path / "empty"
    source.write_text("int main() {}\n")
    for kind in ("address,undefined", "thread"):
        for command in ([CXX, f"-fsanitize={kind}", "-pthread", source, "-o", program], [program]):
            ran = subprocess.run(command, capture_output=True, text=True, check=False)
            if ran.returncode:
                return f"no -fsanitize={kind}: {ran.stderr.strip()[:200]}"
    return ""


@pytest.mark.timeout(1800)  # it compiles the core twice
def test_stress(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if reason := unable(tmp_path):
        pytest.skip(reason)
    seconds = "300" if request.config.getoption("--long") else "0.5"
    ran = subprocess.run([ROOT / "scripts" / "sanitize", seconds], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("rounds") == 2
