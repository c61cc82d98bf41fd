"""The doctor's checks of the machine: memory, running caches, capacity for a model, and installed software."""

from __future__ import annotations

import os
import platform
import resource
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import kvcache
from kvcache import native
from kvcache.block.hf import layout_from_hf
from kvcache.block.record import record_bytes
from kvcache.daemon.client.control import find_caches
from kvcache.daemon.discovery import make_socket_directory
from kvcache.errors import StoreError
from kvcache.machine import Memory, memory
from kvcache.settings import Settings
from kvcache.settings.types import GiB, show_bytes

# A finding: ok, a warning or a failure, and the remedy.

State = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    name: str
    state: State
    found: str
    remedy: str = ""  # set wherever the state is not ok


def ok(name: str, found: str) -> Finding:
    return Finding(name, "ok", found)


def warn(name: str, found: str, remedy: str) -> Finding:
    return Finding(name, "warn", found, remedy)


def fail(name: str, found: str, remedy: str) -> Finding:
    return Finding(name, "fail", found, remedy)


SHM_DIRECTORY = "/dev/shm"  # noqa: S108  only its size is read
MIN_SHM_BYTES = GiB  # a container's default is 64 MiB


def check_memory(settings: Settings) -> Iterator[Finding]:
    yield host_capacity(memory(), settings.host.capacity_bytes)
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    yield locked_memory(None if limit == resource.RLIM_INFINITY else limit, settings.host.capacity_bytes)
    try:
        shared = os.statvfs(SHM_DIRECTORY)
    except OSError:
        yield shared_memory(None)
    else:
        yield shared_memory(shared.f_blocks * shared.f_frsize)


def host_capacity(now: Memory, wanted_bytes: int) -> Finding:
    source = "a cgroup allows" if now.bound == "cgroup" else "the machine has"
    found = (
        f"host.capacity_bytes = {show_bytes(wanted_bytes)}; {source} {show_bytes(now.allowed_bytes)}, "
        f"{show_bytes(now.free_bytes)} of it free"
    )
    if wanted_bytes > now.allowed_bytes:
        return Finding("memory", "fail", found, "lower host.capacity_bytes, or allow the process more memory")
    if wanted_bytes > now.free_bytes:
        return warn(
            "memory", found, "fine if a running cache uses it; else lower host.capacity_bytes or stop other processes"
        )
    return ok("memory", found)


def locked_memory(limit_bytes: int | None, wanted_bytes: int) -> Finding:
    """Check the limit of locked memory; None: no limit."""
    if limit_bytes is None:
        return ok("locked memory", "no limit")
    found = f"{show_bytes(limit_bytes)} may be locked; host.capacity_bytes = {show_bytes(wanted_bytes)}"
    if limit_bytes >= wanted_bytes:
        return ok("locked memory", found)
    return warn(
        "locked memory",
        found,
        "required to pin host memory for a GPU: `ulimit -l unlimited`, LimitMEMLOCK=infinity for a service, "
        "--ulimit memlock=-1 for a container",
    )


def shared_memory(size_bytes: int | None) -> Finding:
    """Check the size of shared memory; None: there is none."""
    if size_bytes is None:
        remedy = "engines with several processes exchange data there: mount a tmpfs on it"
        return warn("shared memory", f"{SHM_DIRECTORY} does not exist", remedy)
    found = f"{SHM_DIRECTORY} has {show_bytes(size_bytes)}"
    if size_bytes >= MIN_SHM_BYTES:
        return ok("shared memory", found)
    return warn(
        "shared memory",
        found,
        f"engines with several processes exchange data there and need {show_bytes(MIN_SHM_BYTES)} or more: "
        "--shm-size or --ipc=host for a container",
    )


# The running caches: whether an operator can reach them, and whether a bypass is on.


def check_caches() -> Iterator[Finding]:
    try:
        yield ok("control socket", f"in {make_socket_directory()}")
    except StoreError as error:
        yield warn(
            "control socket", str(error), "caches run without it, but `kvcache ps` and `bypass` cannot reach them"
        )
    running = list(find_caches())
    yield ok("running caches", ", ".join(found.address for found in running) or "none")
    for found in running:
        if found.fault:
            yield warn(found.address, f"does not answer: {found.fault}", "its process hangs or has another version")
        elif found.info["bypass"] != "off":
            state = f"bypassed: {found.info['bypass']}"
            yield warn(found.address, state, f"`kvcache bypass off --address {found.address}` restores it")


# The number of tokens of a model that fit into the configured tiers.


def check_model_capacity(settings: Settings, model: Path) -> Iterator[Finding]:
    """Report the least capacity: as if every group kept all tokens."""
    layout = layout_from_hf(model, block_tokens=settings.block_tokens)
    a_block = sum(record_bytes(layout.block_bytes(group=group)) for group in range(len(layout.groups)))
    yield ok("model", f"{show_bytes(layout.token_bytes)} a token, {show_bytes(a_block)} a block with its headers")
    tiers = {"host": settings.host.capacity_bytes}
    if settings.nvme.enabled:
        tiers["nvme"] = settings.nvme.capacity_bytes
    for tier, capacity_bytes in tiers.items():
        tokens = capacity_bytes // a_block * layout.block_tokens
        found = f"{tokens:,} tokens in {show_bytes(capacity_bytes)}"
        setting = f"{tier}.capacity_bytes"
        if not tokens:
            yield fail(f"room in {tier}", found, f"give {setting} at least {show_bytes(a_block)}")
        elif layout.max_tokens and tokens < layout.max_tokens:
            remedy = f"less than one context of {layout.max_tokens:,} tokens: raise {setting}"
            yield warn(f"room in {tier}", found, remedy)
        else:
            yield ok(f"room in {tier}", found)


# The installed software: the native core, engines, and the versions of both.

ENGINES = {
    "vllm": ("vllm",),
    "sglang": ("sglang",),
    "transformers": ("transformers",),
    "torch": ("torch",),
    "cupy": ("cupy-cuda13x", "cupy-cuda12x", "cupy"),
}
"""Packages to look for, and the distributions that contain them."""

REQUIRED_PACKAGES = (
    "numpy",
    "xxhash",
    "msgpack",
    "pydantic",
    "typer",
    "rich",
    "redis",
    "aiofiles",
    "prometheus-client",
)


def check_software(version_of: Callable[[str], str] = metadata.version) -> Iterator[Finding]:
    yield ok("kvcache", f"{kvcache.__version__}, Python {platform.python_version()} on {platform.machine()}")
    yield native_core(native.built)
    for name, distributions in ENGINES.items():
        yield ok(name, _version(distributions, version_of) or "not installed")


def native_core(built: bool) -> Finding:
    if built:
        return ok("native core", "built")
    remedy = "all works, slower: install a C++17 compiler, then kvcache again"
    return warn("native core", "was not built", remedy)


def versions(version_of: Callable[[str], str] = metadata.version) -> dict[str, str]:
    """Return the versions of the installed packages and engines, by name."""
    found = {"kvcache": kvcache.__version__, "python": sys.version, "platform": platform.platform()}
    for name, distributions in {**ENGINES, **{name: (name,) for name in REQUIRED_PACKAGES}}.items():
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
