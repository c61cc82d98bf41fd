"""SGLang's own tree over our linker, for each kind of model that it can keep: what was computed comes back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.peer.sglang.cache_stack import LinkerStack
from tests.peer.sglang.device_pools import PAGE, WINDOW
from tests.peer.sglang.sglang_server import damage, owner

PROMPT = list(range(2, 2 + 40 * PAGE))
KINDS = ["mha", "mla", "swa"]

pytestmark = pytest.mark.usefixtures("sglang_in_process")


def equal(left: Any, right: Any) -> bool:
    return all(torch.equal(a, b) for pair in zip(left, right, strict=True) for a, b in zip(*pair, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_pages_after_a_restart_equal_the_computed_ones(kind: str, tmp_path: Path) -> None:
    first = LinkerStack(tmp_path, kind)
    computed = first.compute(PROMPT)
    assert first.found(PROMPT)[0] == 0, "it is on the device"
    first.close()
    second = LinkerStack(tmp_path, kind)
    found, request = second.found([*PROMPT, 7, 7])
    assert found == len(PROMPT)
    assert equal(second.load(request), computed)
    second.close()


def test_a_window_is_a_hit_only_where_it_was_computed(tmp_path: Path) -> None:
    """A prompt that leaves another one in the middle: its keys are there so far, the window before that point is too
    only where SGLang kept it."""
    first = LinkerStack(tmp_path, "swa")
    first.compute(PROMPT)
    longer = [*PROMPT, *range(1000, 1000 + 8 * PAGE)]
    computed = first.compute(longer, seed=1)
    first.close()
    second = LinkerStack(tmp_path, "swa")
    found, request = second.found(longer)
    assert found == len(longer)
    loaded = second.load(request)
    assert loaded is not None
    for layer in (0, 2):
        assert len(loaded[layer][0]) == WINDOW
        assert all(torch.equal(a, b) for a, b in zip(loaded[layer], computed[layer], strict=True))
    second.close()


@pytest.mark.parametrize("kind", KINDS)
def test_an_unreadable_drive_is_a_miss(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvcache import os_env as port

    first = LinkerStack(tmp_path, kind)
    computed = first.compute(PROMPT)
    first.close()
    second = LinkerStack(tmp_path, kind, ours={"lookup_wait_s": 0.1})
    reads = 0
    read = port.LocalFile.read

    def broken(self: Any, offset: int, buffers: Any) -> int:
        nonlocal reads
        reads += 1
        if reads % 3 == 0:
            raise OSError(5, "said the test")
        return read(self, offset, buffers)

    monkeypatch.setattr(port.LocalFile, "read", broken)
    for turn in range(8):
        found, request = second.found(PROMPT, f"r{turn}")
        if found:
            loaded = second.load(request)
            assert loaded is not None, "SGLang answers this with an error"
            if kind != "swa":
                assert equal(loaded, [tuple(plane[:found] for plane in layer) for layer in computed])
    assert reads > 3
    monkeypatch.undo()
    second.linker.close()


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_pages_are_not_leased(kind: str, tmp_path: Path) -> None:
    first = LinkerStack(tmp_path, kind)
    computed = first.compute(PROMPT)
    first.close()
    assert damage(tmp_path / "nvme") > 10
    second = LinkerStack(tmp_path, kind)
    found, request = second.found(PROMPT)
    assert found < 3 * PAGE, "of the first three records one is damaged"
    if found:
        assert equal(second.load(request), [tuple(plane[:found] for plane in layer) for layer in computed])
    second.linker.close()


def test_two_ranks_load_together_or_not_at_all(tmp_path: Path) -> None:
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, "-m", "tests.peer.sglang.rank_worker"]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path)], env=environment, stdout=subprocess.PIPE,
                         stderr=subprocess.STDOUT, text=True)
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = [rank.communicate(timeout=600)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
        for socket in tmp_path.rglob("engine-*.socket"):
            os.kill(owner(socket), signal.SIGTERM)
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(said)
