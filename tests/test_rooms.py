"""The house: who may import whom, how long a file may be, and which names are no names.

A room imports only from floors below its own, and from itself. Imports within functions count as well, and so do
those for type checkers: knowing a type is knowing the room.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "kvcache"

FLOORS: tuple[tuple[str, ...], ...] = (
    ("errors", "units", "native"),
    ("config", "port", "block"),
    ("codec", "transfer", "evict", "observe"),
    ("tier",),
    ("hierarchy",),
    ("daemon",),
    ("connector", "engine", "trace"),
    ("fleet",),
    ("kvcache",),
    ("cli", "testing"),
)
"""Rooms by floor, the lowest first. A room is a folder of the package, or a file right in it."""

PARTS = {
    "_native": "native",
    "machine": "config",
    "settings": "config",
    "values": "config",
    "share": "config",
    "log": "config",
}
"""Files right in the package that belong to a room of another name."""

APART = {
    "tier": ("memory", "host", "nvme", "redis", "object"),
    "connector": ("vllm", "sglang", "transformers"),
}
"""Parts of a room that know nothing of each other."""

TOGETHER: dict[tuple[str, str], str] = {
    ("kvcache.connector.vllm.process", "kvcache"): "an engine loads a connector by name: nobody above opens its cache",
    ("kvcache.connector.sglang.opening", "kvcache"): "the same",
}
"""(importing module, imported room) that may be all the same, with the reason."""

LINES = 400
LONG: dict[str, str] = {}
"""Files that may be longer, with the reason."""

NO_NAMES = {"util", "utils", "common", "helper", "helpers", "manager", "managers", "misc"}

SOURCES = sorted(PACKAGE.rglob("*.py"))


def module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module(path) for path in SOURCES} | {"kvcache._native"}


def room(name: str) -> str:
    parts = name.split(".")
    return PARTS.get(parts[1], parts[1]) if len(parts) > 1 else "kvcache"


def floor(name: str) -> int:
    return next(i for i, rooms in enumerate(FLOORS) if name in rooms)


def imports(name: str, tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Each module of ours that is imported anywhere in a file, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "kvcache":
                    yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}, line {node.lineno}: import by the full name"
            if node.module and node.module.split(".")[0] == "kvcache":
                for alias in node.names:
                    within = f"{node.module}.{alias.name}"
                    yield within if within in MODULES else node.module, node.lineno


def wrong(name: str, source: str) -> list[str]:
    """What a module of that name may not import, one line each."""
    faults = []
    own, parts = room(name), name.split(".")
    for target, line in imports(name, ast.parse(source)):
        theirs = room(target)
        if theirs != own and floor(theirs) >= floor(own) and (name, theirs) not in TOGETHER:
            faults.append(f"{name}, line {line}: {target} is not on a floor below {own}")
        elif theirs == own and own in APART and len(parts) > 2:
            other = target.split(".")[2] if target.count(".") > 1 else ""
            if parts[2] != other and parts[2] in APART[own] and other in APART[own]:
                faults.append(
                    f"{name}, line {line}: {target} is another part of {own}, of which this one knows nothing"
                )
    return faults


def test_every_room_has_one_floor() -> None:
    rooms = [name for rooms in FLOORS for name in rooms]
    assert len(rooms) == len(set(rooms))
    assert {room(name) for name in MODULES} <= set(rooms)
    assert set(PARTS.values()) <= set(rooms)


@pytest.mark.parametrize("path", SOURCES, ids=module)
def test_a_room_imports_only_from_below(path: Path) -> None:
    assert wrong(module(path), path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("kvcache.block.key", "from kvcache.tier.tier import Tier"),
        ("kvcache.block.key", "def f():\n    import kvcache.hierarchy.cache"),
        ("kvcache.block.key", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from kvcache import open"),
        ("kvcache.block.key", "from kvcache import config"),
        ("kvcache.codec.raw", "from kvcache.transfer import pages"),
        ("kvcache.tier.host", "from kvcache.tier.memory import MemoryTier"),
        ("kvcache.tier.nvme.tier", "from kvcache.tier import host"),
        ("kvcache.engine.pool", "import kvcache"),
    ],
)
def test_what_is_not_allowed_is_found(name: str, source: str) -> None:
    assert len(wrong(name, source)) == 1


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("kvcache.block.key", "import os, json\nfrom kvcache import native\nfrom kvcache.block.layout import Shard"),
        ("kvcache.config", "from kvcache.settings import Settings\nfrom kvcache.errors import ConfigError"),
        ("kvcache.tier.nvme.tier", "from kvcache.tier.nvme import journal\nfrom kvcache.tier.tier import Tier"),
        ("kvcache.cli.main", "import kvcache.hierarchy.cache"),
    ],
)
def test_what_is_allowed_is_not(name: str, source: str) -> None:
    assert wrong(name, source) == []


def ours(*suffixes: str) -> Iterator[Path]:
    for top in ("kvcache", "csrc", "tests", "benchmarks", "examples", "scripts"):
        for path in sorted((ROOT / top).rglob("*")):
            if path.is_file() and path.suffix in suffixes:
                yield path


def test_no_file_wants_a_table_of_contents() -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines())
        for path in ours(".py", ".pyi", ".cpp", ".h", ".cu", ".cuh")
    }
    assert {name: lines for name, lines in lengths.items() if lines > LINES and name not in LONG} == {}
    assert [name for name in LONG if lengths.get(name, 0) <= LINES] == [], "no longer long: take it off the list"


def test_every_name_is_a_noun_of_its_own() -> None:
    bad = [
        str(path.relative_to(ROOT))
        for path in ours(".py", ".cpp", ".h", ".cu", ".cuh", "")
        if NO_NAMES & {part.split(".")[0] for part in path.relative_to(ROOT).parts}
    ]
    assert bad == []


def test_every_exception_still_stands_for_something() -> None:
    used = {
        (module(path), room(target))
        for path in SOURCES
        for target, _ in imports(module(path), ast.parse(path.read_text(encoding="utf-8")))
    }
    assert [pair for pair in TOGETHER if pair not in used] == []
