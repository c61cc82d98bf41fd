from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kvcache.block.revision import PIECE_BYTES, model_revision, weight_bytes
from kvcache.errors import ModelError
from tests.vectors import page

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SMALL = 64 * PIECE_BYTES


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
        text += page.u64(len(name)) + name + page.u64(len(data)) + page.u64(len(head)) + head
        if len(data) <= 4 << 20:
            text += data
        else:
            for i in range(64):
                at = i * (len(data) - 65_536) // 63
                text += data[at : at + 65_536]
    return "sha256:" + page.sha(text).hex()


def test_a_snapshot_of_the_hub_has_its_commit(tmp_path):
    snapshot = tmp_path / "models--a--b" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    weights = safetensors(snapshot / "model.safetensors", 100)
    assert model_revision(snapshot) == model_revision(weights) == COMMIT
    link = tmp_path / "link"
    link.symlink_to(snapshot)
    assert model_revision(link) == COMMIT


def test_weights_of_a_snapshot_are_links_to_blobs(tmp_path):
    blob = safetensors(tmp_path / "blob", 100)
    snapshot = tmp_path / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to(blob)
    assert model_revision(snapshot / "model.safetensors") == COMMIT


@pytest.mark.parametrize("name", ["main", COMMIT[:39], COMMIT.upper(), COMMIT + "0"])
def test_other_folders_are_no_commits(tmp_path, name):
    folder = tmp_path / "snapshots" / name
    folder.mkdir(parents=True)
    weights = safetensors(folder / "model.safetensors", 100)
    assert model_revision(folder) == expected(weights)


@pytest.mark.parametrize("size", [0, 1, 100, PIECE_BYTES, SMALL - 500, SMALL, SMALL + 1, 3 * SMALL + 12345])
def test_the_digest_is_that_of_the_page(tmp_path, size):
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


def test_whatever_is_sampled_makes_another_revision(tmp_path):
    path = safetensors(tmp_path / "model.safetensors", 4 * SMALL)
    size = path.stat().st_size
    seen = {model_revision(path)}
    for at in (size - 1, *(i * (size - PIECE_BYTES) // 63 for i in range(1, 64, 9))):
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


def test_nothing_there(tmp_path):
    with pytest.raises(ModelError, match="no weights"):
        model_revision(tmp_path)
    with pytest.raises(ModelError, match="not there"):
        model_revision(tmp_path / "nothing")


def test_bytes_of_all_weights(tmp_path):
    files = [safetensors(tmp_path / f"{i}.safetensors", 100 * i) for i in range(3)]
    assert weight_bytes(tmp_path) == sum(f.stat().st_size for f in files)


def test_what_is_read_of_140_gb_is_bounded(tmp_path, monkeypatch):
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
    assert 30 * 64 * PIECE_BYTES <= read <= 30 * (64 * PIECE_BYTES + 1000)
