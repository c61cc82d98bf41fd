"""What is installed: the compiled core, engines, and the versions of both."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Iterator
from importlib import metadata

import kvcache
from kvcache import native
from kvcache.cli.doctor.finding import Finding, ok, warn

ENGINES = {
    "vllm": ("vllm",),
    "sglang": ("sglang",),
    "transformers": ("transformers",),
    "torch": ("torch",),
    "cupy": ("cupy-cuda13x", "cupy-cuda12x", "cupy"),
}
"""What to look for, and the distributions that bring it."""

NEEDED = ("numpy", "xxhash", "msgpack", "pydantic", "typer", "rich", "redis", "aiofiles", "prometheus-client")


def checks(version_of: Callable[[str], str] = metadata.version) -> Iterator[Finding]:
    yield ok("kvcache", f"{kvcache.__version__}, Python {platform.python_version()} on {platform.machine()}")
    yield core(native.built)
    for name, distributions in ENGINES.items():
        yield ok(name, _version(distributions, version_of) or "not installed")


def core(built: bool) -> Finding:
    if built:
        return ok("native core", "built")
    remedy = "all works, slower: install a C++17 compiler, then kvcache again"
    return warn("native core", "was not built", remedy)


def versions(version_of: Callable[[str], str] = metadata.version) -> dict[str, str]:
    """By name, of whatever is installed of what we use and of engines."""
    found = {"kvcache": kvcache.__version__, "python": sys.version, "platform": platform.platform()}
    for name, distributions in {**ENGINES, **{name: (name,) for name in NEEDED}}.items():
        version = _version(distributions, version_of)
        if version:
            found[name] = version
    return found


def _version(distributions: tuple[str, ...], version_of: Callable[[str], str]) -> str:
    for distribution in distributions:
        try:
            return version_of(distribution)
        except metadata.PackageNotFoundError:
            continue
    return ""
