"""The revision of a model: a digest of its weights, for `Namespace.revision`.

The digest covers the files that an engine loads, not their location. It reads a sample: for each file its name, its
size, the safetensors header, and 64 pieces of 64 KiB at offsets that the size fixes. A sample distinguishes any
training step or conversion, within two seconds for 140 GB. It misses an edit of a few weights between the pieces;
`identity.read_every_byte` reads each whole file. In a snapshot of the hub the commit precedes the digest, since it
covers every byte.

A digest is computed once for the same files, identified by device, inode, size and `ctime_ns`. No program can set
`ctime` back, unlike the time of the last write. None of these is part of the revision.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from struct import pack, unpack
from time import time_ns
from typing import BinaryIO

from kvcache.errors import ModelError

PREFIX = b"kvcache weights 1\n"
PREFIX_WHOLE = b"kvcache weights 1 whole\n"
SAMPLES = 64
SAMPLE_BYTES = 64 << 10
MAX_HEADER_BYTES = 100_000_000  # the safetensors format's own limit

WEIGHT_SUFFIXES = (".safetensors", ".gguf", ".bin")
"""Suffixes of weight files. A directory's weights are the files with the first of these suffixes that it has."""

_LOADED = (".safetensors", ".bin", ".pt", ".gguf")
_PICKLED = (".bin", ".pt", ".pth")
_LOADERS = {
    **dict.fromkeys(("auto", "hf", "bitsandbytes", "dummy"), _LOADED),
    **dict.fromkeys(("safetensors", "fastsafetensors", "instanttensor", "mistral"), (".safetensors",)),
    **dict.fromkeys(("sharded_state", "layered", "runai_streamer", "runai_streamer_sharded"), (".safetensors",)),
    **dict.fromkeys(("pt", "npcache"), _PICKLED),
    "gguf": (".gguf",),
}
_ADAPTER = (*WEIGHT_SUFFIXES, ".pt", ".pth")
_ADAPTER_CONFIG = "adapter_config.json"
_COMMIT = re.compile(r"[0-9a-f]{40}")

# File systems count `ctime` in ticks of some milliseconds; remote ones use their own clock. A file that changed less
# than this before it was read may change again within the same tick.
_SETTLED_NS = 10_000_000_000
_MAX_KNOWN = 4096
_known: OrderedDict[tuple[object, ...], str] = OrderedDict()


def model_revision(path: str | Path, *, kinds: Sequence[str] = WEIGHT_SUFFIXES, read_every_byte: bool = False) -> str:
    """Return the digest of the weights, after the hub's commit where the path is in a snapshot folder.

    Args:
        path: a model's directory, or one file of weights.
        kinds: the suffixes that the engine looks for, the preferred one first.
        read_every_byte: read all of each file instead of a sample.

    Raises:
        ModelError: there are no weights, or a file is damaged or changed while it was read.
    """
    folder = Path(path)
    return _commit(folder) + _digest(weight_files(folder, kinds), read_every_byte)


def adapter_revision(path: str | Path, *, read_every_byte: bool = False) -> str:
    """Return the digest of an adapter's folder or file: all its weight files, and `adapter_config.json`.

    Raises:
        ModelError: as for `model_revision`.
    """
    folder = Path(path)
    files = [folder] if folder.is_file() else _files_with_suffix(folder, _ADAPTER)
    if not files:
        raise ModelError(f"{folder}: no weights; expected a folder with files that end in {_named(_ADAPTER)}")
    config = (folder if folder.is_dir() else folder.parent) / _ADAPTER_CONFIG
    return _commit(folder) + _digest([*files, *([config] if config.is_file() else [])], read_every_byte)


def loader_kinds(load_format: str) -> tuple[str, ...]:
    """Return the suffixes that an engine's `load_format` reads; ModelError for one that may read others."""
    if load_format not in _LOADERS:
        raise ModelError(
            f"load_format {load_format!r} may read weights from elsewhere; "
            "give `revision`, a name that changes with them"
        )
    return _LOADERS[load_format]


def weight_bytes(path: str | Path) -> int:
    """Return the bytes of the weight files, which `kvcache size` shows beside the cache."""
    return sum(file.stat().st_size for file in weight_files(Path(path)))


def weight_files(path: Path, kinds: Sequence[str] = WEIGHT_SUFFIXES) -> list[Path]:
    """Return the file itself, or a directory's files of the first of these kinds that it has, in order of name."""
    if path.is_file():
        return [path]
    for kind in kinds:
        files = _files_with_suffix(path, (kind,))
        if files:
            return files
    raise ModelError(f"{path}: no weights; expected files that end in {_named(kinds)}")


def _named(kinds: Sequence[str]) -> str:
    return ", ".join(kinds)


def _files_with_suffix(folder: Path, kinds: Sequence[str]) -> list[Path]:
    if not folder.is_dir():
        raise ModelError(f"{folder}: not there; expected a model's directory or a file of weights")
    files = [file for file in folder.iterdir() if file.suffix in kinds and file.is_file()]
    return sorted(files, key=lambda file: file.name.encode(errors="surrogateescape"))


def _commit(folder: Path) -> str:
    for whole in (folder.absolute(), folder.resolve()):
        for parent, name in pairwise(whole.parts):
            if parent == "snapshots" and _COMMIT.fullmatch(name):
                return f"{name}+"
    return ""


def _digest(files: Sequence[Path], read_every_byte: bool) -> str:
    begun_ns, before = time_ns(), _stats(files)
    key = (read_every_byte, before)
    if key in _known:
        return _known[key]
    digest = sha256(PREFIX_WHOLE if read_every_byte else PREFIX)
    for file in files:
        for part in _parts(file, read_every_byte):
            digest.update(part)
    if _stats(files) != before:
        raise ModelError(f"{files[0].parent}: the weights changed while they were read; wait until they are complete")
    named = f"{'sha256-whole' if read_every_byte else 'sha256'}:{digest.hexdigest()}"
    if all(changed_ns < begun_ns - _SETTLED_NS for *_, changed_ns in before):
        _known[key] = named
        while len(_known) > _MAX_KNOWN:
            _known.popitem(last=False)
    return named


def _stats(files: Sequence[Path]) -> tuple[tuple[str, int, int, int, int], ...]:
    try:
        return tuple((f.name, s.st_dev, s.st_ino, s.st_size, s.st_ctime_ns) for f in files for s in [f.stat()])
    except OSError as error:
        raise ModelError(f"{error.filename}: {error.strerror}; the weights must stay while they are read") from None


def _parts(file: Path, read_every_byte: bool) -> Iterator[bytes]:
    name = file.name.encode(errors="surrogateescape")
    try:
        with file.open("rb") as stream:
            size = stream.seek(0, 2)
            header = _safetensors_header(stream, size, file) if file.suffix == ".safetensors" else b""
            yield pack("<Q", len(name)) + name + pack("<QQ", size, len(header)) + header
            for offset in range(0, size, SAMPLE_BYTES) if read_every_byte else _sample_offsets(size):
                stream.seek(offset)
                yield stream.read(SAMPLE_BYTES)
    except OSError as error:
        raise ModelError(f"{file}: {error.strerror}; the weights must be readable to tell their revision") from None


def _sample_offsets(size: int) -> list[int]:
    """Return the offsets of the pieces: evenly spaced; the whole file where the pieces would cover it."""
    if size <= SAMPLES * SAMPLE_BYTES:
        return list(range(0, size, SAMPLE_BYTES))
    return [i * (size - SAMPLE_BYTES) // (SAMPLES - 1) for i in range(SAMPLES)]


def _safetensors_header(stream: BinaryIO, size: int, file: Path) -> bytes:
    """Return the JSON header.

    Raises:
        ModelError: it does not parse, or the file does not end with the tensors that it names.
    """
    stream.seek(0)
    start = stream.read(8)
    length = unpack("<Q", start)[0] if len(start) == 8 else 0
    if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
        raise ModelError(f"{file}: a safetensors header of {length} bytes in {size}; fetch the file again")
    header = stream.read(length)
    try:
        tensors = json.loads(header)
        end = max((tensor["data_offsets"][1] for name, tensor in tensors.items() if name != "__metadata__"), default=0)
        whole = end == size - 8 - length
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        raise ModelError(f"{file}: the safetensors header does not parse; fetch the file again") from None
    if not whole:
        raise ModelError(f"{file}: {size - 8 - length} bytes of tensors, the header says {end}; fetch the file again")
    return header
