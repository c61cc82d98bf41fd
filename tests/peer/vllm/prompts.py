"""Prompts of random token ids, the same for everybody who names the same seed."""

from __future__ import annotations

import random
from typing import Any


def ids(tokens: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(10, 900) for _ in range(tokens)]


def ask(*prompts: list[int], tokens: int = 8, **more: Any) -> list[dict[str, Any]]:
    return [{"ids": prompt, "tokens": tokens, **more} for prompt in prompts]


def preemption_prompts() -> list[dict[str, Any]]:
    """18 prompts over three prefixes, of which a small pool holds few at a time."""
    rng = random.Random(7)
    bases = [[rng.randrange(10, 900) for _ in range(200)] for _ in range(3)]
    prompts = [bases[i % 3] + [rng.randrange(10, 900) for _ in range(rng.randrange(20, 200))] for i in range(18)]
    return ask(*prompts, tokens=64)


SMALL = {"max_model_len": 1024, "max_num_seqs": 8, "max_num_batched_tokens": 256, "num_gpu_blocks_override": 40}
"""A pool of 40 blocks for 8 requests at a time: preemption happens."""
