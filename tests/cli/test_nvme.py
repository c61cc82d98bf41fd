"""`kvcache nvme`: run over a real store, sound and damaged, and carried from one directory to another."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import msgpack
import pytest

import kvcache
from kvcache.cache.cache import Cache
from kvcache.cli import main as frame
from kvcache.settings.tiers import NvmeSettings
from kvcache.tier.nvme import NvmeTier
from kvcache.tier.nvme.store import SUSPECT_AFTER_RECORDS
from kvcache.tier.tier import Outcome
from tests.tier.blocks import PAYLOAD_BYTES, RECORD_BYTES, buffer, chain, holds, namespace, record

DONE = Outcome.DONE
MIB = 1 << 20
BLOCKS = [*chain(20), *chain(10, of=1, seed=1)]


def opened(path: Path, capacity_bytes: int = 4 * MIB) -> NvmeTier:
    return NvmeTier(str(path), NvmeSettings(capacity_bytes=capacity_bytes, segment_bytes=MIB // 4, min_free_bytes=0))


@pytest.fixture
def store(tmp_path: Path) -> Path:
    path = tmp_path / "store"
    tier = opened(path)
    assert set(tier.write(BLOCKS, [record(address) for address in BLOCKS])) == {DONE}
    assert tier.close()
    return path


class Shell:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._patch, self._capsys = monkeypatch, capsys

    def __call__(self, *words: object, code: int = 0) -> Any:
        """What `kvcache nvme` says in JSON, or its complaint."""
        self._patch.setattr(sys, "argv", ["kvcache", "nvme", *map(str, words), "--json"])
        try:
            frame.main()
            left = 0
        except SystemExit as end:
            left = int(end.code or 0)
        said = self._capsys.readouterr()
        assert left == code, said.err
        return json.loads(said.out) if said.out else said.err


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(monkeypatch, capsys)


def damage(store: Path, record_number: int) -> None:
    """Flip a bit in the payload of a record, counted from the front of the first segment."""
    path = min(store.glob("segment-*"))
    with path.open("r+b") as file:
        at = record_number * RECORD_BYTES + 4096 + 99
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))


def found(path: Path) -> int:
    """How many blocks a store has; each is what was written."""
    tier = opened(path, 1 << 30)
    into = [buffer() for _ in BLOCKS]
    outcomes = tier.read(BLOCKS, into)
    assert all(holds(one, address) for one, address, o in zip(into, BLOCKS, outcomes, strict=True) if o is DONE)
    assert tier.check() == []
    tier.close()
    return outcomes.count(DONE)


def test_inspect_counts_by_namespace_and_slot(store: Path, shell: Shell) -> None:
    said = shell("inspect", "--path", store)
    assert said["records"] == 30
    assert {n["id"]: n["records"] for n in said["namespaces"]} == {namespace().hex(): 20, namespace(1).hex(): 10}
    (slots,) = said["slots"]
    assert (slots["slot_bytes"], slots["records"], slots["quarantined"]) == (RECORD_BYTES, 30, 0)


def test_inspect_prints_a_table(
    store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["kvcache", "nvme", "inspect", "--path", str(store)])
    with pytest.raises(SystemExit):
        frame.main()
    assert namespace().hex()[:12] in capsys.readouterr().out


def test_check_finds_a_flipped_bit_without_writing(store: Path, shell: Shell) -> None:
    assert shell("check", "--path", store) == {"faults": []}
    damage(store, 3)
    (fault,) = shell("check", "--path", store, code=1)["faults"]
    assert "slot 3" in fault
    assert "checksum" in fault
    assert shell("inspect", "--path", store)["records"] == 30


def test_scrub_removes_damaged_records_except_in_a_dry_run(store: Path, shell: Shell) -> None:
    damage(store, 3)
    damage(store, 5)
    assert shell("scrub", "--dry-run", "--path", store)["damaged"] == 2
    assert shell("inspect", "--path", store)["records"] == 30
    said = shell("scrub", "--path", store)
    assert (said["records"], said["damaged"], said["dry_run"]) == (30, 2, False)
    assert found(store) == 28
    assert shell("inspect", "--path", store)["slots"][0]["quarantined"] == 2


def test_compact_leaves_a_checkpoint_alone(store: Path, shell: Shell) -> None:
    before = shell("inspect", "--path", store)["journal"]
    assert before["entries"] > 30
    assert shell("compact", "--dry-run", "--path", store)["records"] == 30
    assert shell("inspect", "--path", store)["journal"]["number"] == before["number"]
    shell("compact", "--path", store)
    assert shell("inspect", "--path", store)["journal"]["entries"] <= 1
    assert found(store) == 30


def test_a_namespace_is_exported_to_another_directory(store: Path, tmp_path: Path, shell: Shell) -> None:
    file, other = tmp_path / "some.kvcarch", tmp_path / "other"
    assert shell("export", file, "--namespace", namespace(1).hex()[:8], "--path", store)["records"] == 10
    assert shell("import", file, "--dry-run", "--path", other)["records"] == 10
    assert not other.exists()
    assert shell("import", file, "--path", other)["records"] == 10
    assert found(other) == 10
    said = shell("import", file, "--path", other)
    assert (said["records"], said["there"]) == (0, 10)


def test_a_damaged_record_is_not_exported(store: Path, tmp_path: Path, shell: Shell) -> None:
    damage(store, 0)
    said = shell("export", tmp_path / "all", "--path", store)
    assert (said["records"], said["left_out"]) == (29, 1)
    shell("import", tmp_path / "all", "--path", tmp_path / "other")
    assert found(tmp_path / "other") == 29


def test_an_import_refuses_any_changed_byte(store: Path, tmp_path: Path, shell: Shell) -> None:
    file = tmp_path / "all"
    shell("export", file, "--path", store)
    whole = file.read_bytes()
    for cut in (3, 12, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:cut])
        assert ("expected an archive" if cut == 3 else "export it anew") in shell("import", file, "--dry-run", code=2)
    one = tmp_path / "one"
    shell("export", one, "--namespace", namespace(1).hex()[:8], "--path", store)
    for sound, head in ((whole, (0, 22)), (one.read_bytes(), range(8, 64, 5))):  # its own head has 29 or 62 bytes
        for at in (*head, 64, len(sound) // 2, len(sound) - 1):
            bad = bytearray(sound)
            bad[at] ^= 1
            file.write_bytes(bad)
            assert str(file) in shell("import", file, "--dry-run", code=2), at
    later = msgpack.packb({"version": 2, "namespace": None})
    file.write_bytes(whole.replace(msgpack.packb({"version": 1, "namespace": None}), later, 1))
    assert "import it with the version that wrote it" in shell("import", file, "--dry-run", code=2)
    file.write_bytes(whole + msgpack.packb(1))
    assert "its end says" in shell("import", file, "--dry-run", code=2)


def test_an_import_without_space_is_refused(
    store: Path, tmp_path: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVCACHE_NVME__CAPACITY_BYTES", "768KiB")
    file, other = tmp_path / "all", tmp_path / "other"
    shell("export", file, "--path", store)
    said = shell("import", file, "--path", other, code=1)
    assert said["no_room"] == 30 - said["records"] > 0
    assert found(other) == said["records"]


def test_a_store_in_use_is_refused_with_its_process(store: Path, shell: Shell, tmp_path: Path) -> None:
    tier = opened(store)
    file = tmp_path / "all"
    for words in (["inspect"], ["check"], ["scrub"], ["compact"], ["export", file], ["rebuild"]):
        assert f"in use by process {os.getpid()}" in shell(*words, "--path", store, code=2)
    tier.close()


def test_inspect_creates_no_store(tmp_path: Path, shell: Shell) -> None:
    assert "no FORMAT file" in shell("inspect", "--path", tmp_path, code=2)
    assert list(tmp_path.iterdir()) == []


def test_a_lost_journal_is_rebuilt(store: Path, shell: Shell) -> None:
    damage(store, 2)
    for path in [*store.glob("journal-*"), *store.glob("checkpoint-*")]:
        path.unlink()
    assert "kvcache nvme rebuild" in shell("inspect", "--path", store, code=2)
    said = shell("rebuild", "--dry-run", "--path", store)
    assert (said["records"], said["unsound"]) == (29, 1)
    assert "kvcache nvme rebuild" in shell("inspect", "--path", store, code=2)
    assert shell("rebuild", "--path", store)["records"] == 29
    assert found(store) == 29
    assert "its journal is intact" in shell("rebuild", "--path", store, code=2)
    assert PAYLOAD_BYTES < RECORD_BYTES


def test_a_running_cache_scrubs_its_own_drive(
    tmp_path: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch, store: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for number in range(SUSPECT_AFTER_RECORDS + 1):
        damage(store, number % 15)  # a segment has so many
    cache = kvcache.open(nvme={"path": store, "capacity_bytes": 64 * MIB, "min_free_bytes": 0})
    assert isinstance(cache, Cache)
    (tier,) = cache.lower_tiers
    assert isinstance(tier, NvmeTier)
    tier._store._damaged = SUSPECT_AFTER_RECORDS
    assert cache.stats()["tiers"]["nvme"]["in_trouble"] == 1
    said = shell("scrub", "--address", f"{os.getpid()}-1")
    assert (said["records"], said["damaged"]) == (30, 13)
    assert cache.stats()["tiers"]["nvme"]["in_trouble"] == 0
    assert cache.check() == [], "the index knows what left"
    assert "its own directory" in shell("scrub", "--address", f"{os.getpid()}-1", "--dry-run", code=2)
    cache.close()
