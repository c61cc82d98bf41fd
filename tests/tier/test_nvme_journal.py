"""The journal's bytes: against the page that specifies them, against damage, and what a restart makes of them."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from kvcache.errors import StoreError
from kvcache.os_env import LocalDisk
from kvcache.tier.nvme.allocator import Allocator
from kvcache.tier.nvme.directory import Directory
from kvcache.tier.nvme.index import Index
from kvcache.tier.nvme.journal import (
    CHECKPOINT,
    COLUMNS,
    ENTRY_BYTES,
    FRAME_BYTES,
    HEADER_BYTES,
    JOURNAL,
    NAMESPACE,
    PUT,
    QUARANTINE,
    REMOVE,
    RETIRE,
    SEGMENT,
    SYNCED,
    Entry,
    FileHeader,
    HeaderError,
    Journal,
    pack_frame,
    read_frames,
)

PAGE = Path(__file__).parents[2] / "docs" / "spec" / "journal.md"


def vector(name: str) -> bytes:
    found = re.search(rf"```hex {name}\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found
    return bytes.fromhex(found[1])


def entry(kind: int, **fields: object) -> bytes:
    return Entry(kind)._replace(**fields).pack()


RECORD = {
    "group": 1,
    "shard": struct.pack("<4H", 0, 2, 0, 4),
    "signature": b"\x22" * 32,
    "parent": b"\x33" * 32,
    "segment": 1,
    "slot": 3,
    "record_bytes": 16384,
    "write_id": 0x0123456789ABCDEF,
}
STATE = b"".join(
    [
        entry(SEGMENT, segment=1, slot=4, record_bytes=16384),
        entry(NAMESPACE, signature=b"\x11" * 32),
        entry(PUT, **RECORD),
    ]
)
LATER = [
    entry(REMOVE, **RECORD),
    entry(QUARANTINE, segment=1, slot=0) + entry(RETIRE, segment=1),
    entry(SYNCED, write_id=12),
]


# the page


def test_entries_equal_the_vectors_of_the_page() -> None:
    assert FileHeader(CHECKPOINT, 2, 9, 3).pack() + pack_frame(STATE, 0, 2) == vector("checkpoint-2")
    journal = FileHeader(JOURNAL, 2, 9).pack()
    for entries, sequence in zip(LATER, (9, 10, 12), strict=True):
        journal += pack_frame(entries, sequence, 2)
    assert journal == vector("journal-2")


def test_a_reader_written_from_the_page_reads_the_journal() -> None:
    """The tables of the page, with nothing of ours."""
    data = vector("journal-2")
    magic, version, kind, size, zero, number, sequence, count = struct.unpack_from("<8s4H3Q", data)
    assert (magic, version, kind, size, zero, number, sequence, count) == (b"KVCJRNL\n", 1, 0, 104, 0, 2, 9, 0)
    assert struct.unpack_from("<Q", data, 40)[0] == xxh3_64_intdigest(data[:40])
    at, found = 48, []
    while at < len(data):
        magic, count, first, check = struct.unpack_from("<4sIQQ", data, at)
        body = data[at + 24 : at + 24 + 104 * count]
        assert (magic, first) == (b"KVJF", 9 + len(found))
        assert check == xxh3_64_intdigest(data[at : at + 16] + body, seed=number)
        for i in range(count):
            kind = body[104 * i]
            segment, slot = struct.unpack_from("<II", body, 104 * i + 80)
            found.append((kind, segment, slot))
        at += 24 + len(body)
    assert found == [(2, 1, 3), (3, 1, 0), (5, 1, 0), (7, 0, 0)]
    assert struct.unpack_from("<Q", data, len(data) - 8) == (12,)


def test_the_numpy_dtype_equals_the_entry_format() -> None:
    assert COLUMNS.itemsize == ENTRY_BYTES
    assert Entry.unpack(entry(PUT, **RECORD)) == Entry(PUT)._replace(**RECORD)


# damage


def frames(lengths: list[int], number: int = 1) -> tuple[bytes, list[int]]:
    """A file of frames of so many entries, and where each of them ends."""
    data, ends, sequence = FileHeader(JOURNAL, number, 0).pack(), [], 0
    for length in lengths:
        data += pack_frame(b"".join(entry(PUT, slot=sequence + i) for i in range(length)), sequence, number)
        sequence += length
        ends.append(len(data))
    return data, ends


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.data())
def test_a_torn_tail_is_cut_to_complete_frames(lengths: list[int], data: st.DataObject) -> None:
    whole, ends = frames(lengths)
    cut = data.draw(st.integers(HEADER_BYTES, len(whole)))
    noise = data.draw(st.binary(max_size=40))
    kept = [end for end in ends if end <= cut]
    found = read_frames(bytearray(whole[:cut] + noise), 0, 1)
    assert found.valid_bytes == max(kept, default=HEADER_BYTES)
    assert found.sequence == sum(lengths[: len(kept)])
    assert found.end == ("whole" if found.valid_bytes == cut + len(noise) else "torn")


@given(st.lists(st.integers(1, 4), min_size=2, max_size=5), st.data())
def test_frames_behind_a_changed_byte_are_ignored(lengths: list[int], data: st.DataObject) -> None:
    whole, ends = frames(lengths)
    at = data.draw(st.integers(HEADER_BYTES, len(whole) - 1))
    changed = bytearray(whole)
    changed[at] ^= data.draw(st.integers(1, 255))
    found = read_frames(changed, 0, 1)
    sound = [end for end in ends if end <= at]
    assert found.valid_bytes == max(sound, default=HEADER_BYTES)
    assert found.end == ("torn" if len(sound) == len(ends) - 1 else "damaged")
    assert b"".join(found.entries) == b"".join(entry(PUT, slot=i) for i in range(sum(lengths[: len(sound)])))


def test_frames_behind_a_missing_frame_are_ignored() -> None:
    data, ends = frames([1, 1, 1])
    found = read_frames(bytearray(data[: ends[0]] + data[ends[1] :]), 0, 1)
    assert (found.sequence, found.end) == (1, "damaged")


def test_a_frame_of_another_file_is_refused() -> None:
    data, _ = frames([2], number=7)
    assert read_frames(bytearray(data), 0, 8).sequence == 0


@given(st.integers(0, HEADER_BYTES - 1), st.integers(1, 255))
def test_a_header_with_a_changed_byte_is_refused(at: int, change: int) -> None:
    data = bytearray(FileHeader(JOURNAL, 3, 17).pack())
    data[at] ^= change
    with pytest.raises(HeaderError, match=r"expected|checksum"):
        FileHeader.unpack(data, JOURNAL, 3)


# files


@pytest.fixture
def directory(tmp_path: Path) -> Directory:
    return Directory(LocalDisk(), str(tmp_path))


def slots(journal: Journal) -> list[int]:
    entries = journal.read().entries
    return [Entry.unpack(entries, i).slot for i in range(len(entries) // ENTRY_BYTES)]


def test_entries_are_read_after_reopening(directory: Directory) -> None:
    journal = Journal(directory)
    for slot in range(5):
        journal.append(entry(PUT, slot=slot))
    journal.close()
    journal = Journal(directory)
    assert slots(journal) == [0, 1, 2, 3, 4]
    assert journal.entries_behind == 5
    journal.append(entry(PUT, slot=5))
    assert slots(journal) == [0, 1, 2, 3, 4, 5]
    journal.close()


def test_a_checkpoint_replaces_what_is_before_it(directory: Directory) -> None:
    journal = Journal(directory)
    journal.append(entry(PUT, slot=1))
    header = journal.rotate()
    journal.append(entry(PUT, slot=3))
    assert slots(journal) == [1, 3]  # before the checkpoint is there both journals are read
    journal.checkpoint(header, iter([entry(PUT, slot=2)]), 1)
    assert slots(journal) == [2, 3]
    assert journal.entries_behind == 1
    assert directory.file_numbers("journal") == directory.file_numbers("checkpoint") == [2]
    journal.close()


def test_a_torn_tail_is_overwritten(directory: Directory, tmp_path: Path) -> None:
    journal = Journal(directory)
    journal.append(entry(PUT, slot=1))
    journal.append(entry(PUT, slot=2))
    journal.close()
    file = tmp_path / "journal-1"
    file.write_bytes(file.read_bytes()[:-10])
    journal = Journal(directory)
    assert journal.contents.torn == 24 + ENTRY_BYTES - 10
    assert not journal.contents.damaged
    journal.append(entry(PUT, slot=3))
    assert slots(journal) == [1, 3]
    journal.close()


def test_damage_is_reported_and_not_appended_to(directory: Directory, tmp_path: Path) -> None:
    journal = Journal(directory)
    for slot in range(3):
        journal.append(entry(PUT, slot=slot))
    journal.close()
    file = tmp_path / "journal-1"
    data = bytearray(file.read_bytes())
    data[HEADER_BYTES + 24 + ENTRY_BYTES + 30] ^= 1
    file.write_bytes(data)
    journal = Journal(directory)
    assert journal.contents.damaged == "journal-1"
    assert slots(journal) == [0]
    with pytest.raises(OSError, match="checkpoint"):
        journal.sync()
    journal.checkpoint(journal.rotate(), iter([entry(PUT, slot=0)]), 1)
    journal.append(entry(PUT, slot=9))
    journal.sync()
    assert slots(journal) == [0, 9]
    journal.close()


def test_a_checkpoint_cut_between_frames_is_damaged(directory: Directory, tmp_path: Path) -> None:
    """Each of its frames is whole, so that only the count in its header tells."""
    journal = Journal(directory)
    journal.checkpoint(journal.rotate(), iter([entry(PUT, slot=1), entry(PUT, slot=2)]), 2)
    journal.close()
    file = tmp_path / "checkpoint-2"
    file.write_bytes(file.read_bytes()[: -FRAME_BYTES - ENTRY_BYTES])
    journal = Journal(directory)
    assert journal.contents.damaged == "checkpoint-2"
    assert slots(journal) == [1]
    journal.close()


@pytest.mark.parametrize("name", ["journal-1", "journal-2", "checkpoint-2"])
def test_a_bad_header_is_refused_and_kept(directory: Directory, tmp_path: Path, name: str) -> None:
    journal = Journal(directory)
    journal.append(entry(PUT, slot=1))
    if name != "journal-1":
        journal.checkpoint(journal.rotate(), iter([entry(PUT, slot=1)]), 1)
    journal.close()
    file = tmp_path / name
    file.write_bytes(b"x" * 10 + file.read_bytes()[10:])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(StoreError, match=f"{name} has a header .* nothing was changed") as refused:
        Journal(directory)
    assert "\n" not in str(refused.value)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_missing_checkpoint_is_refused(directory: Directory, tmp_path: Path) -> None:
    journal = Journal(directory)
    journal.append(entry(PUT, slot=1))
    journal.checkpoint(journal.rotate(), iter([entry(PUT, slot=1)]), 1)
    journal.close()
    (tmp_path / "checkpoint-2").unlink()
    with pytest.raises(StoreError, match="journal-2 needs checkpoint-2"):
        Journal(directory)


def test_a_checkpoint_without_its_journal_is_valid(directory: Directory, tmp_path: Path) -> None:
    """What the message about a bad journal advises must work."""
    journal = Journal(directory)
    journal.append(entry(PUT, slot=1))
    journal.checkpoint(journal.rotate(), iter([entry(PUT, slot=4)]), 1)
    journal.close()
    (tmp_path / "journal-2").unlink()
    journal = Journal(directory)
    assert slots(journal) == [4]
    journal.append(entry(PUT, slot=5))
    assert slots(journal) == [4, 5]
    journal.close()


def test_segments_without_a_journal_are_refused(directory: Directory, tmp_path: Path) -> None:
    (tmp_path / "segment-000001").touch()
    with pytest.raises(StoreError, match="segments, but no journal"):
        Journal(directory)


# what a restart makes of entries


def test_the_last_entry_of_a_slot_counts() -> None:
    def put(slot: int, signature: int) -> bytes:
        return entry(PUT, **{**RECORD, "slot": slot, "signature": bytes([signature]) * 32})

    index = Index(Allocator(1 << 30, 1 << 20))
    index.load(
        b"".join(
            [
                entry(SEGMENT, segment=1, slot=4, record_bytes=16384),
                entry(SEGMENT, segment=2, slot=4, record_bytes=4096),
                entry(NAMESPACE, signature=b"\x11" * 32),
                put(0, 1),
                put(1, 2),
                entry(REMOVE, segment=1, slot=0),
                put(0, 3),
                entry(QUARANTINE, segment=1, slot=1),
                put(2, 4),
                put(3, 5),
                entry(REMOVE, segment=1, slot=3),
                entry(RETIRE, segment=2),
                entry(PUT, **{**RECORD, "segment": 2}),  # of a segment that is gone
                entry(PUT, **{**RECORD, "segment": 9}),  # of one that never was
                entry(PUT, **{**RECORD, "slot": 3, "namespace": 5}),  # of a namespace that was never named
            ]
        )
    )
    assert sorted(index.locations.values()) == [1 << 32 | 0, 1 << 32 | 2]
    assert {name[:1] for name in index.locations} == {b"\x03", b"\x04"}
    (segment,) = index.allocator.segments.values()
    assert (segment.live, segment.quarantined, segment.free) == (2, 1, [3])
    assert index.allocator.check(index.locations.values()) == []
    assert index.allocator.next_number == 3


def test_a_sync_mark_decides_the_safe_records(directory: Directory) -> None:
    """In a checkpoint by its own numbers, in a journal by sequence numbers; the last one counts."""

    def put(slot: int) -> bytes:
        return entry(PUT, **{**RECORD, "slot": slot, "signature": bytes([slot]) * 32})

    journal = Journal(directory)
    journal.append(put(0))
    assert journal.read().safe == 0
    state = entry(SEGMENT, segment=1, slot=8, record_bytes=16384) + entry(NAMESPACE, signature=b"\x11" * 32)
    header = journal.rotate()
    journal.append(put(2))
    journal.checkpoint(header, iter([state + put(0) + entry(SYNCED, write_id=3) + put(1)]), 5)
    assert journal.read().safe == 3
    journal.append(put(3))
    journal.append(entry(SYNCED, write_id=journal.sequence - 1))
    journal.append(put(4))
    found = journal.read()
    assert found.safe == 6
    index = Index(Allocator(1 << 30, 1 << 20))
    index.load(found.entries, found.safe)
    (segment,) = index.allocator.segments.values()
    assert (segment.live, segment.rewrite_slots, segment.never_synced_slots) == (5, {3, 4}, False)
    pieces, count = index.state(synced=True)
    data = bytearray(b"".join(pieces))
    kinds = [Entry.unpack(data, i).kind for i in range(count)]
    assert kinds == [SEGMENT, NAMESPACE, PUT, PUT, PUT, SYNCED, PUT, PUT]
    assert Entry.unpack(data, 5).write_id == 5
    journal.close()


def test_a_sync_mark_right_after_a_checkpoint_counts(directory: Directory) -> None:
    journal = Journal(directory)
    journal.checkpoint(journal.rotate(), iter([entry(PUT, slot=0)]), 1)
    assert journal.read().safe == 0
    journal.append(entry(SYNCED, write_id=journal.sequence))
    assert journal.read().safe == 1
    journal.close()


def test_two_slots_of_one_record_leave_one() -> None:
    index = Index(Allocator(1 << 30, 1 << 20))
    index.load(STATE + entry(PUT, **{**RECORD, "slot": 1}))
    assert len(index.locations) == 1
    (segment,) = index.allocator.segments.values()
    assert (segment.live, len(segment.free)) == (1, 3)
    assert index.allocator.check(index.locations.values()) == []


def test_a_loaded_state_is_written_unchanged() -> None:
    index = Index(Allocator(1 << 30, 1 << 20))
    index.load(STATE + entry(NAMESPACE, namespace=4, signature=b"\x44" * 32))
    pieces, count = index.state(synced=False)
    assert b"".join(pieces) == STATE  # the namespace without a record is forgotten
    assert count == 3
