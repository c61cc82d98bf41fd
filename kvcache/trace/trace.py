"""A trace: requests in order of time, each a chain of blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kvcache.errors import ConfigError

Ids = NDArray[np.int32]


@dataclass(frozen=True)
class Trace:
    """Blocks are numbered densely from 0. A block belongs to one chain: the block before it is always the same."""

    name: str
    block_tokens: int
    starts: NDArray[np.int64]
    """Where each request's blocks begin in `blocks`, and where the last one's end."""
    blocks: Ids
    times_s: NDArray[np.float64]
    input_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]

    @classmethod
    def of(
        cls,
        name: str,
        block_tokens: int,
        chains: Sequence[NDArray[np.int64]],
        times_s: Sequence[float],
        input_tokens: Sequence[int],
        output_tokens: Sequence[int],
    ) -> Trace:
        """Puts the requests in order of time (equal times stay in order) and numbers their blocks anew."""
        order = np.argsort(np.asarray(times_s, np.float64), kind="stable")
        sorted_chains = [chains[i] for i in order]
        starts = np.zeros(len(chains) + 1, np.int64)
        np.cumsum([len(chain) for chain in sorted_chains], out=starts[1:])
        flat = np.concatenate([np.zeros(0, np.int64), *sorted_chains])
        if len(flat) and flat.min() >= 0 and flat.max() < 4 * len(flat) + (1 << 20):  # small numbers: no need to sort
            seen = np.zeros(int(flat.max()) + 1, bool)
            seen[flat] = True
            dense = (np.cumsum(seen) - 1)[flat]
        else:
            dense = np.unique(flat, return_inverse=True)[1].reshape(-1)
        return cls(
            name,
            block_tokens,
            starts,
            dense.astype(np.int32),
            np.asarray(times_s, np.float64)[order],
            np.asarray(input_tokens, np.int64)[order],
            np.asarray(output_tokens, np.int64)[order],
        )

    def __len__(self) -> int:
        return len(self.times_s)

    def __iter__(self) -> Iterator[Ids]:
        """Each request's chain."""
        starts = self.starts.tolist()
        for first, end in pairwise(starts):
            yield self.blocks[first:end]

    @property
    def accesses(self) -> int:
        return len(self.blocks)

    @property
    def unique(self) -> int:
        """How many different blocks there are: their numbers are all below it."""
        return int(self.blocks.max()) + 1 if len(self.blocks) else 0

    def part(self, first: int, end: int) -> Trace:
        """Requests `first` to `end` (excluded) as a trace of its own."""
        rows = slice(first, end)
        chains = [
            self.blocks[a:b].astype(np.int64) for a, b in zip(self.starts[rows], self.starts[1:][rows], strict=False)
        ]
        return Trace.of(
            self.name,
            self.block_tokens,
            chains,
            self.times_s[rows].tolist(),
            self.input_tokens[rows].tolist(),
            self.output_tokens[rows].tolist(),
        )

    def check(self) -> None:
        """ConfigError where two chains disagree about what comes before a block: then no prefix can be told."""
        before = np.full(self.blocks.shape, -1, np.int64)
        before[1:] = self.blocks[:-1]
        before[self.starts[:-1][self.starts[:-1] < len(before)]] = -1
        parent = np.full(self.unique, -2, np.int64)
        parent[self.blocks] = before
        wrong = np.flatnonzero(parent[self.blocks] != before)
        if len(wrong):
            request = int(np.searchsorted(self.starts, wrong[0], "right")) - 1
            raise ConfigError(
                f"trace {self.name!r}, request {request}: a block that came after another one before; expected the "
                f"names of blocks to be chained, so that each names its whole prefix"
            )
