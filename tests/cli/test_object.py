"""`kvcache object`: run over a real directory."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from kvcache.cli import main as frame
from kvcache.settings.tiers import ObjectSettings
from kvcache.testing.tier import chain, namespace, write
from kvcache.tier.object import ObjectTier
from kvcache.tier.tier import Outcome

DAY = 86_400.0


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Two namespaces: one of two packs, of which one is ten days old, one of a pack of today."""
    tier = ObjectTier(ObjectSettings(url=f"file://{tmp_path}/store"))
    old, young, other = chain(3), chain(3, seed=1), chain(2, of=1)
    for blocks in (old, young, other):
        assert set(write(tier, blocks)) == {Outcome.DONE}
    tier.close()
    (path,) = (tmp_path / "store").rglob(old[0].signature.hex())
    os.utime(path, (path.stat().st_atime, path.stat().st_mtime - 10 * DAY))
    (tmp_path / "kvcache.toml").write_text(f'[object]\nenabled = true\nurl = "file://{tmp_path}/store"\n')
    return tmp_path


@pytest.fixture
def kv(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], store: Path) -> Any:
    monkeypatch.setenv("COLUMNS", "200")

    def run(*words: str, config: bool = True) -> tuple[int, str, str]:
        more = ["--config", str(store / "kvcache.toml")] if config else []
        monkeypatch.setattr(sys, "argv", ["kvcache", "object", *words, *more])
        try:
            frame.main()
            code = 0
        except SystemExit as left:
            code = int(left.code or 0)
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def left(store: Path) -> int:
    tier = ObjectTier(ObjectSettings(url=f"file://{store}/store"))
    try:
        assert tier.check() == []
        return tier.usage().records
    finally:
        tier.close()


def test_ls_lists_packs_by_namespace(kv: Any) -> None:
    code, out, _ = kv("ls")
    assert code == 0
    assert namespace().hex()[:8] in out
    assert "10 d" in out
    rows = {row["namespace"]: row for row in json.loads(kv("ls", "--json")[1])}
    assert {name: row["packs"] for name, row in rows.items()} == {namespace().hex(): 2, namespace(1).hex(): 1}


def test_prune_removes_by_age(kv: Any, store: Path) -> None:
    assert json.loads(kv("prune", "--older-than", "7d", "--dry-run", "--json")[1])["packs"] == 1
    assert left(store) == 8
    code, out, _ = kv("prune", "--older-than", "7d")
    assert code == 0
    assert "10 d" in out
    assert left(store) == 5
    assert json.loads(kv("prune", "--older-than", "7d", "--json")[1])["packs"] == 0


def test_prune_by_size_takes_the_oldest(kv: Any, store: Path) -> None:
    sizes = sorted(path.stat().st_size for path in (store / "store").rglob("*") if path.is_file())
    kv("prune", "--most", str(sum(sizes) - 1))
    assert left(store) == 5
    kv("prune", "--most", "0")
    assert left(store) == 0
    assert [path for path in (store / "store").rglob("*") if path.is_file()] == []


def test_prune_removes_expired_packs(kv: Any, store: Path) -> None:
    assert json.loads(kv("prune", "--expired", "--json")[1])["packs"] == 0
    assert left(store) == 8


@pytest.mark.parametrize("words", [("prune",), ("prune", "--older-than", "soon"), ("prune", "--most", "much")])
def test_invalid_arguments_remove_nothing(kv: Any, store: Path, words: tuple[str, ...]) -> None:
    code, _, said = kv(*words)
    assert (code, bool(said)) == (2, True)
    assert left(store) == 8


def test_a_missing_store_is_reported(kv: Any) -> None:
    code, _, said = kv("ls", config=False)
    assert code == 2
    assert "object.url" in said
