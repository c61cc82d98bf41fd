"""One of two tensor ranks over the linker: python -m tests.peer.sglang.rank_worker RANK DIRECTORY."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from tests.peer.sglang.cache_stack import LinkerStack
from tests.peer.sglang.device_pools import PAGE
from tests.peer.sglang.in_process import init_in_process

PROMPT = list(range(2, 2 + 20 * PAGE))


def main(rank: int, place: Path) -> None:
    init_in_process(rank, 2, place / "meeting")
    stack = LinkerStack(place)
    computed = stack.compute(PROMPT, seed=rank)  # each has heads of its own
    for turn in range(3):
        stack.tree.reset()
        stack.pools.allocator.clear()
        found, request = stack.found([*PROMPT, 7], f"r{turn}")
        assert found == len(PROMPT), found
        if turn == 1 and rank == 1:
            stack.linker._leases.clear()
        loaded = stack.load(request)
        if turn == 1:
            assert loaded == [], "one rank has lost what it promised: both compute, and neither waits for the other"
            continue
        assert loaded is not None
        for layer, was in zip(loaded, computed, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(layer, was, strict=True))
    torch.distributed.barrier()
    stack.linker.close()
    print("done")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
