"""Where code belongs and how large it may grow: package order, import cycles, sizes of modules, functions and folders.

A package imports itself and the packages before it in `ORDER`. Imports inside functions and imports for type checkers
count as well, because knowing a type is knowing its package.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "kvcache"

ORDER = (
    "errors", "native", "machine", "os_env", "host_memory_budget", "settings", "log", "block", "codec", "transfer",
    "observe", "evict", "index", "tier", "cache", "daemon", "fleet", "trace", "connector", "engine", "kvcache",
    "testing", "cli",
)  # fmt: skip
"""Packages and top-level modules, lowest first. `kvcache` is the root package itself."""

MAY_IMPORT_ROOT = ("connector",)
"""An engine loads a connector by name, so no caller above it opens the cache for it."""

SEPARATE = {
    "tier": ("host", "nvme", "redis", "object"),
    "connector": ("vllm", "sglang", "transformers"),
}
"""Parts of a package that do not import each other."""

MAX_MODULE_LINES = 600
MAX_FUNCTION_LINES = 60
"""Of a function, its docstring not counted."""
MAX_PARAMETERS = 8
MAX_FOLDER_FILES = 28
MIN_MODULE_LINES = 60
"""Shorter modules are listed when this file runs as a script; they do not fail."""

RULES = ("order", "cycle", "module lines", "function lines", "parameters", "folder files")

SOURCES = sorted(PACKAGE.rglob("*.py"))


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path) for path in SOURCES} | {"kvcache._native"}


def package_of(module: str) -> str:
    """The entry of `ORDER` that a module belongs to."""
    parts = module.split(".")
    if len(parts) == 1:
        return "kvcache"
    return "native" if parts[1] == "_native" else parts[1]


def imports(module: str, tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Each module of this project that is imported anywhere in a file, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "kvcache":
                    yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}, line {node.lineno}: import by the full name"
            if node.module and node.module.split(".")[0] == "kvcache":
                for alias in node.names:
                    within = f"{node.module}.{alias.name}"
                    yield within if within in MODULES else node.module, node.lineno


def order_faults(module: str, source: str) -> Iterator[str]:
    """`importer -> imported` for each import against the order or between separate parts."""
    own, parts = package_of(module), module.split(".")
    for target, _ in imports(module, ast.parse(source)):
        other = package_of(target)
        if other != own:
            above = ORDER.index(other) > ORDER.index(own)
            if above and not (other == "kvcache" and own in MAY_IMPORT_ROOT):
                yield f"{module} -> {target}"
        elif own in SEPARATE and len(parts) > 2 and target.count(".") > 1:
            part, its = parts[2], target.split(".")[2]
            if part != its and part in SEPARATE[own] and its in SEPARATE[own]:
                yield f"{module} -> {target}"


def graph() -> dict[str, set[str]]:
    """By module, the modules that it imports."""
    out: dict[str, set[str]] = {}
    for path in SOURCES:
        module = module_of(path)
        out[module] = {t for t, _ in imports(module, ast.parse(path.read_text(encoding="utf-8"))) if t != module}
    return out


def cycles(edges: Mapping[str, Iterable[str]]) -> list[str]:
    """The strongly connected groups of more than one module (Tarjan), each as `a, b, c`."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[str] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for target in edges.get(module, ()):
            if target not in index:
                visit(target)
                low[module] = min(low[module], low[target])
            elif target in stack:
                low[module] = min(low[module], index[target])
        if low[module] == index[module]:
            at = stack.index(module)
            group = stack[at:]
            del stack[at:]
            if len(group) > 1:
                found.append(", ".join(sorted(group)))

    for module in edges:
        if module not in index:
            visit(module)
    return found


def is_exempt(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """A typer command: its parameters are the command's options."""
    arguments = node.args.args + node.args.kwonlyargs
    return any(a.annotation is not None and "typer." in ast.unparse(a.annotation) for a in arguments)


@cache
def functions() -> list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Each function of `kvcache/` and `benchmarks/` as `path name`."""
    found = []
    for path in [*SOURCES, *sorted((ROOT / "benchmarks").rglob("*.py"))]:
        names: list[tuple[ast.AST, str]] = [(ast.parse(path.read_text(encoding="utf-8")), "")]
        while names:
            parent, prefix = names.pop()
            for node in ast.iter_child_nodes(parent):
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                    name = f"{prefix}{node.name}"
                    if not isinstance(node, ast.ClassDef):
                        found.append((f"{path.relative_to(ROOT)} {name}", node))
                    names.append((node, f"{name}."))
                else:
                    names.append((node, prefix))
    return found


def lengths() -> dict[str, int]:
    """Lines of each module of `kvcache/`, `csrc/` and `benchmarks/`."""
    suffixes = {".py", ".pyi", ".cpp", ".h", ".cu", ".cuh"}
    return {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines())
        for top in ("kvcache", "csrc", "benchmarks")
        for path in sorted((ROOT / top).rglob("*"))
        if path.suffix in suffixes
    }


@cache
def faults(rule: str) -> frozenset[str]:
    """The places that break a rule of `RULES`."""
    if rule == "order":
        return frozenset(f for path in SOURCES for f in order_faults(module_of(path), path.read_text(encoding="utf-8")))
    if rule == "cycle":
        return frozenset(cycles(graph()))
    if rule == "module lines":
        return frozenset(name for name, lines in lengths().items() if lines > MAX_MODULE_LINES)
    if rule == "function lines":
        return frozenset(name for name, node in functions() if function_lines(node) > MAX_FUNCTION_LINES)
    if rule == "parameters":
        return frozenset(
            name for name, node in functions() if parameters(node) > MAX_PARAMETERS and not is_exempt(node)
        )
    assert rule == "folder files"
    folders = [path.parent for path in SOURCES if path.name != "__init__.py"]
    return frozenset(str(f.relative_to(ROOT)) for f in set(folders) if folders.count(f) > MAX_FOLDER_FILES)


def function_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from `def` to the end, without the docstring."""
    first = node.body[0]
    documented = ast.get_docstring(node) is not None
    docstring = (first.end_lineno or 0) - first.lineno + 1 if documented else 0
    return (node.end_lineno or 0) - node.lineno + 1 - docstring


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Parameters but for `self` and `cls`."""
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return len([a for a in arguments if a.arg not in ("self", "cls")])


@pytest.mark.parametrize("rule", RULES)
def test_no_file_breaks_a_layout_rule(rule: str) -> None:
    assert sorted(faults(rule)) == []


def test_every_module_belongs_to_one_package() -> None:
    assert len(set(ORDER)) == len(ORDER)
    assert {package_of(name) for name in MODULES} == set(ORDER)


def test_the_package_has_at_most_250_files() -> None:
    assert len(SOURCES) <= 250


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("kvcache.block.chain", "from kvcache.tier.tier import Tier"),
        ("kvcache.block.chain", "def f():\n    import kvcache.cache.cache"),
        ("kvcache.block.chain", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from kvcache import open"),
        ("kvcache.os_env", "from kvcache import settings"),
        ("kvcache.codec.zstd", "from kvcache.transfer import pages"),
        ("kvcache.tier.host.tier", "from kvcache.tier.nvme.tier import NvmeTier"),
        ("kvcache.engine.pool", "import kvcache"),
    ],
)
def test_an_import_against_the_order_is_found(module: str, source: str) -> None:
    assert len(list(order_faults(module, source))) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("kvcache.block.chain", "import os, json\nfrom kvcache import native\nfrom kvcache.block.layout import Shard"),
        ("kvcache.settings.sources", "from kvcache.settings import Settings\nfrom kvcache.errors import ConfigError"),
        ("kvcache.tier.nvme.tier", "from kvcache.tier.nvme import journal\nfrom kvcache.tier.tier import Tier"),
        ("kvcache.connector.vllm.shared_cache", "import kvcache"),
        ("kvcache.cli.main", "import kvcache.cache.cache"),
    ],
)
def test_an_import_along_the_order_is_allowed(module: str, source: str) -> None:
    assert list(order_faults(module, source)) == []


def test_a_cycle_is_found_by_name() -> None:
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == ["a, b, c"]
    assert cycles({"a": {"b"}, "b": {"c"}, "c": set()}) == []


if __name__ == "__main__":
    for rule in RULES:
        for fault in sorted(faults(rule)):
            print(f"{rule}: {fault}")
    for name, lines in lengths().items():
        if lines < MIN_MODULE_LINES and not name.endswith("__init__.py"):
            print(f"short: {name} {lines}")


MAX_BLANKET_EXCEPTS = 25
REASONS = re.compile(r"boundary to |boundary: |worker thread that must survive|best-effort cleanup")


def test_blanket_excepts_are_few_and_have_a_reason() -> None:
    lines = [line for path in SOURCES for line in path.read_text().split("\n")]
    lines = [line for line in lines if re.search(r"except( Exception\b|:)", line)]
    assert len(lines) <= MAX_BLANKET_EXCEPTS
    assert [line.strip() for line in lines if not REASONS.search(line)] == []
