"""Import paths that users and engines write into their configurations. They never move and import without a warning."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

PATHS = [
    ("kvcache.connector.vllm", "KVCacheConnector", "vllm"),  # kv_connector_module_path
    ("kvcache.connector.vllm.tier", "KVCacheTier", "vllm"),  # module_path of a tier of vLLM's offloading
    ("kvcache.connector.vllm.plugin", "register", ""),
    ("kvcache.connector.sglang", "KVCacheStorage", "sglang"),  # module_path, class_name
    ("kvcache.connector.sglang", "KVCacheLinker", "sglang"),  # linker_module_path
    ("kvcache.connector.transformers", "PrefixCache", "transformers"),
    ("kvcache.connector.transformers", "PrefixStore", "transformers"),
    ("kvcache.testing", "CodecContract", ""),
    ("kvcache.testing", "ConnectorContract", ""),
    ("kvcache.testing", "CopierContract", ""),
    ("kvcache.testing", "TierContract", ""),
    ("kvcache.tier.tier", "Tier", ""),  # what a user-written tier implements
    ("kvcache.codec.codec", "Codec", ""),
]
"""Module, name in it, and the engine that the name needs, if any."""

IMPORT = """
import importlib, sys
module, name, engine = sys.argv[1:]
try:
    getattr(importlib.import_module(module), name)
except ModuleNotFoundError as error:
    if not engine or error.name.split(".")[0] != engine:
        raise
    print("needs", engine)
"""


@pytest.mark.parametrize(("module", "name", "engine"), PATHS)
def test_path_imports_without_a_warning(module: str, name: str, engine: str) -> None:
    strict = ["-W", "error::DeprecationWarning:kvcache", "-W", "error::FutureWarning:kvcache"]
    command = [sys.executable, *strict, "-c", IMPORT, module, name, engine]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    if "needs" in done.stdout:
        pytest.skip(f"{engine} is not installed; the path itself leads to it")


def test_vllm_finds_the_plugin_by_its_entry_point() -> None:
    found = [point for point in entry_points(group="vllm.general_plugins") if point.name == "kvcache"]
    if not found:
        pytest.skip("kvcache is not installed here, only importable")
    assert {point.value for point in found} == {"kvcache.connector.vllm.plugin:register"}
    assert callable(found[0].load())
