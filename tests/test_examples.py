"""What the README shows and what `examples/` holds runs as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kvcache

ROOT = Path(__file__).parents[1]
APART = {"transformers_chat"}  # which runs with each transformers that there is: tests/connector/transformers
EXAMPLES = sorted(path for path in (ROOT / "examples").glob("*.py") if path.stem not in APART)
PAGES = ("README.md", "docs/quickstart.md")


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


@pytest.fixture(autouse=True)
def small_and_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCACHE_DIR", str(tmp_path))
    monkeypatch.setenv("KVCACHE_HOST__CAPACITY_BYTES", "16MiB")
    monkeypatch.setenv("KVCACHE_NVME__CAPACITY_BYTES", "64MiB")


def test_the_readme_computes_once_and_then_loads() -> None:
    engine, eight_lines = blocks("README.md")
    assert len([line for line in eight_lines.splitlines() if not line.lstrip().startswith("#")]) <= 9
    names: dict[str, object] = {}
    exec(engine, names)
    hits = []
    for _ in range(2):
        exec(eight_lines, names)
        hit = names["hit"]
        assert isinstance(hit, kvcache.Hit)
        hits.append(hit.tokens)
    assert hits == [0, 32]


def test_the_quickstart_runs_from_top_to_bottom(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    for block in blocks("docs/quickstart.md"):
        exec(block, names)
    said = capsys.readouterr().out.splitlines()
    promised = re.findall(r"^```text\n(.*?)^```", (ROOT / "docs/quickstart.md").read_text(), re.DOTALL | re.MULTILINE)
    assert said == "".join(promised).splitlines()


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(example: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout
