"""docs/migration.md against the tree: a name that it gives as the current one exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SECTIONS = {
    text.partition("\n")[0]: [
        [cell.strip().strip("`") for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("| `")
    ]
    for text in (ROOT / "docs" / "migration.md").read_text(encoding="utf-8").split("## ")
}
"""The rows of each section's table."""


def source_of(module: str) -> Path:
    path = ROOT / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def test_current_modules_exist() -> None:
    rows = SECTIONS["Modules"]
    assert len(rows) > 200
    assert [
        row for row in rows for module in re.findall(r"kvcache[\w.]*", row[1]) if not source_of(module).exists()
    ] == []


@pytest.mark.parametrize("module", sorted({row[0] for row in SECTIONS["Names within modules"]}))
def test_current_names_are_in_their_module(module: str) -> None:
    words = set(re.findall(r"\w+", source_of(module).read_text(encoding="utf-8")))
    rows = [row for row in SECTIONS["Names within modules"] if row[0] == module]
    assert [row for row in rows if re.findall(r"\w+", row[2].partition("(")[0])[-1] not in words] == []
