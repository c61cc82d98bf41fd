"""The tokenizer of a model, from wherever its `tokenizer.json` is: a directory, the file itself, a model that a package
ships, or what `huggingface_hub` has in its cache. Nothing is fetched."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from kvcache.errors import ModelError

if TYPE_CHECKING:
    from kvcache.engine.tokenizer import Tokenizer


def tokenizer_of(model: str) -> Tokenizer:
    """ModelError where there is none."""
    from kvcache.engine.tokenizer import Tokenizer

    for directory in _directories(model):
        if (directory / "tokenizer.json").is_file():
            return Tokenizer(str(directory))
    from kvcache.engine.checkpoint import resolve_model

    return Tokenizer(resolve_model(model))


def known_tokenizer(model: str) -> Tokenizer | None:
    """The same, or None where there is none, or nothing that could read it."""
    try:
        return tokenizer_of(model)
    except (ModelError, ModuleNotFoundError):
        return None


def _directories(model: str, environ: Mapping[str, str] = os.environ) -> Iterator[Path]:
    given = Path(model).expanduser()
    yield given.parent if given.name == "tokenizer.json" else given
    if model.count("/") == 1:
        home = Path(environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
        hub = Path(environ.get("HF_HUB_CACHE") or home / "hub")
        yield from sorted((hub / f"models--{model.replace('/', '--')}" / "snapshots").glob("*"))
