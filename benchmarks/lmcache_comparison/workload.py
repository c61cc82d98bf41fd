"""The work that both sides do: the same prompts, and pages of the same shape as an engine would have them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

BLOCK_TOKENS = 16  # of an engine's page, on both sides
Shape = tuple[int, int, int]  # layers, heads, dim

LLAMA_3_8B: Shape = (32, 8, 128)
SMALL: Shape = (4, 4, 64)  # for what is looked at, not timed
LEAST: Shape = (1, 1, 8)  # where keys matter and bytes do not

VOCABULARY = 128_000
KEPT_ON_DISK = 16  # prompts: what a side is given room for there


def token_bytes(shape: Shape) -> int:
    layers, heads, dim = shape
    return layers * 2 * heads * dim * 2  # keys and values in bfloat16


def prompt(seed: int, tokens: int) -> torch.Tensor:
    """Token ids, int64. No two seeds have a prefix in common."""
    return torch.randint(VOCABULARY, (tokens,), generator=torch.Generator().manual_seed(seed))


class Pages:
    """An engine's keys and values: a tensor a layer, (K and V, page, token, head, dim), in bfloat16.

    `source` holds what is stored, `target` receives what is retrieved. A prompt lies in pages scattered by its seed.
    """

    def __init__(self, shape: Shape, tokens: int) -> None:
        layers, heads, dim = shape
        self.count = tokens // BLOCK_TOKENS
        size = (2, self.count, BLOCK_TOKENS, heads, dim)
        numbers = torch.Generator().manual_seed(0)
        self.source = [torch.empty(size, dtype=torch.bfloat16) for _ in range(layers)]
        self.target = [torch.zeros_like(layer) for layer in self.source]
        for layer in self.source:
            layer.view(torch.int16).random_(generator=numbers)

    def order(self, seed: int) -> torch.Tensor:
        """The pages of a prompt's blocks in `source`; those in `target` are the ones of `seed + 1`."""
        return torch.randperm(self.count, generator=torch.Generator().manual_seed(seed))

    def slots(self, seed: int) -> torch.Tensor:
        """The same by token, as LMCache wants it."""
        return (self.order(seed)[:, None] * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS)).flatten()

    def forget(self) -> None:
        """So that what was not written is not taken for right."""
        for layer in self.target:
            layer.zero_()

    def wrong(self, seed: int, hit: Any) -> int:
        """Of the tokens that are said to be hits (one boolean a token), those whose bytes are not the stored ones."""
        differs = torch.zeros(self.count, BLOCK_TOKENS, dtype=torch.bool)
        for source, target in zip(self.source, self.target, strict=True):
            stored, got = source[:, self.order(seed)], target[:, self.order(seed + 1)]
            differs |= (stored.view(torch.int16) != got.view(torch.int16)).any(-1).any(-1).any(0)
        return int((differs.flatten() & torch.as_tensor(hit)).sum())


def resident_bytes(*, without: Sequence[tuple[int, int]] = ()) -> int:
    """Private memory of this process that is resident, `without` that of the mappings which have a part of these
    addresses, from the first to the end."""
    total, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if not name.endswith(":"):
            begin, stop = (int(number, 16) for number in name.split("-"))
            counts = not any(begin < end and first < stop for first, end in without)
        elif counts and name == "Anonymous:":
            total += int(rest.split()[0]) * 1024
    return total
