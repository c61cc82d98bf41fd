"""docs/from-lmcache.md names nothing that is not there: here, and in LMCache where it is installed (LMCACHE_VENV)."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from kvcache.connector.vllm.config import Options
from kvcache.connector.vllm.request_state import RequestOptions
from kvcache.observe.metrics import METRICS
from kvcache.settings import Settings

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "from-lmcache.md").read_text()
ROWS = [row.strip("| ").split(" | ") for row in PAGE.splitlines() if row.startswith("| ") and "| ---" not in row]
LMCACHE = Path(os.environ.get("LMCACHE_VENV", ROOT / ".venv-lmcache")).expanduser()


def names(column: int) -> set[str]:
    return {name for row in ROWS for name in re.findall(r"`([^`]+)`", row[column])}


def test_named_settings_metrics_and_commands_exist() -> None:
    settings, told = Settings(), names(1)
    for name in {n for n in told if re.fullmatch(r"(host|nvme|redis|evict|flow)\.\w+", n)}:
        section, field = name.split(".")
        assert hasattr(getattr(settings, section), field), name
    counted = {n for n in told if n.startswith("kvcache_")}
    assert counted == {n for n in counted if n.removeprefix("kvcache_").removesuffix("_total") in METRICS}
    commands = (ROOT / "docs" / "cli.md").read_text()
    for name in {n.removeprefix("kvcache ") for n in told if n.startswith("kvcache ")}:
        assert f"| `{name}` |" in commands, name
    request_options = {n.removeprefix("kvcache.") for n in told if re.fullmatch(r"kvcache\.[a-z_]+", n)} - {"toml"}
    assert request_options <= set(RequestOptions.__dataclass_fields__)
    assert {"load", "lookup_s", "load_s"} <= told & set(Options.model_fields)


def test_named_lmcache_settings_exist() -> None:
    found = list(LMCACHE.glob("lib/python*/site-packages/lmcache"))
    if not found:
        pytest.skip("no LMCache here: name its environment in LMCACHE_VENV")
    source = "\n".join(file.read_text(errors="replace") for file in found[0].rglob("*.py"))
    scripts = "\n".join(f.read_text() for f in found[0].parent.glob("lmcache-*.dist-info/entry_points.txt"))
    ignored = {"PYTHONHASHSEED", "redis://...", "kvcache", "clear", "lookup", "pin", "cachegen"}
    for name in names(0) - ignored:
        plain = name.removeprefix('"kv_connector":').strip('"')
        word = plain.removeprefix("lmcache ").removeprefix("lmcache:") if " " in plain or ":" in plain else plain
        assert word in source or word in scripts, name
