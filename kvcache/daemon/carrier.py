"""The client's part of a load or a store whose bytes go over the socket: between it and the engine's pages, by way of
memory that is kept for that."""

from __future__ import annotations

import mmap
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from kvcache.block.record import header_area, record_bytes
from kvcache.cache.slot_copy import PlacedPart
from kvcache.daemon.protocol import SENT, SENT_BYTES, ProtocolError
from kvcache.transfer.copier import Copiers


class Staging:
    """Memory for one batch, as records stand in slots. Whoever took it has it alone."""

    def __init__(self, size_bytes: int, copiers: Copiers) -> None:
        self.memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.view = memoryview(self.memory)
        copiers.came(self.view)
        weakref.finalize(self, copiers.gone, self.view).atexit = False


class Stagings:
    """As many as transfers are under way at a time. Thread-safe."""

    def __init__(self, copiers: Copiers) -> None:
        self._copiers = copiers
        self._idle: list[Staging] = []
        self._lock = threading.Lock()

    @contextmanager
    def take(self, size_bytes: int) -> Iterator[Staging]:
        with self._lock:
            fitting = [staging for staging in self._idle if len(staging.view) >= size_bytes]
            staging = fitting[0] if fitting else None
            if staging is not None:
                self._idle.remove(staging)
            elif self._idle:  # too small: a larger one takes its place
                self._idle.pop()
        made = staging or Staging(max(SENT_BYTES, size_bytes), self._copiers)
        try:
            yield made
        finally:
            with self._lock:
                self._idle.append(made)


@dataclass(frozen=True, slots=True)
class Staged:
    """Room for one record in a `Staging`."""

    view: memoryview


@dataclass(frozen=True, slots=True)
class Batch:
    """What one message speaks of, laid out in memory."""

    parts: Sequence[PlacedPart]
    payloads: Sequence[memoryview]
    sums: NDArray[np.uint64]

    @property
    def first(self) -> int:
        return min(block for block, _, _ in self.parts)

    def damaged(self) -> int | None:
        """The first block of which a payload is not what its sum says."""
        wrong = [
            block
            for (block, _, _), payload, sum_ in zip(self.parts, self.payloads, self.sums.tolist(), strict=True)
            if xxh3_64_intdigest(payload) != sum_
        ]
        return min(wrong, default=None)

    def packed_sums(self) -> bytes:
        return np.array([xxh3_64_intdigest(payload) for payload in self.payloads], "<u8").tobytes()


def room(packed: object, *, blocks: int, sizes: Sequence[int]) -> tuple[np.ndarray, int]:
    """The rows of a message of a transfer of so many blocks, whose groups have payloads of these sizes, and the bytes
    that their records take. ProtocolError where it is no part of that: what a daemon says is checked like anything."""
    if not isinstance(packed, bytes) or not packed or len(packed) % SENT.itemsize:
        raise ProtocolError("payloads in no form that is known")
    rows = np.frombuffer(packed, SENT)
    if rows["block"].max() >= blocks or rows["group"].max() >= len(sizes):
        raise ProtocolError(f"payloads of blocks that were not asked for: {blocks} were")
    groups = rows["group"].tolist()
    if rows["bytes"].tolist() != [sizes[group] for group in groups]:
        raise ProtocolError("payloads of another size than those of these pages")
    total = sum(record_bytes(sizes[group]) for group in groups)
    if total > SENT_BYTES and len(rows) > 1:
        raise ProtocolError(f"{total} bytes behind one message: at most {SENT_BYTES} are taken")
    return rows, total


def laid_out(rows: np.ndarray, staging: Staging) -> Batch:
    parts: list[PlacedPart] = []
    payloads = []
    at = 0
    for block, group, _, size, _ in rows.tolist():
        end, area = at + record_bytes(size), header_area(size)
        parts.append((block, group, Staged(staging.view[at:end])))
        payloads.append(staging.view[at + area : at + area + size])
        at = end
    return Batch(parts, payloads, rows["sum"])
