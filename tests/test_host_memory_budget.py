"""One sum of host memory for all processes of a node; what a dead one had comes back."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvcache
from kvcache import host_memory_budget as share
from kvcache.block.layout import KVLayout
from kvcache.machine import Memory, file_system
from kvcache.settings.sources import load

GiB, MiB = 1 << 30, 1 << 20
CHILD = """
import sys, kvcache
cache = kvcache.open(host={"capacity_bytes": sys.argv[1]}, nvme={"enabled": False}, control={"enabled": False})
print("open", flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A machine of 64 GiB, with no other process on it."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(share, "runtime_directories", lambda: [tmp_path / "kvcache"])
    monkeypatch.setattr("kvcache.settings.tiers.memory", lambda: Memory(64 * GiB, 60 * GiB, "machine"))
    for name in share._RANKS:
        monkeypatch.delenv(name, raising=False)
    yield tmp_path / "kvcache"
    assert share.claimed_bytes() == 0, "a claim outlived its cache"


def default() -> int:
    return load(environ={}, nvme__enabled=False).host.capacity_bytes


def opened(size: str) -> Any:
    return kvcache.open(host={"capacity_bytes": size}, nvme={"enabled": False}, control={"enabled": False})


def test_caches_of_one_process_share_a_quarter_of_the_machine() -> None:
    assert default() == 16 * GiB
    with opened("6GiB"):
        assert default() == 10 * GiB
        with opened("9GiB"):
            assert default() == 1 * GiB
            with opened("4GiB"):
                assert default() == 16 * MiB, "the least that serves, where others have all there is"
    assert default() == 16 * GiB


def test_a_killed_process_releases_its_share(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", CHILD, "6GiB"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"open\n"
    assert default() == 10 * GiB
    assert len(list((tmp_path / "kvcache" / share.CLAIMS_FOLDER).glob("*-*"))) == 1
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert default() == 16 * GiB
    assert list((tmp_path / "kvcache" / share.CLAIMS_FOLDER).glob("*-*")) == []


def test_ranks_of_a_node_have_equal_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert default() == 2 * GiB
    with opened("2GiB"):
        assert default() == 2 * GiB, "the other ranks' parts are theirs"
    for wrong in ("0", "", "many", "-1"):
        assert share.local_ranks({"LOCAL_WORLD_SIZE": wrong}) == 1
    assert share.local_ranks({"SLURM_NTASKS_PER_NODE": "4"}) == 4


def test_a_cache_that_does_not_open_claims_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises((kvcache.KVCacheError, OSError)):
        kvcache.open(
            host={"capacity_bytes": "1GiB"},
            nvme={"path": tmp_path / "file", "capacity_bytes": "1GiB"},
            control={"enabled": False},
        )
    assert share.claimed_bytes() == 0


@pytest.mark.parametrize("content", ["", "nothing", "9" * 4000])
def test_invalid_claim_files_are_ignored(node: Path, content: str) -> None:
    with opened("1GiB"):
        (node / share.CLAIMS_FOLDER / "1-1").write_text(content)
        (node / share.CLAIMS_FOLDER / "2-1").mkdir()
        assert default() == 15 * GiB
    (node / share.CLAIMS_FOLDER / "2-1").rmdir()


def test_an_unsafe_runtime_directory_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "open to all").mkdir(mode=0o777)
    (tmp_path / "open to all").chmod(0o777)
    monkeypatch.setattr(share, "runtime_directories", lambda: [tmp_path / "no" / "where", tmp_path / "open to all"])
    with opened("1GiB"):
        assert default() == 16 * GiB
    assert list((tmp_path / "open to all").iterdir()) == []


def test_the_budget_is_logged_with_the_tokens_that_fit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    layout = KVLayout.mha(layers=32, kv_heads=8, head_dim=128)  # 2 MiB a block of 16 tokens, and 4 KiB
    with (
        caplog.at_level(logging.INFO, "kvcache"),
        kvcache.open(
            nvme={"path": tmp_path / "nvme", "capacity_bytes": "1GiB", "codec": "int8"}, control={"enabled": False}
        ) as cache,
    ):
        for _ in range(2):
            cache.namespace(layout, model="org/model", revision="1")
    # int8 halves bf16, and its scales take less than another 4 KiB
    told = [record for record in caplog.records if (record.name, record.levelno) == ("kvcache", logging.INFO)]
    first, second = [record.getMessage() for record in told]
    assert first == "host 16 GiB (default: " + _made() + "), nvme 1 GiB with 0 records"
    assert second == (
        f"namespace bound: model=org/model capacity: {16 * GiB // (2 * MiB + 4096) * 16:,} tokens in host (raw), "
        f"{GiB // (MiB + 2 * 4096) * 16:,} tokens in nvme (int8)"
    )


def test_a_drive_in_a_containers_own_layer_is_warned_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    drive = tmp_path / "nvme"
    for kind, warned in (("overlay", True), ("ext4", False)):
        (tmp_path / "proc/self/mounts").write_text(f"overlay / {kind} rw,relatime 0 0\n")
        monkeypatch.setattr("kvcache.cache.factory.file_system", lambda path: file_system(path, tmp_path))
        with caplog.at_level(logging.WARNING, "kvcache"):
            kvcache.open(nvme={"path": drive, "capacity_bytes": "64MiB"}, control={"enabled": False}).close()
        said = [record.getMessage() for record in caplog.records if str(drive) in record.getMessage()]
        assert [("overlay" in line, "mount a volume" in line) for line in said] == [(True, True)] * warned
        caplog.clear()


def _made() -> str:
    from kvcache.settings import TABLE

    return TABLE["host.capacity_bytes"].made
