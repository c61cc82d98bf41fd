"""Without a compiler the package installs, works, and says once what is missing."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from kvcache import native

ROOT = Path(__file__).parents[2]


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "built", False)
    native._warn_once.cache_clear()


@pytest.mark.usefixtures("missing")
def test_said_once() -> None:
    with pytest.warns(RuntimeWarning, match=r"without a C\+\+17 compiler") as said:
        found = [native.available() for _ in range(2)]
    assert found == [False, False]
    assert len(said) == 1
    assert Path(said[0].filename) == Path(__file__)  # names the caller, not the shard_key that says it


def test_nothing_said_where_it_is_built() -> None:
    if not native.built:
        pytest.skip("the compiled core was not built")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert native.available()


def test_a_process_without_it() -> None:
    """As where nothing was compiled: the copier works, by its twin."""
    program = """
import sys
sys.modules["kvcache._native"] = None
from kvcache import native
from kvcache.block.layout import KVLayout
from kvcache.transfer.cpu import CpuCopier
from kvcache.transfer.pages import GroupPages
import numpy as np
layout = KVLayout.mha(layers=1, kv_heads=1, head_dim=4, dtype="fp32", block_tokens=2)
pool = np.arange(2 * 3 * 2 * 1 * 4, dtype=np.float32).reshape(2, 3, 2, 1, 4)
pages = GroupPages.from_tensors(layout, [pool], axes=("kv", "page", "token", "head", "dim"))
buffer = memoryview(bytearray(layout.block_bytes()))
for _ in range(2):
    CpuCopier().gather(pages, [2], [buffer])
assert bytes(buffer) == pool[:, 2].tobytes()
assert not native.built
"""
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stderr.count("RuntimeWarning: kvcache._native is missing") == 1


def test_setup_goes_on_without_a_compiler(tmp_path: Path) -> None:
    none = str(tmp_path / "no-such-compiler")
    shard_keys = ["--build-lib", str(tmp_path / "lib"), "--build-temp", str(tmp_path / "temp")]
    ran = subprocess.run(
        [sys.executable, "setup.py", "build_ext", *shard_keys],
        check=False,
        cwd=ROOT,
        env={**os.environ, "CC": none, "CXX": none},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    assert "building extension" in ran.stdout + ran.stderr  # it tried, and says that it failed
    assert not list(tmp_path.rglob("_native*"))
