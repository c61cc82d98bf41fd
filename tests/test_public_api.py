"""The public face: which names there are, what an import costs, what it may never do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import kvcache
from kvcache import errors
from kvcache.errors import ConfigError, KVCacheError, UnreachableError

ROOT = Path(__file__).parents[1]

NAMES = [
    "AccessError",
    "NamespaceHandle",
    "NamespaceSpec",
    "ClosedError",
    "ConfigError",
    "FlushReport",
    "Group",
    "GroupPages",
    "Hit",
    "KVCache",
    "KVCacheError",
    "KVLayout",
    "LayoutError",
    "ModelError",
    "Namespace",
    "NamespaceError",
    "NotFoundError",
    "Outcome",
    "Request",
    "RequestError",
    "Settings",
    "Shard",
    "StoreError",
    "TierFlush",
    "TokenError",
    "Transfer",
    "UnreachableError",
    "__version__",
    "layout_from_hf",
    "open",
]

EXTRAS = ["chdb", "clickhouse_connect", "cupy", "gguf", "matplotlib", "obstore", "safetensors", "starlette"]
EXTRAS += ["tokenizers", "torch", "transformers", "uvicorn"]


def python(script: str, *, cwd: Path = ROOT) -> str:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=cwd, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_names_are_these() -> None:
    assert sorted(kvcache.__all__) == sorted(NAMES)
    assert dir(kvcache) == kvcache.__all__
    for name in NAMES:
        assert getattr(kvcache, name) is not None
    with pytest.raises(AttributeError, match="nonsense"):
        kvcache.nonsense  # noqa: B018


def test_every_error_is_public() -> None:
    public = {getattr(kvcache, name) for name in NAMES if name.endswith("Error")}
    ours = {each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, KVCacheError)}
    assert public == ours


def test_import_loads_only_kvcache_and_the_stdlib() -> None:
    script = (
        "import sys\n"
        "before = set(sys.modules)\n"
        "import kvcache\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "print(sorted(new - set(sys.stdlib_module_names)))\n"
    )
    assert python(script) == "['kvcache']\n"


def test_lower_packages_import_without_extras() -> None:
    """Every module of the lower packages and the whole command's frame, with the extras hidden and sockets watched."""
    packages = ("block", "codec", "transfer", "evict", "observe", "index", "tier", "cache")
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in sorted((ROOT / "kvcache").rglob("*.py"))
        if path.parent == ROOT / "kvcache" or path.relative_to(ROOT).parts[1] in packages
    ]
    script = (
        "import importlib, sys\n"
        f"hidden = set({EXTRAS})\n"
        "class Hide:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in hidden:\n"
        "            raise ModuleNotFoundError(name=name)\n"
        "sys.meta_path.insert(0, Hide())\n"
        "def watch(event, arguments):\n"
        "    assert not event.startswith('socket.'), (event, arguments)\n"
        "sys.addaudithook(watch)\n"
        f"for name in {modules}:\n"
        "    importlib.import_module(name)\n"
        "import kvcache, kvcache.cli.main\n"
        "kvcache.cli.main.build_app()\n"
        "for name in kvcache.__all__:\n"
        "    getattr(kvcache, name)\n"
        "print('whole')\n"
    )
    assert python(script) == "whole\n"


def test_open_reports_an_unreachable_daemon(tmp_path: Path) -> None:
    with pytest.raises(UnreachableError, match="kvcache daemon") as caught:
        kvcache.open(f"unix:{tmp_path}/kvcache.socket")
    assert str(tmp_path) in str(caught.value)


def test_open_names_an_unreachable_remote_daemon() -> None:
    with pytest.raises(UnreachableError) as caught:
        kvcache.open("tls://cache.invalid:7070")
    assert "tls://cache.invalid:7070" in str(caught.value)


def test_open_of_a_daemon_refuses_cache_settings(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"host = .*its own settings"):
        kvcache.open(f"unix:{tmp_path}/kvcache.socket", host={"capacity_bytes": "1GiB"})


def test_a_wrong_setting_is_refused_before_files_are_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"flow\.threads = 0"):
        kvcache.open(nvme__path=tmp_path / "nvme", nvme__capacity_bytes="1GiB", flow__threads=0)
    assert list(tmp_path.iterdir()) == []


def test_open_takes_a_file_and_keywords(tmp_path: Path) -> None:
    file = tmp_path / "kvcache.toml"
    file.write_text(f'[host]\ncapacity_bytes = "8MiB"\n[nvme]\npath = "{tmp_path}/nvme"\ncapacity_bytes = "64MiB"\n')
    for keywords, made in (({"nvme__enabled": False}, False), ({}, True)):
        cache = kvcache.open(file, **keywords)
        try:
            assert cache.check() == []
        finally:
            cache.close()
        assert (tmp_path / "nvme").exists() is made
