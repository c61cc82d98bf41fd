"""Copies between pages on a GPU and host memory, on separate streams that run beside the engine's computation.

    copier = CudaCopier(0)
    copier.pinned.add(region)                           # once, for each slab of the arena
    after = copier.mark(compute_stream)                 # the engine's position now
    copy = copier.gather(pages, page_ids, payloads, after=after)
    copy = copier.scatter(pages, page_ids, payloads)    # by runs of layers
    copy.block_stream(compute_stream, layer=0)          # later work on that stream waits for layer 0
    copy.wait()

A copy takes one of three paths, by size:

    direct   DMA of each fragment between page and payload, without multiprocessors; for large fragments
    staged   a kernel gathers blocks in device memory, and DMA moves each block as one piece; for small fragments of
             large blocks, and for host memory that is not pinned
    mapped   a kernel on a few multiprocessors accesses pinned host memory; for all other copies

The copier measures the sizes that separate the paths when it is made (`crossover.py`). No call waits for the device,
with one exception: the driver copies host memory that is not pinned within the call.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kvcache.errors import LayoutError
from kvcache.transfer.cpu import BlockAxes, check_call
from kvcache.transfer.cuda.crossover import Crossover, measure
from kvcache.transfer.cuda.device import CupyDevice, Device, DeviceMemory, Event
from kvcache.transfer.cuda.kernels import Direction, Launch, launches
from kvcache.transfer.cuda.quantise import Format, QuantisedPages
from kvcache.transfer.pages import GroupPages
from kvcache.transfer.pinned import PinnedRegions, address_of
from kvcache.transfer.walk import CopyPlan, copy_plan, page_copy_plan

# Parts of a copy: runs of layers, each contiguous in the payload and followed by an event


@dataclass(frozen=True, slots=True)
class CopyPart:
    plan: CopyPlan | None  # None where the payload is quantised
    launches: Callable[[Direction, Sequence[int], NDArray[np.int64], int], Iterator[Launch]]
    end: int  # layer, excluded
    start: int  # offset in the payload, in bytes
    size_bytes: int
    alignment: int = 1  # of payloads, as the kernels need it


def copy_parts(pages: GroupPages, form: QuantisedPages | None, blocks: int, run_bytes: int | None) -> list[CopyPart]:
    """Return the parts of a copy: one, or runs of layers where the layout has layers outermost.

    A run has at least `run_bytes` in all blocks together.
    """
    layers, size = pages.shard.layers, pages.block_bytes
    if form is not None:
        return [CopyPart(None, form.launches, layers, 0, form.payload_bytes, 4)]
    count = 1
    if run_bytes is not None and BlockAxes.of(pages).payload[0] * layers == size:
        count = min(layers, max(1, size * blocks // run_bytes))
    made = []
    for i in range(count):
        first, end = layers * i // count, layers * (i + 1) // count
        run = copy_plan(pages, (first, end))
        start, stop = size * first // layers, size * end // layers
        made.append(CopyPart(run, partial(launches, run), end, start, stop - start))
    return made


CopyPath = Literal["direct", "staged", "mapped"]

STAGING_BYTES = 32 << 20
LAYER_RUN_BYTES = (
    4 << 20
)  # least size of a run of layers: some 80 microseconds on the bus, ten times the cost of a launch
BUS_THREAD_BLOCKS = 32  # thread blocks that keep the bus busy
DEVICE_BLOCKS_PER_SM = 8  # thread blocks a multiprocessor that keep the device's memory busy
_ALIGNMENT = 256
_POLL_S = 20e-6


@dataclass(slots=True)
class CudaCopy:
    """A running copy, with an event after each run of layers. The caller keeps pages and buffers until it is done.

    Every method raises a fault that the device reports. The target of the copy is then undefined.
    """

    device: Device
    ends: list[int]  # end layer of each run, excluded
    events: list[Event]
    ways: list[CopyPath]  # the path of each run
    keep: tuple[object, ...] = field(repr=False)  # kept alive until this object is collected

    @property
    def done(self) -> bool:
        return not self.events or self.events[-1].done

    def wait(self, timeout_s: float | None = None) -> bool:
        return self.wait_layer(self.ends[-1] - 1, timeout_s) if self.events else True

    def wait_layer(self, layer: int, timeout_s: float | None = None) -> bool:
        """Wait until this layer of every block is copied; `layer` counts within the shard."""
        event = self._event(layer)
        if event is None:
            return True
        if timeout_s is None:
            event.synchronize()
            return True
        deadline = time.monotonic() + timeout_s
        while not event.done:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                return False
            time.sleep(min(remaining_s, _POLL_S))
        return True

    def block_stream(self, stream: int, layer: int | None = None) -> None:
        """Make later work on the engine's `stream` wait for this layer, or for the whole copy."""
        event = self._event(self.ends[-1] - 1 if layer is None and self.ends else layer or 0)
        if event is not None:
            self.device.follow(stream, event)

    def _event(self, layer: int) -> Event | None:
        return next((event for end, event in zip(self.ends, self.events, strict=True) if layer < end), None)


class CudaCopier:
    """Copies whole blocks of the pages on one device.

    Args:
        compute_stream: The engine's stream, or a function that returns it, for calls without a mark.
        crossover: For tests and measurements; measured where it is None.
        way: For tests and measurements; the path of every copy.

    Thread safety: any thread may call it; one lock for each stream keeps a copy's work together.
    """

    def __init__(
        self,
        device: Device | int = 0,
        *,
        compute_stream: int | Callable[[], int] = 0,
        crossover: Crossover | None = None,
        way: CopyPath | None = None,
        staging_bytes: int = STAGING_BYTES,
        run_bytes: int = LAYER_RUN_BYTES,
        bus_blocks: int = BUS_THREAD_BLOCKS,
    ) -> None:
        self.device = CupyDevice(device) if isinstance(device, int) else device
        self.pinned = PinnedRegions(self.device)
        self.compute_stream, self.way = compute_stream, way
        self._staging_bytes, self._run_bytes, self._bus_blocks = staging_bytes, run_bytes, bus_blocks
        self._streams_by_direction = {
            "gather": _CopyStream(self.device),
            "scatter": _CopyStream(self.device),
            "within": _CopyStream(self.device),
        }
        self.crossover = crossover or measure(self.device, self._streams_by_direction["gather"].stream, bus_blocks)

    def mark(self, stream: int | None = None) -> Event:
        """Return the stream's current position, for a copy that must begin after the work before it."""
        if stream is None:
            stream = self.compute_stream() if callable(self.compute_stream) else self.compute_stream
        return self.device.record(stream)

    def gather(
        self,
        pages: GroupPages,
        page_ids: Sequence[int],
        buffers: Sequence[memoryview],
        *,
        after: Event | None = None,
        quantised: Format | None = None,
    ) -> CudaCopy:
        """Copy pages to buffers, after the work on the engine's stream before `after`, or before this call.

        With a format the buffers receive payloads of that codec. Check each with `QuantisedPages.sound` before use.
        """
        return self._copy("gather", pages, page_ids, buffers, after, quantised)

    def scatter(
        self,
        pages: GroupPages,
        page_ids: Sequence[int],
        buffers: Sequence[memoryview],
        *,
        after: Event | None = None,
        quantised: Format | None = None,
    ) -> CudaCopy:
        """Copy buffers to pages by runs of layers, with an event after each run. A large load has one run a layer.

        The copy begins after the work on the engine's stream before `after`, or before this call.
        """
        return self._copy("scatter", pages, page_ids, buffers, after, quantised)

    def copy_pages(
        self, pages: GroupPages, sources: Sequence[int], targets: Sequence[int], *, after: Event | None = None
    ) -> CudaCopy:
        """Copy pages to other pages of the same pool, for copy-on-write. Targets must be distinct and no sources."""
        check_call(pages, (), (), writable=True, device=self.device.name)
        pages.check_ids([*sources, *targets])
        if len(targets) != len(sources) or len({*targets}) != len(targets) or {*targets} & {*sources}:
            raise LayoutError(
                f"{len(sources)} pages to {len(targets)}: expected each target once, and no source as one"
            )
        copy_stream, payloads = self._streams_by_direction["within"], np.asarray(targets, np.int64) * pages.page_stride
        with copy_stream.in_order():
            self._follow(copy_stream, after)
            self._launch(launches(page_copy_plan(pages), "gather", sources, payloads, self._device_blocks), copy_stream)
            return CudaCopy(self.device, [pages.shard.layers], [self.device.record(copy_stream.stream)], [], (pages,))

    def close(self) -> None:
        """Wait for running copies, then unpin."""
        for copy_stream in self._streams_by_direction.values():
            with copy_stream.in_order():
                copy_stream.drain()
                copy_stream.staging = None
        self.pinned.close()

    def _copy(
        self,
        direction: Direction,
        pages: GroupPages,
        page_ids: Sequence[int],
        buffers: Sequence[memoryview],
        after: Event | None,
        quantised: Format | None,
    ) -> CudaCopy:
        form = QuantisedPages(quantised, pages) if quantised else None
        size, writable = form.payload_bytes if form else pages.block_bytes, direction == "gather"
        check_call(pages, page_ids, buffers, writable=writable, device=self.device.name, block_bytes=size)
        if form and direction == "scatter" and not all(map(form.sound, buffers)):
            raise LayoutError(f"a buffer whose scales {quantised} does not make: expected a payload of that codec")
        copy = CudaCopy(self.device, [], [], [], (pages, buffers))
        if not buffers:
            return copy
        addresses = np.array([address_of(buffer) for buffer in buffers], np.int64)
        mapped = self._mapped(addresses, size)
        copy_stream = self._streams_by_direction[direction]
        with copy_stream.in_order():
            self._follow(copy_stream, after)
            for part in copy_parts(pages, form, len(buffers), self._run_bytes if direction == "scatter" else None):
                way = self._way(direction, part, mapped)
                if way == "direct" and part.plan is not None:
                    self._direct(direction, part.plan, page_ids, addresses, copy_stream)
                elif way == "mapped" and mapped is not None:
                    self._launch(part.launches(direction, page_ids, mapped, self._bus_blocks), copy_stream)
                else:
                    self._staged(direction, part, page_ids, addresses, copy_stream, pinned=mapped is not None)
                copy.ways.append(way)
                copy.ends.append(part.end)
                copy.events.append(self.device.record(copy_stream.stream))
        return copy

    @property
    def _device_blocks(self) -> int:
        return DEVICE_BLOCKS_PER_SM * self.device.multiprocessors

    def _follow(self, copy_stream: _CopyStream, after: Event | None) -> None:
        self.device.follow(copy_stream.stream, self.mark() if after is None else after)

    def _mapped(self, addresses: NDArray[np.int64], size_bytes: int) -> NDArray[np.int64] | None:
        """Return the device addresses of the buffers; None unless all are pinned."""
        found = [self.pinned.find(address, size_bytes) for address in addresses.tolist()]
        return None if None in found else np.array(found, np.int64)

    def _way(self, direction: Direction, part: CopyPart, mapped: NDArray[np.int64] | None) -> CopyPath:
        if mapped is None or (mapped % part.alignment).any():
            return "staged"
        wanted = self.way
        if wanted is None:
            enough = self.crossover.gather if direction == "gather" else self.crossover.scatter
            if part.plan is not None and part.plan.walk.run >= enough:
                return "direct"
            wanted = "staged" if part.size_bytes >= enough else "mapped"
        return "staged" if wanted == "direct" and part.plan is None else wanted

    def _direct(
        self,
        direction: Direction,
        the_plan: CopyPlan,
        page_ids: Sequence[int],
        addresses: NDArray[np.int64],
        copy_stream: _CopyStream,
    ) -> None:
        fragments = (the_plan.roots[:, None] + the_plan.walk.offsets[None]).reshape(-1, 2)
        starts = np.stack([np.asarray(page_ids, np.int64) * the_plan.page_step, addresses], axis=1)
        ends = (starts[:, None] + fragments[None]).reshape(-1, 2).astype(np.uint64)
        target, origin = (1, 0) if direction == "gather" else (0, 1)
        sizes = np.full(len(ends), the_plan.walk.run, np.uint64)
        self.device.copy(ends[:, target], ends[:, origin], sizes, copy_stream.stream, pinned=True)

    def _staged(
        self,
        direction: Direction,
        part: CopyPart,
        page_ids: Sequence[int],
        addresses: NDArray[np.int64],
        copy_stream: _CopyStream,
        *,
        pinned: bool,
    ) -> None:
        slot = -(-part.size_bytes // _ALIGNMENT) * _ALIGNMENT
        if copy_stream.staging is None or copy_stream.staging_bytes < slot:
            copy_stream.staging_bytes = max(slot, self._staging_bytes)
            copy_stream.staging = self.device.memory(copy_stream.staging_bytes, copy_stream.stream)
        at_a_time = copy_stream.staging_bytes // slot
        for first in range(0, len(addresses), at_a_time):
            host = (addresses[first : first + at_a_time] + part.start).astype(np.uint64)
            staged = copy_stream.staging.pointer + slot * np.arange(len(host), dtype=np.int64)
            there, sizes = staged.astype(np.uint64), np.full(len(host), part.size_bytes, np.uint64)
            ids = page_ids[first : first + at_a_time]
            if direction == "scatter":
                self.device.copy(there, host, sizes, copy_stream.stream, pinned=pinned)
            self._launch(part.launches(direction, ids, staged - part.start, self._device_blocks), copy_stream)
            if direction == "gather":
                self.device.copy(host, there, sizes, copy_stream.stream, pinned=pinned)

    def _launch(self, these: Iterator[Launch], copy_stream: _CopyStream) -> None:
        for launch in these:
            self.device.launch(launch, copy_stream.stream)


class _CopyStream:
    """A stream for one kind of copy, and the device memory that stages it."""

    def __init__(self, device: Device) -> None:
        self._device, self._lock = device, threading.Lock()
        self.stream = device.stream()
        self.staging: DeviceMemory | None = None
        self.staging_bytes = 0

    @contextmanager
    def in_order(self) -> Iterator[None]:
        """Keep one copy's work together on the stream.

        On an error the stream is drained first, because the caller then reuses its pages and buffers.
        """
        with self._lock:
            try:
                yield
            except BaseException:
                self.drain()
                raise

    def drain(self) -> None:
        self._device.record(self.stream).synchronize()
