"""The contract of a connector, for any engine: the same answers as without a cache.

    class TestMine(ConnectorContract):
        def serve(self, cache, *, weights=0):
            return MyEngine(model_of_seed(weights), cache)

Use a model with large enough random weights: one whose answers depend only on the last token would pass with a wrong
cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import pytest

import kvcache
from kvcache.testing.faulty_cache import FAULTS, Fault, FaultyCache

MiB = 1 << 20
PATIENCE_S = 30.0


class Served(Protocol):
    """An engine with a model, as the suite drives it: one prompt at a time, greedily."""

    def generate(self, prompt: Sequence[int], tokens: int) -> list[int]:
        """Return the next `tokens` tokens. Their stores have begun when this returns."""

    @property
    def reused_tokens(self) -> int:
        """Tokens of the last prompt that were loaded from the cache and not computed."""

    def close(self) -> None:
        """Release the cache; its owner closes it afterwards."""


class ConnectorContract:
    """Implement `serve`; override the numbers where the engine has others."""

    block_tokens = 16
    vocabulary = 250
    new_tokens = 8

    def serve(self, cache: kvcache.KVCache | None, *, weights: int = 0) -> Served:
        """Return an engine with the model of these weights, which waits a second at most for the cache; None: no
        cache."""
        raise NotImplementedError("give your engine: see kvcache.testing.ConnectorContract")

    def prompt(self, blocks: float, seed: int = 1) -> list[int]:
        """Return `blocks` blocks of tokens. Prompts of different seeds differ from their first token on."""
        count = int(blocks * self.block_tokens)
        return [(seed * 7919 + i * (seed + 2) + i * i) % self.vocabulary for i in range(count)]

    def open(self, path: Path, **host: int) -> kvcache.KVCache:
        """Open a cache without a plan. A plan would compute a tiny model's blocks where that is faster."""
        return kvcache.open(
            host={"capacity_bytes": 64 * MiB, **host},
            nvme={"path": path, "capacity_bytes": 256 * MiB, "min_free_bytes": 0},
            control={"enabled": False},
            plan={"enabled": False},
        )

    @pytest.fixture
    def cache(self, tmp_path: Path) -> Iterator[kvcache.KVCache]:
        with self.open(tmp_path / "nvme") as cache:
            yield cache
            assert cache.flush(PATIENCE_S)
            assert cache.check() == []

    def answers(self, prompts: Sequence[Sequence[int]], *, weights: int = 0) -> list[list[int]]:
        """Return the answers without a cache."""
        engine = self.serve(None, weights=weights)
        try:
            return [engine.generate(prompt, self.new_tokens) for prompt in prompts]
        finally:
            engine.close()

    def test_the_same_answers_at_every_length(self, cache: kvcache.KVCache) -> None:
        b = self.block_tokens
        whole = self.prompt(5)
        prompts = [whole[:n] for n in (1, b - 1, b, b + 1, 3 * b, 4 * b + b // 2, 5 * b, 2 * b + 1)]
        expected = self.answers(prompts)
        engine = self.serve(cache)
        for prompt, answer in zip(prompts, expected, strict=True):
            assert engine.generate(prompt, self.new_tokens) == answer
            assert cache.flush(PATIENCE_S)
            assert engine.generate(prompt, self.new_tokens) == answer, "the second time, with what the first stored"
            assert engine.reused_tokens < len(prompt), "the last token's logits are in no cache"
        engine.close()

    def test_what_was_computed_is_not_computed_again(self, cache: kvcache.KVCache) -> None:
        first, then = self.prompt(6.5), self.prompt(6.5)[: 4 * self.block_tokens] + self.prompt(2.5, seed=5)
        expected = self.answers([then])
        engine = self.serve(cache)
        engine.generate(first, self.new_tokens)
        assert cache.flush(PATIENCE_S)
        engine.close()
        other = self.serve(cache)  # without blocks in its own pool
        assert [other.generate(then, self.new_tokens)] == expected
        assert other.reused_tokens == 4 * self.block_tokens
        other.close()

    def test_a_conversation_goes_on_where_it_was(self, cache: kvcache.KVCache) -> None:
        said = self.prompt(2.25)
        turns = []
        plain = self.serve(None)
        for turn in range(3):
            answer = plain.generate(said, self.new_tokens)
            turns.append((list(said), answer))
            said = said + answer + self.prompt(1.5, seed=turn + 3)
        plain.close()
        least = 0
        for prompt, answer in turns:
            engine = self.serve(cache)
            assert engine.generate(prompt, self.new_tokens) == answer
            assert engine.reused_tokens >= least
            least = len(prompt) // self.block_tokens * self.block_tokens
            assert cache.flush(PATIENCE_S)
            engine.close()

    def test_a_restart_keeps_what_was_stored(self, tmp_path: Path) -> None:
        prompt = self.prompt(6.5)
        expected = self.answers([prompt])
        for reused in (0, 6 * self.block_tokens):
            with self.open(tmp_path / "nvme") as cache:
                engine = self.serve(cache)
                assert [engine.generate(prompt, self.new_tokens)] == expected
                assert engine.reused_tokens == reused
                engine.close()

    def test_other_weights_share_nothing(self, cache: kvcache.KVCache) -> None:
        prompt = self.prompt(4.5)
        expected = self.answers([prompt], weights=1)
        engine = self.serve(cache, weights=0)
        engine.generate(prompt, self.new_tokens)
        assert cache.flush(PATIENCE_S)
        engine.close()
        other = self.serve(cache, weights=1)
        assert [other.generate(prompt, self.new_tokens)] == expected
        assert other.reused_tokens == 0
        other.close()

    def test_damage_on_the_drive_is_a_miss(self, tmp_path: Path) -> None:
        prompt = self.prompt(6.5)
        expected = self.answers([prompt])
        with self.open(tmp_path / "nvme") as cache:
            engine = self.serve(cache)
            engine.generate(prompt, self.new_tokens)
            engine.close()
        segments = [file for file in (tmp_path / "nvme").rglob("*") if file.is_file() and file.stat().st_size > MiB]
        assert segments, "nothing was written that could be damaged"
        for file in segments:
            damaged = bytes(0xFF ^ byte for byte in file.read_bytes()[: 2 * MiB])
            with file.open("r+b") as out:
                out.write(damaged)
        with self.open(tmp_path / "nvme") as cache:
            engine = self.serve(cache)
            assert [engine.generate(prompt, self.new_tokens)] == expected
            assert engine.reused_tokens == 0
            engine.close()

    @pytest.mark.parametrize("fault", FAULTS)
    def test_no_fault_of_a_cache_changes_an_answer(self, fault: Fault) -> None:
        prompts = [self.prompt(4.5), self.prompt(4.5, seed=9), self.prompt(4.5)]
        expected = self.answers(prompts)
        faulty = FaultyCache()
        seeding = self.serve(faulty)
        assert seeding.generate(prompts[0], self.new_tokens) == expected[0]
        seeding.close()
        faulty.fault = fault
        engine = self.serve(faulty)
        for prompt, answer in zip(prompts, expected, strict=True):
            assert engine.generate(prompt, self.new_tokens) == answer
        engine.close()

    def test_a_cache_closed_under_an_engine_is_a_miss(self, tmp_path: Path) -> None:
        prompt = self.prompt(3.5)
        expected = self.answers([prompt])
        cache = self.open(tmp_path / "nvme")
        engine = self.serve(cache)
        assert [engine.generate(prompt, self.new_tokens)] == expected
        cache.close()
        assert [engine.generate(prompt, self.new_tokens)] == expected
        engine.close()

    def test_a_cache_smaller_than_a_prompt(self, tmp_path: Path) -> None:
        prompts = [self.prompt(6.5, seed=seed) for seed in (1, 2, 1, 2)]
        expected = self.answers(prompts)
        with self.open(tmp_path / "nvme", capacity_bytes=64 << 10, slab_bytes=16 << 10) as cache:
            engine = self.serve(cache)
            assert [engine.generate(prompt, self.new_tokens) for prompt in prompts] == expected
            engine.close()
