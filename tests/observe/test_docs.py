"""The pages name what there is: files, commands, settings, and every reason that a cache can give."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

from kvcache.cli.main import build_app
from kvcache.observe.reasons import REASONS
from kvcache.settings import SECTIONS, TABLE

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
TROUBLE = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "reason",
    [
        reason.replace("{tier}", "nvme")
        for metric in ("misses", "drops", "load_failures")
        for reason in REASONS[metric, "reason" if metric != "load_failures" else "outcome"]
        if reason != "dropped"  # a load has no queue that could be full
    ],
)
def test_troubleshooting_names_every_reason(reason: str) -> None:
    assert f"`{reason}`" in TROUBLE


@pytest.mark.parametrize("page", ["troubleshooting.md", "metrics.md", "cli.md", "configuration.md"])
def test_commands_on_the_pages_exist(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    root = typer.main.get_command(build_app())
    named = re.findall(r"(?:`|^)kvcache ((?:[a-z]+ ?)+)", text, re.MULTILINE)
    assert named
    for words in named:
        command, first = root, True
        for word in words.split():
            inner = getattr(command, "commands", {})
            if not inner:
                break  # an argument
            assert word in inner, f"{page}: kvcache {words}"
            command, first = inner[word], False
        assert not first


@pytest.mark.parametrize("page", ["troubleshooting.md", "metrics.md", "spec/control.md"])
def test_settings_on_the_pages_exist(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    named = re.findall(rf"`((?:{'|'.join(sorted(SECTIONS))})\.[a-z_]+)", text)
    assert [name for name in named if name not in TABLE] == []


def test_files_and_links_on_the_pages_exist() -> None:
    """Paths as a page writes them, from the root, and links, from the page."""
    pages = [*DOCS.rglob("*.md"), *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md"))]
    missing = []
    for page in pages:
        text = page.read_text(encoding="utf-8")
        named = re.findall(r"`((?:tests|kvcache|benchmarks|csrc|docs|examples|scripts)/[\w./-]+\.\w+)`", text)
        linked = re.findall(r"\]\(([\w./-]+)(?:#[\w-]*)?\)", text)
        missing += [f"{page.name}: {name}" for name in named if not (ROOT / name).exists()]
        missing += [f"{page.name}: {name}" for name in linked if not (page.parent / name).exists()]
    assert missing == []
