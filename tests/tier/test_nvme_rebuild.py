"""A store told anew by its records, after every way in which a journal can be lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvcache.errors import StoreError
from kvcache.tier.nvme.rebuild import rebuild
from kvcache.tier.nvme.segment import FOOTER_BYTES, SegmentFooter
from tests.tier.blocks import chain
from tests.tier.test_nvme_journal import vector
from tests.tier.tier_files import DONE, NOT_FOUND, Open, read, write

BLOCKS, LARGE = chain(12), chain(6, seed=1)


def _remove(store: Path) -> None:
    for path in [*store.glob("journal-*"), *store.glob("checkpoint-*")]:
        path.unlink()


def _spoil_header(store: Path) -> None:
    for path in store.glob("journal-*"):
        path.write_bytes(b"\xff" * 48 + path.read_bytes()[48:])


def _lose_checkpoint(store: Path) -> None:
    for path in store.glob("checkpoint-*"):
        path.unlink()


def _spoil_middle(store: Path) -> None:
    (path,) = store.glob("journal-*")
    data = bytearray(path.read_bytes())
    data[300] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("lose", [_remove, _spoil_header, _lose_checkpoint, _spoil_middle])
def test_every_valid_record_is_rebuilt(store: Open, tmp_path: Path, lose: Callable[[Path], None]) -> None:
    tier = store()
    assert write(tier, BLOCKS) == (DONE,) * 12
    if lose is _lose_checkpoint:
        assert tier.compact()
    assert write(tier, LARGE, 40_000) == (DONE,) * 6
    tier.close()
    lose(tmp_path / "store")
    told: list[int] = []
    found = rebuild(str(tmp_path / "store"), on_progress=told.append)
    assert (found.records, found.unsound, found.doubles, found.unlabelled) == (18, 0, 0, 0)
    assert sum(told) + found.segments * FOOTER_BYTES == sum(
        path.stat().st_size for path in (tmp_path / "store").glob("segment-*")
    )
    tier = store()
    assert [read(tier, address) for address in BLOCKS] == [DONE] * 12
    assert tier.contains(LARGE) == (DONE,) * 6
    assert list(tier.scan())[:12] == BLOCKS
    assert tier.sync()
    assert tier.check() == []
    assert write(tier, chain(3, seed=4)) == (DONE,) * 3


def test_a_removed_record_may_be_rebuilt_correctly(store: Open, tmp_path: Path) -> None:
    tier = store()
    write(tier, BLOCKS)
    tier.remove(BLOCKS[3:5])
    tier.close()
    _remove(tmp_path / "store")
    assert rebuild(str(tmp_path / "store")).records == 12
    tier = store()
    assert read(tier, BLOCKS[3]) is DONE


def test_a_torn_record_is_not_rebuilt(store: Open, tmp_path: Path) -> None:
    tier = store()
    write(tier, BLOCKS)
    tier.close()
    (path,) = (tmp_path / "store").glob("segment-*")
    with path.open("r+b") as file:
        file.seek(4 * 16384 + 8192)
        file.write(bytes(4096))
    _remove(tmp_path / "store")
    found = rebuild(str(tmp_path / "store"))
    assert (found.records, found.unsound) == (11, 1)
    tier = store()
    assert [read(tier, address) for address in BLOCKS].count(DONE) == 11
    assert read(tier, BLOCKS[4]) is NOT_FOUND


def test_a_segment_without_a_footer_is_reported(store: Open, tmp_path: Path) -> None:
    tier = store()
    write(tier, BLOCKS)
    write(tier, LARGE, 40_000)
    tier.close()
    path = min((tmp_path / "store").glob("segment-*"))
    with path.open("r+b") as file:
        file.seek(-FOOTER_BYTES, 2)
        file.write(b"\0" * 64)
    _remove(tmp_path / "store")
    found = rebuild(str(tmp_path / "store"))
    assert (found.records, found.unlabelled) == (6, 1)


def test_a_store_with_a_valid_journal_is_not_rebuilt(store: Open, tmp_path: Path) -> None:
    tier = store()
    write(tier, BLOCKS)
    tier.close()
    before = {path.name: path.read_bytes() for path in (tmp_path / "store").iterdir()}
    with pytest.raises(StoreError, match="its journal is intact"):
        rebuild(str(tmp_path / "store"))
    assert {path.name: path.read_bytes() for path in (tmp_path / "store").iterdir()} == before


def test_a_corrupt_footer_is_ignored() -> None:
    page = SegmentFooter(4, 1, 16384).pack()
    assert SegmentFooter.unpack(page) == (4, 1, 16384)
    assert page == vector("label").ljust(FOOTER_BYTES, b"\0")
    for at in range(40):
        bad = bytearray(page)
        bad[at] ^= 1
        assert SegmentFooter.unpack(bad) is None
    assert SegmentFooter.unpack(page[:4095]) is None
