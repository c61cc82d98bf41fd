"""A large record goes into an object store in parts, beside its place first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvcache.testing.tier import chain, intact, write
from kvcache.tier.object.bucket import RefusedError
from kvcache.tier.tier import Outcome
from tests.tier.tier_files import MIB, OpenObjects, objects

DONE, NOT_FOUND = Outcome.DONE, Outcome.NOT_FOUND


@pytest.mark.parametrize("moves", [True, False])
def test_a_large_record_is_uploaded_in_parts(
    opened: OpenObjects, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, moves: bool
) -> None:
    """Beside its place first, and then there, where its name is found; or it stays, where a store cannot."""
    monkeypatch.setattr("kvcache.tier.object.store.MULTIPART_BYTES", 6 * MIB)

    def refuse(*_: Any) -> None:
        raise RefusedError("unsupported")

    tier, other, blocks = opened(pack_bytes=5 * MIB), opened(), chain(2)
    assert other.match_prefix(blocks).result(30) == 0
    if not moves:
        monkeypatch.setattr(tier._bucket, "move", refuse)
    assert write(tier, blocks, 12 * MIB) == (DONE, DONE)
    assert len(objects(tmp_path)) == 2
    assert ["." in path.name for path in objects(tmp_path)] == [not moves] * 2
    other._manifest._missing.clear()
    assert other.match_prefix(blocks).result(30) == (2 if moves else 0)
    assert write(opened(), blocks, 12 * MIB) == (DONE, DONE)
    assert len(objects(tmp_path)) == 2
    assert intact(opened(), blocks, 12 * MIB)


@pytest.mark.parametrize("made", ["all", "half", "nothing", "another's"])
def test_a_late_move_leaves_one_pack(
    opened: OpenObjects, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, made: str
) -> None:
    """Wherever it stopped, and whatever was there before."""
    monkeypatch.setattr("kvcache.tier.object.store.MULTIPART_BYTES", 6 * MIB)
    tier, other, blocks = opened(pack_bytes=5 * MIB), opened(), chain(1)
    assert other.contains(blocks) == (NOT_FOUND,)

    def late(beside: str, path: str, deadline: float | None) -> None:
        source, target = (tmp_path / "store" / each for each in (beside, path))
        if made == "another's":
            assert write(other, blocks, MIB) == (DONE,)
        elif made != "nothing":
            target.write_bytes(source.read_bytes())
        if made == "all":
            source.unlink()
        raise TimeoutError("timeout")

    monkeypatch.setattr(tier._bucket, "move", late)
    assert write(tier, blocks, 12 * MIB) == (DONE,)
    assert ["." in path.name for path in objects(tmp_path)] == [made == "nothing"]
    for reader in (tier, opened()):
        assert intact(reader, blocks, MIB if made == "another's" else 12 * MIB)
