"""Copies between an engine's pages on a GPU and host memory, beside a plain large copy in the same run.

Blocks of 2 MiB: 32 layers, 8 KV heads of 128, bf16, 16 tokens. Pages in three layouts: `whole` (a block in one piece),
`nhd` (32 KiB pieces, a tensor a layer), `hnd` (256-byte pieces on the way to a canonical payload).

    gpu/bus/gather, gpu/bus/scatter     a plain copy of pinned memory, from and to the device: the floor of what follows
    gpu/gather/2MiB/nhd                 as the copier chooses; /direct, /staged, /mapped: by each way (not /hnd/direct)
    gpu/scatter/2MiB/nhd
    gpu/gather/fp8/nhd                  bytes over the bus, half of those of the pages
    gpu/call/gather                     how long the caller is kept for 256 MiB
    gpu/hbm/plain                       a plain copy within the device: the floor of what follows
    gpu/hbm/gather/nhd, gpu/hbm/pages   the kernel alone; pages to pages
    gpu/dma/gather/65536                DMA in copies of so many bytes; gpu/kernel/gather: by the kernel instead
    gpu/crossover/gather                from where on DMA keeps up
    gpu/mapped/gather/32                the kernel over the bus with so many blocks of threads

With `--lmcache PYTHON`, an interpreter where LMCache's CUDA kernels load, its copy of the same bytes stands beside ours
in the rows of `nhd`.

Without a GPU it says so and measures nothing.
"""

from __future__ import annotations

import json
import mmap
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Literal

import numpy as np
from harness import Row, options, publish

from kvcache.block.layout import KVLayout
from kvcache.errors import ConfigError
from kvcache.transfer.cuda.copier import BUS_THREAD_BLOCKS, DEVICE_BLOCKS_PER_SM, CopyPath, CudaCopier
from kvcache.transfer.cuda.crossover import NEVER, SIZES, TransferRates
from kvcache.transfer.cuda.device import CupyDevice, Device
from kvcache.transfer.cuda.kernels import Direction, Launch, launches
from kvcache.transfer.cuda.quantise import Format, QuantisedPages
from kvcache.transfer.pages import GroupPages
from kvcache.transfer.walk import copy_plan, page_copy_plan

Kind = Literal["whole", "nhd", "hnd"]
KINDS: tuple[Kind, ...] = ("whole", "nhd", "hnd")
WAYS: dict[Kind, tuple[CopyPath, ...]] = {
    "whole": ("direct", "staged", "mapped"),
    "nhd": ("direct", "staged", "mapped"),
    "hnd": ("staged", "mapped"),  # by DMA it would be a million copies of 256 bytes
}
DIRECTIONS: tuple[Direction, ...] = ("gather", "scatter")
FORMATS: tuple[Format, ...] = ("fp8", "int8")
LAYOUT = KVLayout.mha(layers=32, kv_heads=8, head_dim=128)
PAGES, BLOCKS = 512, 128  # of 2 MiB: 1 GiB of pages, 256 MiB a copy
MOST_S = 120.0  # what is not begun until then is left out
ITEM_BYTES = 2


class Bench:
    """A pool of random bytes on the device, pinned memory of the host, and a copier between them."""

    def __init__(self, device: Device, layout: KVLayout, pages: int, blocks: int, runs: int) -> None:
        self._device, self._layout, self._pages, self._blocks, self._runs = device, layout, pages, blocks, runs
        self._copier = CudaCopier(device)
        self._floors: dict[str, float] = {}
        self._stream, self._random = device.stream(), np.random.default_rng(0)
        self._size = layout.block_bytes()
        self._total = blocks * self._size
        self._host = memoryview(mmap.mmap(-1, self._total))
        self._copier.pinned.add(self._host)
        here = np.frombuffer(self._host, np.uint8)
        here[:] = self._random.integers(0, 256, self._total, dtype=np.uint8)  # zeros may copy faster than real data
        here.view(np.uint16)[:] &= 0xBFFF  # as bf16: no infinity and no NaN, which are not quantised
        self._here = int(here.ctypes.data)
        self._pool = device.memory(pages * self._size, self._stream)
        self._aside = device.memory(self._total, self._stream)
        for first in range(0, pages, blocks):
            self._plain(self._pool.pointer + first * self._size, self._here)
        device.record(self._stream).synchronize()

    def parts(self, theirs: Mapping[str, float]) -> Iterator[tuple[str, Callable[[], Iterator[Row]]]]:
        """What can be measured by itself. `theirs`: GB/s of the peer by direction, where it was measured."""
        yield "plain copies", self._plain_copies
        for direction in DIRECTIONS:
            for kind in KINDS:
                peer = theirs.get(direction) if kind == "nhd" else None
                yield f"{direction} {kind}", partial(self._over_the_bus, direction, kind, peer)
        yield "calls", self._calls
        yield "within the device", self._within
        for direction in DIRECTIONS:
            yield f"{direction} by size", partial(self._by_size, direction)

    def _plain_copies(self) -> Iterator[Row]:
        ends = {"gather": (self._here, self._pool.pointer), "scatter": (self._pool.pointer, self._here)}
        for name, (target, source) in {**ends, "hbm": (self._aside.pointer, self._pool.pointer)}.items():
            rate = self._floors[name] = self._rate(lambda target=target, source=source: self._plain(target, source))
            yield Row("gpu/hbm/plain" if name == "hbm" else f"gpu/bus/{name}", rate, "GB/s")

    def _over_the_bus(self, direction: Direction, kind: Kind, peer: float | None) -> Iterator[Row]:
        pages, floor = self._group(kind), self._floors.get(direction)
        for way in (None, *WAYS[kind]):
            self._copier.way = way
            value = self._copied(direction, pages, None)
            yield Row(
                "/".join(["gpu", direction, "2MiB", kind, *([way] if way else [])]),
                value,
                "GB/s",
                floor,
                None if way else peer,
            )
        self._copier.way = None
        for form in FORMATS if kind != "whole" else ():
            yield Row(f"gpu/{direction}/{form}/{kind}", self._copied(direction, pages, form), "GB/s", floor)

    def _copied(self, direction: Direction, pages: GroupPages, form: Format | None) -> float:
        """GB/s of payload, from the call to the end of the copy."""
        size = QuantisedPages(form, pages).payload_bytes if form else self._size
        buffers = [self._host[i * size : (i + 1) * size] for i in range(self._blocks)]
        if direction == "scatter":  # what is restored must have been quantised, and pages must stay numbers
            self._copier.gather(pages, self._ids(), buffers, quantised=form).wait()
        call = self._copier.gather if direction == "gather" else self._copier.scatter

        def once() -> float:
            ids = self._ids()
            begun = time.perf_counter()
            call(pages, ids, buffers, quantised=form).wait()
            return time.perf_counter() - begun

        once()
        return self._blocks * size / median(once() for _ in range(self._runs)) / 1e9

    def _calls(self) -> Iterator[Row]:
        pages, times = self._group("nhd"), []
        buffers = [self._host[i * self._size : (i + 1) * self._size] for i in range(self._blocks)]
        for _ in range(self._runs):
            ids, begun = self._ids(), time.perf_counter()
            copy = self._copier.gather(pages, ids, buffers)
            times.append(time.perf_counter() - begun)
            copy.wait()
        yield Row("gpu/call/gather", median(times) * 1e6, "us")

    def _within(self) -> Iterator[Row]:
        """Kernels alone, to and from memory of the device: payload read and written once, as in the plain copy."""
        floor = self._floors.get("hbm")
        most = DEVICE_BLOCKS_PER_SM * self._device.multiprocessors
        targets = self._aside.pointer + self._size * np.arange(self._blocks, dtype=np.int64)
        for kind in KINDS:
            pages = self._group(kind)
            for direction in DIRECTIONS:
                these = list(launches(copy_plan(pages), direction, self._ids(), targets, most))
                yield Row(
                    f"gpu/hbm/{direction}/{kind}", self._rate(lambda these=these: self._launch(these)), "GB/s", floor
                )
        pages, ids = self._group("nhd"), self._ids(2 * self._blocks)
        moved = np.array(ids[self._blocks :], np.int64) * pages.page_stride
        these = list(launches(page_copy_plan(pages), "gather", ids[: self._blocks], moved, most))
        yield Row("gpu/hbm/pages", self._rate(lambda: self._launch(these)), "GB/s", floor)

    def _by_size(self, direction: Direction) -> Iterator[Row]:
        total, floor = min(self._total, 64 << 20), self._floors.get(direction)
        for size in (size for size in SIZES if size <= total):
            rate = TransferRates(self._device, self._stream, BUS_THREAD_BLOCKS, total).dma(direction, size)
            yield Row(f"gpu/dma/{direction}/{size}", rate / 1e9, "GB/s", floor)
        for threads in (8, 16, BUS_THREAD_BLOCKS, 64, 128):
            rate = TransferRates(self._device, self._stream, threads, total).kernel(direction)
            yield Row(f"gpu/mapped/{direction}/{threads}", rate / 1e9, "GB/s", floor)
        found = getattr(self._copier.crossover, direction)
        if found != NEVER:
            yield Row(f"gpu/crossover/{direction}", found / 1024, "KiB")

    def _group(self, kind: Kind) -> GroupPages:
        group, tokens = self._layout.groups[0], self._layout.block_tokens
        piece = tokens * group.kv_heads * group.head_dim * ITEM_BYTES
        row = group.head_dim * ITEM_BYTES
        step = piece if kind == "whole" else self._pages * piece  # from K to V; a layer is two of them
        bases = self._pool.pointer + step * np.arange(2 * group.layers).reshape(-1, 2)
        return GroupPages(
            layout=self._layout,
            group=0,
            shard=group.whole,
            bases=bases.astype(np.uint64),
            pages=self._pages,
            page_stride=self._size if kind == "whole" else piece,
            token_stride=row if kind == "hnd" else row * group.kv_heads,
            head_stride=row * tokens if kind == "hnd" else row,
            device=self._device.name,
            owner=self._pool,
        )

    def _ids(self, count: int | None = None) -> list[int]:
        return [int(page) for page in self._random.permutation(self._pages)[: count or self._blocks]]

    def _plain(self, target: int, source: int) -> None:
        ends = [np.array([number], np.uint64) for number in (target, source, self._total)]
        self._device.copy(ends[0], ends[1], ends[2], self._stream, pinned=False)  # by the plain call

    def _launch(self, these: list[Launch]) -> None:
        for launch in these:
            self._device.launch(launch, self._stream)

    def _rate(self, work: Callable[[], None]) -> float:
        """GB/s of `_total` bytes, by the device's own clock."""
        self._device.seconds(self._stream, work)
        return self._total / median(self._device.seconds(self._stream, work) for _ in range(self._runs)) / 1e9


def measured(bench: Bench, theirs: Mapping[str, float]) -> tuple[list[Row], list[str]]:
    """The rows, and what there is none of: a part that fails costs no other its figures."""
    rows: list[Row] = []
    lost, end = [], time.monotonic() + MOST_S
    for name, part in bench.parts(theirs):
        if time.monotonic() > end:
            lost.append(f"{name}: not measured within {MOST_S:.0f} s")
            continue
        try:
            for row in part():
                rows.append(row)  # noqa: PERF402  those before a failure are kept
        except Exception as error:  # noqa: BLE001  whatever it is, the others are to be measured
            lost.append(f"{name}: failed, {type(error).__name__}: {error}")
    return rows, lost


def of_lmcache(python: str) -> dict[str, float]:
    """GB/s of LMCache's copies by direction, measured by that interpreter while nothing else uses the device."""
    worker = Path(__file__).parent / "lmcache_comparison" / "lmcache_gpu_copy.py"
    answer = subprocess.run([python, worker], stdout=subprocess.PIPE, check=True, timeout=120).stdout
    return dict(json.loads(answer.splitlines()[-1]))


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--lmcache", metavar="PYTHON", help="an interpreter where LMCache's CUDA kernels load")
    given = parser.parse_args()
    try:
        device = CupyDevice(0)
    except ConfigError as error:
        publish("gpu_copy", [], given.json, notes=[f"not measured: {error}"])
        return
    theirs, notes = {}, ["LMCache's copies: not measured"]
    if given.lmcache:
        try:
            theirs, notes = of_lmcache(given.lmcache), ["peer: LMCache's CUDA kernel, chunks of 256 tokens"]
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            notes = [f"LMCache's copies: failed, {error}"]
    rows, lost = measured(Bench(device, LAYOUT, PAGES, BLOCKS, runs=5 if given.quick else 20), theirs)
    publish("gpu_copy", rows, given.json, notes=[*notes, *lost])
    if lost:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
