"""docs/performance.md is what the results say."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_page_equals_the_generated_one() -> None:
    command = [sys.executable, ROOT / "benchmarks" / "report"]
    written = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout.decode()
    page = (ROOT / "docs" / "performance.md").read_text()
    assert written == page, "out of date: python benchmarks/report > docs/performance.md"
    expected: Counter[str] = Counter()
    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        for row in json.loads(path.read_text()).get("rows", ()):
            lost = row["vs_peer"] is not None and row["vs_peer"] < 1
            expected[row["id"]] += 2 if lost else 1  # a row we lose stands among those where we lose as well
    there = Counter(match[1] for line in written.splitlines() if (match := re.match(r"\| `([^`]+)` \|", line)))
    assert {name: there[name] for name in expected} == expected
