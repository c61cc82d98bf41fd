"""Copies between an engine's pages and payloads, beside the fastest plain copy of the same bytes.

Pages are those of Llama 3 8B: 32 layers of [K and V, page, 16 tokens, 8 heads, 128] in bfloat16, 512 pages. 16 blocks,
in pages here and there, are 32 MiB in fragments of 32 KiB; where payloads have heads before tokens, of 256 bytes.
(Not named copy.py: that would take the place of Python's own `copy` for every script beside it.)

    gather/2threads        pages to payloads; floor: a non-temporal copy of 32 MiB by as many threads
    scatter/2threads       payloads to pages
    gather/1thread         the same with one thread
    gather/2threads/hnd    payloads with heads before tokens
    memcpy/2threads        that floor itself; peer: the C library's memcpy
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from harness import Row, options, publish

from kvcache import native
from kvcache.block.layout import KVLayout
from kvcache.transfer.cpu import CpuCopier
from kvcache.transfer.pages import GroupPages

LAYERS, HEADS, DIM, BLOCK_TOKENS = 32, 8, 128, 16
PAGES, BLOCKS = 512, 16
HND = ("layer", "kv", "head", "token", "dim")
ROUNDS, QUICK_ROUNDS = 200, 40


def layout(order: tuple[str, ...] = ()) -> KVLayout:
    return KVLayout.mha(layers=LAYERS, kv_heads=HEADS, head_dim=DIM, block_tokens=BLOCK_TOKENS, order=order)


class Memory:
    """Pages of an engine, payloads, and two plain pieces as large, all of it touched."""

    def __init__(self) -> None:
        shape = (2, PAGES, BLOCK_TOKENS, HEADS, DIM)
        self._tensors = [np.full(shape, layer, np.uint16) for layer in range(LAYERS)]
        random = np.random.default_rng(0)
        self.ids = [int(i) for i in random.permutation(PAGES)[:BLOCKS]]
        size = layout().block_bytes()
        self.bytes = BLOCKS * size
        self._payloads = np.ones(self.bytes + 4096, np.uint8)
        start = -self._payloads.ctypes.data % 4096  # as slots are
        flat = memoryview(self._payloads)
        self.payloads = [flat[start + i * size : start + (i + 1) * size] for i in range(BLOCKS)]
        self.source = np.ones(self.bytes, np.uint8)
        self.target = np.ones(self.bytes, np.uint8)

    def pages(self, order: tuple[str, ...] = ()) -> GroupPages:
        return GroupPages.from_tensors(layout(order), self._tensors, axes=("kv", "page", "token", "head", "dim"))

    def plain_copy(self, threads: int, *, plain: bool) -> None:
        """`source` to `target`: one page a thread, each in one piece."""
        pieces = max(threads, 1)
        size = self.bytes // pieces
        base = np.array([self.source.ctypes.data], np.uint64)
        flat = memoryview(self.target)
        native.core.gather(
            base,
            (1, 1, 1, 1, size),
            1,
            size,
            (0, 0, size, size, 1),
            (size, size, size, size, 1),
            np.arange(pieces),
            [flat[i * size : (i + 1) * size] for i in range(pieces)],
            threads,
            plain=plain,
        )


def alternated(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The shortest time of each, taken in turns: what disturbs one disturbs the others as well."""
    times = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            begun = time.perf_counter()
            call()
            times[name] = min(times[name], time.perf_counter() - begun)
    return times


def measure(memory: Memory, threads: int, rounds: int) -> list[Row]:
    copier, pages, hnd = CpuCopier(threads=threads), memory.pages(), memory.pages(HND)
    times = alternated(
        {
            "memcpy": lambda: memory.plain_copy(threads, plain=True),
            "stream": lambda: memory.plain_copy(threads, plain=False),
            "gather": lambda: copier.gather(pages, memory.ids, memory.payloads).wait(),
            "scatter": lambda: copier.scatter(pages, memory.ids, memory.payloads).wait(),
            "gather/hnd": lambda: copier.gather(hnd, memory.ids, memory.payloads).wait(),
            "scatter/hnd": lambda: copier.scatter(hnd, memory.ids, memory.payloads).wait(),
        },
        rounds,
    )
    rate = {name: memory.bytes / 1e9 / seconds for name, seconds in times.items()}
    suffix = f"{threads}thread" + ("s" if threads > 1 else "")
    rows = [Row(f"memcpy/{suffix}", rate["stream"], "GB/s", peer=rate["memcpy"])]
    for name in ("gather", "scatter", "gather/hnd", "scatter/hnd"):
        way, _, order = name.partition("/")
        rows.append(Row(f"{way}/{suffix}" + ("/hnd" if order else ""), rate[name], "GB/s", floor=rate["stream"]))
    return rows


def main() -> None:
    arguments = options(__doc__).parse_args()
    if not native.available():
        raise SystemExit("the compiled core is not there: its twin copies with numpy, which is not measured here")
    memory = Memory()
    rounds = QUICK_ROUNDS if arguments.quick else ROUNDS
    publish("copies", [row for threads in (1, 2) for row in measure(memory, threads, rounds)], arguments.json)


if __name__ == "__main__":
    main()
