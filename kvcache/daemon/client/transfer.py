"""The client's part of a load or a store: the daemon lends slots, this copies between them and the engine's pages."""

from __future__ import annotations

import mmap
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from kvcache.block.record import header_area, record_bytes
from kvcache.cache.operation import BlockTransfer
from kvcache.cache.slot_copy import PagesMover, PlacedPart, wait_all
from kvcache.daemon.protocol import SENT, SENT_BYTES, STORE_S, ProtocolError, answer
from kvcache.daemon.server.slot_lease import OUTCOMES
from kvcache.daemon.shm import Lent, Mappings
from kvcache.daemon.wire import LateError, Wire
from kvcache.errors import KVCacheError, UnreachableError
from kvcache.log import logger, working_for
from kvcache.tier.tier import Outcome
from kvcache.transfer.copier import Copiers

if TYPE_CHECKING:
    from kvcache.daemon.client.cache import RemoteCache
    from kvcache.daemon.client.request import RemoteRequest

# The client's part of a load or a store whose bytes go over the socket: between it and the engine's pages, by way of
# memory that is kept for that.


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


_log = logger("kvcache.daemon")


@dataclass(slots=True)
class Taker:
    cache: RemoteCache
    request: RemoteRequest
    op: str
    first: int
    end: int
    sizes: Sequence[int]  # payload bytes by group
    mover: PagesMover  # made on the engine's thread
    transfer: BlockTransfer
    deadline_s: float
    store: int = 0  # by which the daemon was told that it begins, where it is one
    spoilt: bool = False  # of what is to be sent over the socket, something could not be had
    good: int = field(init=False)  # of what comes over it: nothing from this block on goes into pages

    def __post_init__(self) -> None:
        self.good = self.end - self.first

    def run(self) -> None:
        """Never raises: an engine that waits for this must not fail for a fault of a cache."""
        outcome = Outcome.FAILED
        with working_for(self.request.work):
            try:
                self._run()
            except LateError as error:
                outcome = Outcome.LATE
                _log.debug("a %s was late: %s", self.op, error)
            except KVCacheError as error:
                _log.debug("a %s failed: %s", self.op, error)
            except Exception:  # noqa: BLE001  law: never in the way
                _log.exception("a %s failed", self.op)
            finally:
                self.over(outcome)

    def over(self, outcome: Outcome) -> None:
        """What has no outcome yet has this one; nobody waits for it any more."""
        self.transfer.settle_rest(0, outcome)
        self.request.moved(self.store)
        self.cache.moved()

    def _run(self) -> None:
        if self.transfer.cancelled:
            self.transfer.settle_rest(0, Outcome.CANCELLED)
            return
        with self.cache.asking() as link:
            number = self.request.number(link)
        timeout_s = STORE_S if self.op == "store" else self.deadline_s + self.cache.patience_s
        try:
            with link.mover(self.cache.patience_s) as wire:
                wire.send({"op": self.op, "request": number, "first": self.first, "end": self.end}, timeout_s=timeout_s)
                self._take(wire, link.mappings, timeout_s)
        except LateError:
            raise
        except (UnreachableError, ProtocolError) as error:
            self.cache.lose(link, error)
            raise

    def _take(self, wire: Wire, mappings: Mappings, timeout_s: float) -> None:
        while True:
            message, descriptors = wire.receive(timeout_s)
            if "sent" in message and self.op == "load":
                self._sent(wire, message, timeout_s)
                continue
            if "wanted" in message and self.op == "store":
                self._wanted(wire, message, timeout_s)
                continue
            if "lent" not in message:
                codes = answer(message)["outcomes"]
                break
            lent = self._lent(message, descriptors, mappings)
            taken = not self.transfer.cancelled and (
                self._fill(lent.parts) if self.op == "store" else self._empty(lent, message["blocks"])
            )
            wire.send({"taken": taken}, timeout_s=timeout_s)
        if self.transfer.cancelled:
            self.transfer.settle_rest(0, Outcome.CANCELLED)
        if len(codes) != self.end - self.first or max(codes, default=0) >= len(OUTCOMES):
            raise ProtocolError(f"{len(codes)} outcomes: expected {self.end - self.first}")
        for i, code in enumerate(codes):
            self.transfer.settle(i, OUTCOMES[code])

    def _sent(self, wire: Wire, message: dict[str, Any], timeout_s: float) -> None:
        """Take payloads off the socket and into pages; those of a bad block and behind it off the socket only."""
        rows, size = room(message["sent"], blocks=self.end - self.first, sizes=self.sizes)
        blocks = message.get("blocks")
        if not isinstance(blocks, int) or not 0 <= blocks <= self.end - self.first:
            raise ProtocolError(f"payloads of {blocks!r:.40} blocks: expected at most {self.end - self.first}")
        with self.cache.stagings.take(size) as staging:
            batch = laid_out(rows, staging)
            wire.receive_bytes(batch.payloads, timeout_s)
            if self.transfer.cancelled or batch.first >= self.good:
                return
            bad = batch.damaged()
            if bad is not None:
                self._spoil(bad, Outcome.DAMAGED)
            try:
                copies = self.mover.scatter([part for part in batch.parts if part[0] < self.good])
                self.transfer.begun(min(blocks, self.good), copies)
                wait_all(copies)
            except Exception:  # noqa: BLE001  what comes behind it must be taken off the socket all the same
                _log.exception("pages could not be filled")
                self._spoil(batch.first, Outcome.FAILED)
                return
        self.transfer.settle_run(batch.first, min(blocks, self.good), Outcome.DONE)

    def _spoil(self, block: int, outcome: Outcome) -> None:
        self.good = min(self.good, block)
        self.transfer.settle_rest(self.good, outcome)

    def _wanted(self, wire: Wire, message: dict[str, Any], timeout_s: float) -> None:
        """Send payloads out of pages, unless one could not be had before: then the daemon waits for no more."""
        rows, size = room(message["wanted"], blocks=self.end - self.first, sizes=self.sizes)
        if self.spoilt:
            return
        with self.cache.stagings.take(size) as staging:
            batch = laid_out(rows, staging)
            if self.transfer.cancelled or not self._fill(batch.parts):
                self.spoilt = True
                wire.send({"taken": False}, timeout_s=timeout_s)
                return
            wire.send({"taken": True, "sums": batch.packed_sums()}, timeout_s=timeout_s)
            wire.send_bytes(batch.payloads, timeout_s=timeout_s)

    def _lent(self, message: dict[str, Any], descriptors: list[int], mappings: Mappings) -> Lent:
        mappings.take_in(message.get("extents", ()), descriptors, message.get("gone", ()))
        if not isinstance(message["lent"], bytes) or not isinstance(message.get("blocks"), int):
            raise ProtocolError("slots that are lent in no form that is known")
        return mappings.lent(message["lent"], blocks=self.end - self.first, groups=len(self.sizes))

    def _fill(self, parts: Sequence[PlacedPart]) -> bool:
        try:
            self.mover.gather(parts)
        except Exception:  # noqa: BLE001  the daemon waits for an answer, whatever happens here
            _log.exception("pages could not be gathered")
            return False
        return True

    def _empty(self, lent: Lent, blocks: int) -> bool:
        """Copy, unless a slot was given out again before or meanwhile: then what was read is another's."""
        same = lent.unchanged()
        if same.all():
            try:
                copies = self.mover.scatter(lent.parts)
                self.transfer.begun(blocks, copies)
                wait_all(copies)
            except Exception:  # noqa: BLE001  the daemon waits for an answer, whatever happens here
                _log.exception("pages could not be filled")
                return False
            same = lent.unchanged()
        if not same.all():
            bad = min(block for (block, _, _), as_it_was in zip(lent.parts, same, strict=True) if not as_it_was)
            self.transfer.settle_rest(bad, Outcome.ABSENT)
            return False
        for i in range(lent.first, blocks):
            self.transfer.settle(i, Outcome.DONE)
        return True
