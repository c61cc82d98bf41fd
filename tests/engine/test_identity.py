"""The reference engine's namespace is that of the files that it loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvcache.engine.checkpoint import Weights
from kvcache.engine.engine import Engine, EngineConfig
from kvcache.engine.model import load_model
from kvcache.errors import ModelError
from kvcache.testing.naive_cache import NaiveCache
from tests.engine import tiny_model


def test_other_files_of_one_model_name_change_the_id(tmp_path: Path) -> None:
    first = tiny_model.make(tmp_path / "a" / "model", seed=1)
    seen = {named(first), named(tiny_model.make(tmp_path / "b" / "model", seed=2))}
    config = Path(first) / "config.json"
    config.write_text(config.read_text().replace('"bos_token_id"', '"of_a_later_version": 1, "bos_token_id"'))
    assert len({*seen, named(first)}) == 3


def test_weights_changed_during_the_load_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, read = tiny_model.make(tmp_path / "model", seed=1), Weights.read

    def replaced(*given: Any, **named: Any) -> Any:
        weights = read(*given, **named)
        tiny_model.make(place, seed=2)
        return weights

    monkeypatch.setattr(Weights, "read", replaced)
    with pytest.raises(ModelError, match="changed while they were read"):
        load_model(place)


def named(path: str) -> bytes:
    handle = Engine(load_model(path), NaiveCache(), EngineConfig(pages=8))._prefix._handle
    assert handle is not None
    return handle.id
