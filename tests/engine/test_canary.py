"""The canary in the reference engine: what was loaded is what the engine computes, and where it is not it is said."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kvcache
from kvcache.cache.cache import Cache
from kvcache.cache.canary import relative_difference
from kvcache.engine.engine import Engine, EngineConfig, Recompute
from kvcache.engine.model import load_model
from kvcache.engine.sampling import SamplingParams
from tests.engine import tiny_model

PROMPT = [(7 * i) % 200 for i in range(330)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_model(tiny_model.make(tmp_path_factory.mktemp("model"), "smollm2"), dtype="fp32")


def opened(tmp_path: Path, sample_rate: int, codec: str = "raw") -> Cache:
    cache = kvcache.open(
        host={"capacity_bytes": 16 << 20},
        nvme={"path": tmp_path / "nvme", "capacity_bytes": 64 << 20, "min_free_bytes": 0, "codec": codec},
        canary={"sample_rate": sample_rate},
        plan={"enabled": False},  # so small a model may compute sooner than it loads
        control={"enabled": False},
    )
    assert isinstance(cache, Cache)
    return cache


def ask(model: Any, cache: Cache) -> int:
    """Tokens that came from the cache, to an engine that has nothing itself."""
    [result] = Engine(model, cache, EngineConfig(pages=64)).generate([PROMPT], SamplingParams(max_tokens=2))
    assert cache.flush(30)
    return sum(result.reused.values())


def results(cache: Cache) -> dict[str, int]:
    """After what waits was compared."""
    cache.close()
    return dict(cache.stats()["counters"].get("canary_blocks", {}))


def test_loaded_blocks_equal_recomputed_ones(model: Any, tmp_path: Path) -> None:
    cache = opened(tmp_path, sample_rate=4)
    assert ask(model, cache) == 0
    assert ask(model, cache) == 320
    found = results(cache)
    assert set(found) <= {"equal", "close", "skipped"}
    assert sum(found.values()) == 20 // 4
    assert found.get("equal", 0) + found.get("close", 0) >= 1
    assert cache.stats()["canary"]["worst"] < 1e-3


def test_a_codecs_declared_loss_is_no_difference(model: Any, tmp_path: Path) -> None:
    for _ in range(2):
        cache = opened(tmp_path, sample_rate=20, codec="fp8")
        came = ask(model, cache)
        found = results(cache)
    assert came == 320
    assert found == {"close": 1}
    assert cache.stats()["canary"]["worst"] > 1e-3


def test_the_canary_is_off_by_default(model: Any, tmp_path: Path) -> None:
    cache = opened(tmp_path, sample_rate=0)
    ask(model, cache)
    assert ask(model, cache) == 320
    assert results(cache) == {}


def test_other_weights_under_the_same_revision_are_found(
    model: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No checksum can tell: what was stored is what comes back, and it is wrong."""
    cache = opened(tmp_path, sample_rate=20)
    ask(model, cache)
    weights = model._weights.layers[0].qkv
    tensor = next(value for value in vars(weights).values() if isinstance(value, torch.Tensor))
    kept = tensor.clone()
    try:
        tensor.mul_(1.5)
        with caplog.at_level(logging.ERROR, "kvcache.canary"):
            assert ask(model, cache) == 320
            assert results(cache) == {"different": 1}
    finally:
        tensor.copy_(kept)
    assert "kvcache bypass on" in caplog.text
    assert cache.stats()["canary"]["worst"] > 0.1


def test_a_failed_recomputation_fails_no_request(model: Any, tmp_path: Path) -> None:
    cache = opened(tmp_path, sample_rate=20)
    ask(model, cache)
    engine = Engine(model, cache, EngineConfig(pages=64))

    def fail(tokens: Any) -> list[bytes]:
        raise RuntimeError("out of memory")

    cache.namespace(model.layout, model="model", revision=model.revision, facts=model.facts).canary(fail)
    [result] = engine.generate([PROMPT], SamplingParams(max_tokens=2))
    assert sum(result.reused.values()) == 320
    assert results(cache) == {"failed": 1}


def test_step_size_does_not_change_a_recomputed_block(model: Any) -> None:
    tokens = PROMPT[:64]
    (whole,), (parts,) = Recompute(model, 2048)(tokens), Recompute(model, 10)(tokens)
    assert len(whole) == model.layout.block_bytes(model.layout.groups[0].whole)
    assert relative_difference(whole, parts, "fp32") < 1e-4


def test_relative_difference_of_equal_and_other_bytes() -> None:
    one = np.array([1.0, -2.0, 4.0], np.float32)
    assert relative_difference(one.tobytes(), one.tobytes(), "fp32") == 0
    assert relative_difference((one + np.float32(1)).tobytes(), one.tobytes(), "fp32") == 0.25
    assert relative_difference(one.tobytes(), one.tobytes()[:8], "fp32") == 1
    assert relative_difference(b"\1", b"\2", "fp8_e4m3") == 1
    nan = np.array([np.nan], np.float32).tobytes()
    assert relative_difference(nan, one[:1].tobytes(), "fp32") == 1
