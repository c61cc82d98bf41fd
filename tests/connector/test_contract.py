"""The suite for authors of connectors, on the three engines that this repository has."""

from __future__ import annotations

import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import kvcache
from kvcache.connector.transformers import PrefixStore
from kvcache.engine.engine import Engine, EngineConfig
from kvcache.engine.model import load_model
from kvcache.engine.sampling import SamplingParams
from kvcache.testing import ConnectorContract, Served
from kvcache.testing.faulty_cache import FaultyCache
from tests.engine import tiny_model

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    place = tmp_path_factory.mktemp("models")
    return [tiny_model.make(place / str(seed), seed=seed) for seed in range(2)]


def patience_s(cache: kvcache.KVCache | None) -> float:
    """One that hangs is waited for until this is over; what is well may take its time."""
    return 0.2 if isinstance(cache, FaultyCache) else 30.0


class TestTheExample(ConnectorContract):
    example = runpy.run_path(str(ROOT / "examples" / "connector.py"))["Engine"]

    def serve(self, cache: kvcache.KVCache | None, *, weights: int = 0) -> Served:
        return self.example(cache, weights=weights, patience_s=patience_s(cache))  # type: ignore[no-any-return]


class TestTheReferenceEngine(ConnectorContract):
    @pytest.fixture(autouse=True)
    def _models(self, models: list[str]) -> None:
        self.models = [load_model(path) for path in models]

    def serve(self, cache: kvcache.KVCache | None, *, weights: int = 0) -> Served:
        return Reference(Engine(self.models[weights], cache, EngineConfig(pages=64, patience_s=patience_s(cache))))


class TestTransformers(ConnectorContract):
    @pytest.fixture(autouse=True)
    def _models(self, models: list[str]) -> None:
        from transformers import AutoModelForCausalLM

        self.models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in models]

    def serve(self, cache: kvcache.KVCache | None, *, weights: int = 0) -> Served:
        return Transformers(self.models[weights], cache)


class Reference:
    def __init__(self, engine: Engine) -> None:
        self.engine, self.reused_tokens = engine, 0

    def generate(self, prompt: Sequence[int], tokens: int) -> list[int]:
        [result] = self.engine.generate([list(prompt)], SamplingParams(max_tokens=tokens, ignore_eos=True))
        self.reused_tokens = result.reused_tokens
        return result.token_ids

    def close(self) -> None:
        assert self.engine.check() == []


class Transformers:
    def __init__(self, model: Any, cache: kvcache.KVCache | None) -> None:
        self.model, self.reused_tokens = model, 0
        self.store = PrefixStore(cache, model, patience_s=patience_s(cache)) if cache is not None else None

    def generate(self, prompt: Sequence[int], tokens: int) -> list[int]:
        ids = torch.tensor([list(prompt)])
        run = self.store or self.model
        out = run.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False
        )
        self.reused_tokens = self.store.reused if self.store else 0
        return [int(token) for token in out[0, len(prompt) :]]

    def close(self) -> None: ...


class Trusting(TestTheExample.example):  # type: ignore[misc]
    """Takes what was promised for what came."""

    def load(self, request: kvcache.Request, said: list[int]) -> int:
        blocks = min(request.match(said).blocks, (len(said) - 1) // 16)
        request.load(blocks, self.pages, [list(range(blocks))]).wait(self.patience_s)
        return blocks * 16


class Nameless(TestTheExample.example):  # type: ignore[misc]
    """Does not say which weights it has."""

    def __init__(self, cache: kvcache.KVCache | None, *, weights: int = 0, **more: Any) -> None:
        super().__init__(None, weights=weights, **more)
        if cache is not None:
            self.handle = cache.namespace(self.pages[0].layout, model="toy", revision="")


class Forgetful(TestTheExample.example):  # type: ignore[misc]
    """Loads nothing."""

    def load(self, request: kvcache.Request, said: list[int]) -> int:
        request.match(said)
        return 0


@pytest.mark.parametrize(
    ("engine", "caught"),
    [
        (Trusting, lambda suite, _: suite.test_no_fault_of_a_cache_changes_an_answer("damaged")),
        (Nameless, lambda suite, path: suite.test_other_weights_share_nothing(suite.open(path))),
        (Forgetful, lambda suite, path: suite.test_what_was_computed_is_not_computed_again(suite.open(path))),
        (Forgetful, lambda suite, path: suite.test_a_restart_keeps_what_was_stored(path)),
    ],
    ids=["trusting", "nameless", "forgetful", "forgetful after a restart"],
)
def test_a_wrong_connector_fails(engine: Any, caught: Any, tmp_path: Path) -> None:
    class Suite(ConnectorContract):
        def serve(self, cache: kvcache.KVCache | None, *, weights: int = 0) -> Served:
            return engine(cache, weights=weights, patience_s=patience_s(cache))  # type: ignore[no-any-return]

    with pytest.raises(AssertionError):
        caught(Suite(), tmp_path)
