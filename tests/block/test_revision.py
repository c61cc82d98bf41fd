from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from kvcache.block.revision import SAMPLE_BYTES, adapter_revision, loader_kinds, model_revision, weight_bytes
from kvcache.errors import ModelError
from tests.vectors import spec_reference

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SMALL = 64 * SAMPLE_BYTES


def safetensors(path, size, header=None):
    """A file with one tensor of so many bytes, sparse."""
    header = json.dumps(header or {"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
    return path


def poke(path, at, what=b"\x01"):
    with path.open("r+b") as file:
        file.seek(at)
        file.write(what)


def expected(*files):
    """From docs/spec/key.md alone."""
    text = b"kvcache weights 1\n"
    for path in files:
        data, name = path.read_bytes(), path.name.encode()
        head = data[8 : 8 + int.from_bytes(data[:8], "little")] if path.suffix == ".safetensors" else b""
        text += (
            spec_reference.u64(len(name)) + name + spec_reference.u64(len(data)) + spec_reference.u64(len(head)) + head
        )
        if len(data) <= 4 << 20:
            text += data
        else:
            for i in range(64):
                at = i * (len(data) - 65_536) // 63
                text += data[at : at + 65_536]
    return "sha256:" + spec_reference.sha(text).hex()


def test_a_hub_snapshot_is_named_by_commit_and_digest(tmp_path):
    snapshot = tmp_path / "models--a--b" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    weights = safetensors(snapshot / "model.safetensors", 100)
    assert model_revision(snapshot) == model_revision(weights) == f"{COMMIT}+{expected(weights)}"
    link = tmp_path / "link"
    link.symlink_to(snapshot)
    assert model_revision(link) == model_revision(snapshot)
    other = tmp_path / "snapshots" / COMMIT[::-1]
    shutil.copytree(snapshot, other)
    assert model_revision(other) == f"{COMMIT[::-1]}+{expected(weights)}"


def test_two_checkpoints_of_one_snapshot_differ(tmp_path):
    snapshot = tmp_path / "snapshots" / COMMIT
    seen = set()
    for i, place in enumerate((snapshot, snapshot / "one", snapshot / "two")):
        place.mkdir(parents=True, exist_ok=True)
        poke(safetensors(place / "model.safetensors", 100), 150, bytes([i + 1]))
        (place / "q4.gguf").write_bytes(b"GGUF" + bytes([i]) * 100)
        (place / "q8.gguf").write_bytes(b"GGUF" + bytes([i + 10]) * 100)
        seen |= {model_revision(place), model_revision(place / "q4.gguf"), model_revision(place / "q8.gguf")}
    assert len(seen) == 9


@pytest.fixture
def settled(monkeypatch):
    """As if every file had changed long ago, so that its digest is remembered."""
    monkeypatch.setattr("kvcache.block.revision.time_ns", lambda: 1 << 62)


@pytest.fixture
def reads(monkeypatch):
    """The paths of the files that were opened."""
    opened, plain = [], Path.open
    monkeypatch.setattr(Path, "open", lambda self, *given, **named: opened.append(self) or plain(self, *given, **named))
    return opened


def written_anew(path, what):
    """Other bytes in place, with size and time kept, and a change of at least one tick."""
    before = path.stat()
    while path.stat().st_ctime_ns == before.st_ctime_ns:
        poke(path, before.st_size - 1, what)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_the_digest_of_unchanged_files_is_cached(tmp_path, settled, reads):
    safetensors(tmp_path / "model.safetensors", 100)
    reads.clear()
    first = model_revision(tmp_path)
    assert model_revision(tmp_path) == first
    assert len(reads) == 1
    model_revision(tmp_path, read_every_byte=True)
    assert len(reads) == 2


def test_a_file_written_in_place_is_read_again(tmp_path, settled):
    path = safetensors(tmp_path / "model.safetensors", 100)
    first = model_revision(path)
    written_anew(path, b"\7")
    assert model_revision(path) != first
    written_anew(path, b"\0")
    assert model_revision(path) == first


def test_a_file_moved_over_another_is_read_again(tmp_path, settled):
    path = safetensors(tmp_path / "model.safetensors", 100)
    first, times = model_revision(path), path.stat().st_mtime_ns
    other = safetensors(tmp_path / "other", 100)
    poke(other, 150)
    os.utime(other, ns=(times, times))
    other.replace(path)
    assert model_revision(path) != first


def test_a_recently_changed_file_is_not_cached(tmp_path, reads):
    path = safetensors(tmp_path / "model.safetensors", 100)
    reads.clear()
    assert model_revision(path) == model_revision(path)
    assert len(reads) == 2


def test_a_file_changed_during_the_read_is_refused(tmp_path, monkeypatch):
    path, plain = tmp_path / "m.gguf", Path.open
    path.write_bytes(b"GGUF")

    def growing(self, *given):
        with plain(self, "ab") as more:
            more.write(b"more")
        return plain(self, *given)

    monkeypatch.setattr(Path, "open", growing)
    with pytest.raises(ModelError, match="changed while they were read"):
        model_revision(path)


def test_a_full_digest_reads_every_byte(tmp_path):
    path = safetensors(tmp_path / "model.safetensors", 4 * SMALL)
    sampled, whole = model_revision(path), model_revision(path, read_every_byte=True)
    assert sampled != whole
    poke(path, 2 * SAMPLE_BYTES + SAMPLE_BYTES // 2)  # between the first two pieces
    assert model_revision(path) == sampled
    assert model_revision(path, read_every_byte=True) != whole


def test_copies_in_other_folders_have_one_revision(tmp_path):
    poke(safetensors(tmp_path / "model.safetensors", 2 * SMALL), SMALL)
    shutil.copytree(tmp_path, tmp_path / "far" / "away")
    for whole in (False, True):
        assert model_revision(tmp_path, read_every_byte=whole) == model_revision(
            tmp_path / "far" / "away", read_every_byte=whole
        )


def test_only_files_named_by_the_loader_are_read(tmp_path):
    for name in ("a.safetensors", "b.bin", "c.pt", "d.gguf"):
        if name.endswith("safetensors"):
            safetensors(tmp_path / name, 10)
        else:
            (tmp_path / name).write_bytes(name.encode())
    for load_format, file in (("auto", "a.safetensors"), ("pt", "b.bin"), ("gguf", "d.gguf")):
        assert model_revision(tmp_path, kinds=loader_kinds(load_format)) == expected(tmp_path / file)
    (tmp_path / "a.safetensors").unlink()
    assert model_revision(tmp_path, kinds=loader_kinds("auto")) == expected(tmp_path / "b.bin")
    with pytest.raises(ModelError, match=r"tensorizer.*give `revision`"):
        loader_kinds("tensorizer")


def test_an_adapter_revision_covers_weights_and_settings(tmp_path):
    with pytest.raises(ModelError, match="expected a folder"):
        adapter_revision(tmp_path)
    weights = safetensors(tmp_path / "adapter_model.safetensors", 100)
    config = tmp_path / "adapter_config.json"
    seen = {adapter_revision(tmp_path)}
    config.write_text('{"r": 8}')
    seen.add(adapter_revision(tmp_path))
    config.write_text('{"r": 9}')
    seen.add(adapter_revision(tmp_path))
    assert adapter_revision(weights) in seen
    (tmp_path / "adapter_model.bin").write_bytes(b"x")
    seen.add(adapter_revision(tmp_path))
    (tmp_path / "README.md").write_text("no weights")
    seen.add(adapter_revision(tmp_path))
    assert len(seen) == 4


def test_weights_of_a_snapshot_are_links_to_blobs(tmp_path):
    blob = safetensors(tmp_path / "blob", 100)
    snapshot = tmp_path / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    link = snapshot / "model.safetensors"
    link.symlink_to(blob)
    assert model_revision(link) == f"{COMMIT}+{expected(link)}"
    before = model_revision(snapshot)
    poke(blob, 150)
    assert model_revision(snapshot) != before


@pytest.mark.parametrize("name", ["main", COMMIT[:39], COMMIT.upper(), COMMIT + "0"])
def test_a_folder_outside_the_hub_has_no_commit(tmp_path, name):
    folder = tmp_path / "snapshots" / name
    folder.mkdir(parents=True)
    weights = safetensors(folder / "model.safetensors", 100)
    assert model_revision(folder) == expected(weights)


@pytest.mark.parametrize("size", [0, 1, 100, SAMPLE_BYTES, SMALL - 500, SMALL, SMALL + 1, 3 * SMALL + 12345])
def test_the_digest_equals_the_specification(tmp_path, size):
    second = safetensors(tmp_path / "b.safetensors", size)
    first = safetensors(tmp_path / "a.safetensors", 10)
    if size:
        poke(second, second.stat().st_size - 1 - size // 2)
    (tmp_path / "ignored.bin").write_bytes(b"x")
    (tmp_path / "config.json").write_bytes(b"x")
    assert model_revision(tmp_path) == model_revision(str(tmp_path)) == expected(first, second)


def test_gguf_and_bin_have_no_header(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"weights" * 100)
    assert model_revision(tmp_path) == expected(tmp_path / "model.bin")
    (tmp_path / "model.gguf").write_bytes(b"GGUF" * 100)
    assert model_revision(tmp_path) == model_revision(tmp_path / "model.gguf") == expected(tmp_path / "model.gguf")


def test_a_change_in_a_sample_changes_the_revision(tmp_path):
    path = safetensors(tmp_path / "model.safetensors", 4 * SMALL)
    size = path.stat().st_size
    seen = {model_revision(path)}
    for at in (size - 1, *(i * (size - SAMPLE_BYTES) // 63 for i in range(1, 64, 9))):
        poke(path, at, b"\x07")
        seen.add(model_revision(path))
    path.rename(tmp_path / "other.safetensors")
    seen.add(model_revision(tmp_path))
    safetensors(tmp_path / "other.safetensors", 4 * SMALL - 1)
    seen.add(model_revision(tmp_path))
    assert len(seen) == 8 + 3


def test_only_a_sample_is_read(tmp_path, monkeypatch):
    """What makes 140 GB take seconds: at most 4 MiB and the header of each file."""
    path = safetensors(tmp_path / "model.safetensors", 10 << 30)
    read = []
    fdopen = type(path).open

    def counting(self, *args, **kwargs):
        stream = fdopen(self, *args, **kwargs)
        return Counting(stream, read)

    monkeypatch.setattr(type(path), "open", counting)
    model_revision(path)
    assert sum(read) <= SMALL + 1000


class Counting:
    def __init__(self, stream, read):
        self.stream, self.counts = stream, read

    def read(self, size):
        data = self.stream.read(size)
        self.counts.append(len(data))
        return data

    def seek(self, *args):
        return self.stream.seek(*args)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.stream.close()


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 30, 80, 81, -1])
def test_a_truncated_file_is_refused(tmp_path, length):
    path = safetensors(tmp_path / "model.safetensors", 100)
    os.truncate(path, length if length >= 0 else path.stat().st_size - 1)
    with pytest.raises(ModelError, match=r"model\.safetensors: .*fetch the file again"):
        model_revision(tmp_path)


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b"12",
        b"{]",
        b"\xff\xff",
        b'{"w": 1}',
        b'{"w": {}}',
        b'{"w": {"data_offsets": 7}}',
        b'{"w": {"data_offsets": [0]}}',
        b'{"w": {"data_offsets": [0, "x"]}}',
        b'{"w": {"data_offsets": [0, null]}}',
        b'{"w": {"data_offsets": [0, 5]}}',
        b'{"__metadata__": {}}x',
        b"[" * 100_000,
        b"1",
    ],
)
def test_a_header_that_does_not_parse_is_refused(tmp_path, header):
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 4)
    with pytest.raises(ModelError, match="fetch the file again"):
        model_revision(tmp_path)


def test_a_header_longer_than_the_format_allows_is_not_read(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes((200_000_000).to_bytes(8, "little"))
    os.truncate(path, 300_000_000)
    with pytest.raises(ModelError, match="header of 200000000 bytes"):
        model_revision(path)


def test_metadata_and_no_tensors_are_sound(tmp_path):
    path = safetensors(tmp_path / "model.safetensors", 0, {"__metadata__": {"format": "pt"}})
    assert model_revision(path) == expected(path)


def test_a_directory_without_weights_is_refused(tmp_path):
    with pytest.raises(ModelError, match="no weights"):
        model_revision(tmp_path)
    with pytest.raises(ModelError, match="not there"):
        model_revision(tmp_path / "nothing")


def test_weight_bytes_sums_all_files(tmp_path):
    files = [safetensors(tmp_path / f"{i}.safetensors", 100 * i) for i in range(3)]
    assert weight_bytes(tmp_path) == sum(f.stat().st_size for f in files)


def test_a_140_gb_model_is_read_in_bounded_samples(tmp_path, monkeypatch):
    read = 0
    open_file = Path.open

    def counted(self, mode="r", **named):
        stream = open_file(self, mode, **named)
        plain = stream.read

        class Stream:
            def __enter__(self):
                return self

            def __exit__(self, *error):
                stream.close()

            def seek(self, *to):
                return stream.seek(*to)

            def read(self, size):
                nonlocal read
                data = plain(size)
                read += len(data)
                return data

        return Stream()

    for number in range(30):
        safetensors(tmp_path / f"model-{number}.safetensors", 140_000_000_000 // 30)
    monkeypatch.setattr(Path, "open", counted)
    assert model_revision(tmp_path).startswith("sha256:")
    assert 30 * 64 * SAMPLE_BYTES <= read <= 30 * (64 * SAMPLE_BYTES + 1000)
