"""The oracle: greedy answers with the cache are those without it, token for token, in float32.

For any mix of prompts, batch sizes, chunk sizes, pool sizes, restarts and tiers: on a tiny random model by Hypothesis,
on SmolLM2 with real text. "Without" is an engine that has no cache and runs one prompt at a time.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvcache
from kvcache.cache.api import KVCache
from kvcache.engine.engine import Engine, EngineConfig
from kvcache.engine.model import Model, load_model
from kvcache.engine.sampling import SamplingParams
from kvcache.engine.sequence import RequestOutput
from kvcache.engine.tokenizer import Tokenizer
from tests.engine import tiny_model

BLOCK = 4
ANSWER = SamplingParams(max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@lru_cache
def load_tiny(family: str) -> Model:
    with tempfile.TemporaryDirectory() as directory:
        return load_model(tiny_model.make(directory, family), block_tokens=BLOCK)


@lru_cache(maxsize=4096)
def without(family: str, prompt: tuple[int, ...]) -> list[int]:
    engine = Engine(load_tiny(family), None, EngineConfig(pages=64))
    [result] = engine.generate([prompt], ANSWER)
    return result.token_ids


def tiers(path: Path, *, host_blocks: int, nvme_blocks: int) -> KVCache:
    """Room for about so many of the tiny model's blocks, each 8 KiB with its header."""
    return kvcache.open(
        host={"capacity_bytes": host_blocks * 8192, "slab_bytes": 4 * 8192},
        nvme={
            "path": str(path),
            "capacity_bytes": nvme_blocks * 8192 + (1 << 20),
            "segment_bytes": 8 * 8192,
            "durability": "none",
            "enabled": nvme_blocks > 0,
        },
    )


def prompts() -> st.SearchStrategy[tuple[int, ...]]:
    """Of three families that share their heads: some equal, some a prefix of another, some of their own."""
    return st.builds(
        lambda family, length, own: tuple((7 * family + 13 * i * i) % 256 for i in range(length)) + tuple(own),
        st.integers(0, 2),
        st.integers(1, 60),
        st.lists(st.integers(0, 255), max_size=5),
    )


@dataclass(frozen=True)
class Round:
    """Prompts that run together, on an engine of some shape, over what the rounds before left."""

    prompts: list[tuple[int, ...]]
    follow_up: bool  # then each goes on from its answer
    pages: int
    budget: int
    sequences: int
    before: str  # "": the same engine shape goes on; "clear" its pool; "restart" the process


rounds = st.builds(
    Round,
    prompts=st.lists(prompts(), min_size=1, max_size=5),
    follow_up=st.booleans(),
    pages=st.integers(20, 60),
    budget=st.sampled_from([1, 3, 4, 16, 17, 64, 2048]),
    sequences=st.integers(1, 5),
    before=st.sampled_from(["", "clear", "restart"]),
)


def play(engine: Engine, family: str, asked: Sequence[tuple[int, ...]]) -> list[RequestOutput]:
    results = engine.generate(asked, ANSWER)
    for prompt, result in zip(asked, results, strict=True):
        assert result.token_ids == without(family, prompt)
        assert result.reused_tokens < len(prompt)
    assert engine.check() == []
    return results


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral-window"])
@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=settings().max_examples // 5)
@given(
    played=st.lists(rounds, min_size=1, max_size=4),
    host_blocks=st.sampled_from([16, 64]),
    nvme_blocks=st.sampled_from([0, 16, 128]),
)
def test_answers_with_the_cache_equal_those_without(
    family: str, played: list[Round], host_blocks: int, nvme_blocks: int
) -> None:
    model = load_tiny(family)
    with tempfile.TemporaryDirectory() as directory:
        cache = tiers(Path(directory), host_blocks=host_blocks, nvme_blocks=nvme_blocks)
        try:
            for r in played:
                if r.before == "restart":
                    cache.close()  # with its writes under way
                    cache = tiers(Path(directory), host_blocks=host_blocks, nvme_blocks=nvme_blocks)
                engine = Engine(
                    model, cache, EngineConfig(pages=r.pages, max_batch_tokens=r.budget, max_sequences=r.sequences)
                )
                results = play(engine, family, r.prompts)
                if r.before == "clear":
                    engine.pool.clear()
                    play(engine, family, r.prompts)
                if r.follow_up:
                    play(engine, family, [(*p, *x.token_ids, 5) for p, x in zip(r.prompts, results, strict=True)])
                engine.close()
                assert engine.pool.held == 0
            assert cache.flush(30)
            assert cache.check() == []
        finally:
            cache.close()


@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=settings().max_examples // 5)
@given(
    asked=st.lists(prompts(), min_size=2, max_size=6),
    aborted=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4)), min_size=1, max_size=4),
    pages=st.integers(20, 40),
    budget=st.sampled_from([4, 17, 64]),
)
def test_aborted_requests_hold_nothing(
    asked: list[tuple[int, ...]], aborted: list[tuple[int, int]], pages: int, budget: int
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        cache = tiers(Path(directory), host_blocks=16, nvme_blocks=128)
        try:
            Engine(load_tiny("llama"), cache, EngineConfig(pages=pages)).generate(asked[:2], ANSWER)
            engine = Engine(
                load_tiny("llama"), cache, EngineConfig(pages=pages, max_batch_tokens=budget, max_sequences=3)
            )
            running = [engine.add(prompt, ANSWER) for prompt in asked]
            gone = set()
            for which, steps in aborted:
                for _ in range(steps):
                    engine.step()
                engine.abort(running[which % len(running)])
                gone.add(which % len(running))
                assert engine.check() == []
            while engine.unfinished:
                engine.step()
            for i, (prompt, sequence) in enumerate(zip(asked, running, strict=True)):
                if i not in gone:
                    assert sequence.answer == without("llama", prompt)
            assert cache.flush(30)
            engine.pool.poll()
            assert (engine.pool.held, engine.pool.busy, engine.pool.available) == (0, False, pages)
            assert all(tier["held_bytes"] == 0 for tier in cache.stats()["tiers"].values())
            assert engine.check() == []
            assert cache.check() == []
        finally:
            cache.close()


TEXT = Path(__file__).parents[2] / "docs" / "architecture.md"
QUESTIONS = [
    "\n\nIn one sentence, this text says that",
    "\n\nThe most important word above is",
    "\n\nQ: What is it?\nA:",
]


@pytest.fixture(scope="module")
def smollm2() -> Model:
    return load_model("smollm2")


def test_smollm2_answers_the_same_from_every_tier(smollm2: Model, tmp_path: Path) -> None:
    tokenizer = Tokenizer(smollm2.directory)
    shared = tokenizer.encode(TEXT.read_text(encoding="utf-8"))[:160]
    asked = [shared + tokenizer.encode(question) for question in QUESTIONS]
    wish = SamplingParams(max_tokens=8)
    plain = Engine(smollm2, None, EngineConfig(pages=64))
    expected = [plain.generate([prompt], wish)[0].token_ids for prompt in asked]
    known = len(shared) // 16 * 16

    def open_() -> KVCache:
        return kvcache.open(
            host={"capacity_bytes": "64MiB"},
            nvme={"path": str(tmp_path / "nvme"), "capacity_bytes": "256MiB"},
            plan={"enabled": False},  # all of it from each tier, whether or not that is sooner
        )

    def ask(engine: Engine, tier: str | None) -> None:
        results = engine.generate(asked, wish)
        assert [r.token_ids for r in results] == expected
        if tier is not None:
            assert results[0].reused[tier] >= known  # of the others some find what this one brought nearer
            assert all(r.reused_tokens >= known for r in results)
        assert engine.check() == []

    cache = open_()
    engine = Engine(smollm2, cache, EngineConfig(pages=64, max_batch_tokens=50))
    ask(engine, None)
    ask(engine, "hbm")
    assert cache.flush(30)
    engine.pool.clear()
    ask(engine, "host")
    assert cache.flush(30)
    assert cache.check() == []
    cache.close()
    cache = open_()
    ask(Engine(smollm2, cache, EngineConfig(pages=64, max_batch_tokens=2048)), "nvme")
    assert cache.check() == []
    cache.close()
