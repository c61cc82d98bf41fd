"""Which weights these are: the revision of a model, for `Namespace.revision`.

A snapshot of the hub names its commit. Other weights are sampled rather than read whole: for each file its name, its
size, the safetensors header, and 64 pieces of 64 KiB at places that the size fixes. That tells any training step or
conversion apart within two seconds for 140 GB; it does not see an edit of a few weights by hand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from struct import pack, unpack
from typing import BinaryIO

from kvcache.errors import ModelError

PREFIX = b"kvcache weights 1\n"
PIECES = 64
PIECE_BYTES = 64 << 10
MAX_HEADER_BYTES = 100_000_000  # the safetensors format's own limit

_SUFFIXES = (".safetensors", ".gguf", ".bin")
_COMMIT = re.compile(r"[0-9a-f]{40}")


def model_revision(path: str | Path) -> str:
    """The hub's commit where the path lies in a snapshot folder, else "sha256:" and the digest of the weights.

    `path` is a model's directory or one file of weights. ModelError where there are none, or a damaged file.
    """
    place = Path(path)
    files = weight_files(place)
    for whole in (place.absolute(), place.resolve()):
        for folder, name in pairwise(whole.parts):
            if folder == "snapshots" and _COMMIT.fullmatch(name):
                return name
    digest = sha256(PREFIX)
    for file in files:
        for part in _sample(file):
            digest.update(part)
    return f"sha256:{digest.hexdigest()}"


def weight_bytes(path: str | Path) -> int:
    """Bytes of the weight files, as `kvcache size` sets them beside the cache."""
    return sum(file.stat().st_size for file in weight_files(Path(path)))


def weight_files(path: Path) -> list[Path]:
    """The file, or those of a directory in order of name: safetensors where there are some, else GGUF, else .bin."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ModelError(f"{path}: not there; expected a model's directory or a file of weights")
    for suffix in _SUFFIXES:
        files = [file for file in path.iterdir() if file.suffix == suffix and file.is_file()]
        if files:
            return sorted(files, key=lambda file: file.name.encode(errors="surrogateescape"))
    raise ModelError(f"{path}: no weights; expected files that end in {', '.join(_SUFFIXES)}")


def _sample(file: Path) -> Iterator[bytes]:
    name = file.name.encode(errors="surrogateescape")
    try:
        with file.open("rb") as stream:
            size = stream.seek(0, 2)
            header = _safetensors_header(stream, size, file) if file.suffix == ".safetensors" else b""
            yield pack("<Q", len(name)) + name + pack("<QQ", size, len(header)) + header
            for offset in _places(size):
                stream.seek(offset)
                yield stream.read(PIECE_BYTES)
    except OSError as error:
        raise ModelError(f"{file}: {error.strerror}; the weights must be readable to tell their revision") from None


def _places(size: int) -> list[int]:
    """Where the pieces begin: evenly from the first byte to the last; everything where the pieces would cover it."""
    if size <= PIECES * PIECE_BYTES:
        return list(range(0, size, PIECE_BYTES))
    return [i * (size - PIECE_BYTES) // (PIECES - 1) for i in range(PIECES)]


def _safetensors_header(stream: BinaryIO, size: int, file: Path) -> bytes:
    """The JSON header; ModelError where it is none, or where the file ends before the tensors that it names."""
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
