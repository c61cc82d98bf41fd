"""Loads and stores of a client: copies between the engine's pages and leased slots, or payloads on the socket."""

from __future__ import annotations

import mmap
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from kvcache.block.record import header_area, record_bytes
from kvcache.cache.operation import BlockTransfer
from kvcache.cache.slot_copy import CopyViewPart, PagesSlotCopy, wait_all
from kvcache.daemon.client.connection import Connection
from kvcache.daemon.protocol import MAX_BATCH_BYTES, PAYLOAD_DTYPE, STORE_TIMEOUT_S, ProtocolError, parse_reply
from kvcache.daemon.server.slot_lease import WIRE_OUTCOMES
from kvcache.daemon.shm import LeasedBatch, SlabMappings
from kvcache.daemon.wire import Wire, WireTimeoutError
from kvcache.errors import KVCacheError, UnreachableError
from kvcache.log import RequestContext, log_faults, logger, request_context
from kvcache.os_env import Executor
from kvcache.tier.tier import Outcome
from kvcache.transfer.copier import CopierRegistry

# Transfers whose payloads go over the socket, by way of staging memory.


class StagingBuffer:
    """Memory for one batch, laid out as records in slots. One transfer owns it at a time."""

    def __init__(self, size_bytes: int, copiers: CopierRegistry) -> None:
        self.memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.view = memoryview(self.memory)
        copiers.add_region(self.view)
        weakref.finalize(self, copiers.remove_region, self.view).atexit = False


class StagingPool:
    """Staging buffers, as many as transfers run at a time. Thread-safe."""

    def __init__(self, copiers: CopierRegistry) -> None:
        self._copiers = copiers
        self._idle: list[StagingBuffer] = []
        self._lock = threading.Lock()

    @contextmanager
    def acquire(self, size_bytes: int) -> Iterator[StagingBuffer]:
        with self._lock:
            fitting = [staging for staging in self._idle if len(staging.view) >= size_bytes]
            staging = fitting[0] if fitting else None
            if staging is not None:
                self._idle.remove(staging)
            elif self._idle:  # all are too small: a larger buffer replaces one
                self._idle.pop()
        made = staging or StagingBuffer(max(MAX_BATCH_BYTES, size_bytes), self._copiers)
        try:
            yield made
        finally:
            with self._lock:
                self._idle.append(made)


@dataclass(frozen=True, slots=True)
class StagingSlot:
    """Memory for one record in a `StagingBuffer`."""

    view: memoryview


@dataclass(frozen=True, slots=True)
class PayloadBatch:
    """The payloads of one message, laid out in a staging buffer."""

    parts: Sequence[CopyViewPart]
    payloads: Sequence[memoryview]
    sums: NDArray[np.uint64]

    @property
    def first(self) -> int:
        return min(block for block, _, _ in self.parts)

    def damaged(self) -> int | None:
        """Return the first block with a payload whose checksum differs; None where there is none."""
        wrong = [
            block
            for (block, _, _), payload, sum_ in zip(self.parts, self.payloads, self.sums.tolist(), strict=True)
            if xxh3_64_intdigest(payload) != sum_
        ]
        return min(wrong, default=None)

    def packed_sums(self) -> bytes:
        return np.array([xxh3_64_intdigest(payload) for payload in self.payloads], "<u8").tobytes()


def parse_payload_rows(packed: object, *, blocks: int, sizes: Sequence[int]) -> tuple[np.ndarray, int]:
    """Return the payload rows of a message, and the bytes of their records.

    Args:
        packed: The field of the message.
        blocks: Number of blocks of the transfer.
        sizes: Payload bytes by group.

    Raises:
        ProtocolError: The rows are not part of this transfer.
    """
    if not isinstance(packed, bytes) or not packed or len(packed) % PAYLOAD_DTYPE.itemsize:
        raise ProtocolError("payloads: unknown form")
    rows = np.frombuffer(packed, PAYLOAD_DTYPE)
    if rows["block"].max() >= blocks or rows["group"].max() >= len(sizes):
        raise ProtocolError(f"payloads of blocks that were not requested; requested: {blocks}")
    groups = rows["group"].tolist()
    if rows["bytes"].tolist() != [sizes[group] for group in groups]:
        raise ProtocolError("payloads: their size differs from the pages'")
    total = sum(record_bytes(sizes[group]) for group in groups)
    if total > MAX_BATCH_BYTES and len(rows) > 1:
        raise ProtocolError(f"{total} bytes behind one message: expected at most {MAX_BATCH_BYTES}")
    return rows, total


def lay_out(rows: np.ndarray, staging: StagingBuffer) -> PayloadBatch:
    parts: list[CopyViewPart] = []
    payloads = []
    at = 0
    for block, group, _, size, _ in rows.tolist():
        end, area = at + record_bytes(size), header_area(size)
        parts.append((block, group, StagingSlot(staging.view[at:end])))
        payloads.append(staging.view[at + area : at + area + size])
        at = end
    return PayloadBatch(parts, payloads, rows["sum"])


_log = logger("kvcache.daemon")


class ConnectedClient(Protocol):
    """The part of a client's cache that its namespaces, requests and transfers use; `RemoteCache` is one."""

    deadline_s: float
    patience_s: float
    prefix: str
    isolates_tenants: bool
    numbers: Iterator[int]
    copiers: CopierRegistry
    executor: Executor
    staging_pool: StagingPool

    def connected(self) -> AbstractContextManager[Connection]: ...
    def check_open(self) -> None: ...
    def mark_lost(self, connection: Connection, error: KVCacheError) -> None: ...
    def announce_store(self, store: int) -> bool: ...
    def transfer_started(self) -> None: ...
    def transfer_ended(self) -> None: ...
    def long_call(self, op: str, timeout_s: float | None, fields: Mapping[str, Any]) -> dict[str, Any]: ...


class TransferRequest(Protocol):
    """The part of a client's request that its transfers use; `RemoteRequest` is one."""

    work: RequestContext

    def number(self, connection: Connection) -> int: ...
    def transfer_ended(self, store: int) -> None: ...


@dataclass(slots=True)
class TransferTask:
    cache: ConnectedClient
    request: TransferRequest
    op: str
    first: int
    end: int
    sizes: Sequence[int]  # payload bytes by group
    slot_copy: PagesSlotCopy  # made on the engine's thread
    transfer: BlockTransfer
    deadline_s: float
    store: int = 0  # number of its announcement, or 0
    gather_failed: bool = False  # a payload to send could not be gathered
    valid_blocks: int = field(init=False)  # received payloads from this block on do not go into pages

    def __post_init__(self) -> None:
        self.valid_blocks = self.end - self.first

    def run(self) -> None:
        """Transfer the blocks. Never raises: a cache fault never fails a request."""
        outcome = Outcome.FAILED
        with request_context(self.request.work):
            try:
                with log_faults(_log, "a %s failed", self.op):
                    try:
                        self._run()
                    except WireTimeoutError as error:
                        outcome = Outcome.TIMED_OUT
                        _log.debug("%s timed out: %s", self.op, error)
                    except KVCacheError as error:
                        _log.debug("%s failed: %s", self.op, error)
            finally:
                self.finish(outcome)

    def finish(self, outcome: Outcome) -> None:
        """Give every block without an outcome this one, and end the transfer."""
        self.transfer.settle_rest(0, outcome)
        self.request.transfer_ended(self.store)
        self.cache.transfer_ended()

    def _run(self) -> None:
        if self.transfer.cancelled:
            self.transfer.settle_rest(0, Outcome.CANCELLED)
            return
        with self.cache.connected() as connection:
            number = self.request.number(connection)
        timeout_s = STORE_TIMEOUT_S if self.op == "store" else self.deadline_s + self.cache.patience_s
        try:
            with connection.transfer_wire(self.cache.patience_s) as wire:
                wire.send({"op": self.op, "request": number, "first": self.first, "end": self.end}, timeout_s=timeout_s)
                self._run_exchange(wire, connection.mappings, timeout_s)
        except WireTimeoutError:
            raise
        except (UnreachableError, ProtocolError) as error:
            self.cache.mark_lost(connection, error)
            raise

    def _run_exchange(self, wire: Wire, mappings: SlabMappings, timeout_s: float) -> None:
        while True:
            message, descriptors = wire.receive(timeout_s)
            if "sent" in message and self.op == "load":
                self._receive_payloads(wire, message, timeout_s)
                continue
            if "wanted" in message and self.op == "store":
                self._send_payloads(wire, message, timeout_s)
                continue
            if "lent" not in message:
                codes = parse_reply(message)["outcomes"]
                break
            lease = self._parse_lease(message, descriptors, mappings)
            taken = not self.transfer.cancelled and (
                self._copy_from_pages(lease.parts)
                if self.op == "store"
                else self._copy_to_pages(lease, message["blocks"])
            )
            wire.send({"taken": taken}, timeout_s=timeout_s)
        if self.transfer.cancelled:
            self.transfer.settle_rest(0, Outcome.CANCELLED)
        if len(codes) != self.end - self.first or max(codes, default=0) >= len(WIRE_OUTCOMES):
            raise ProtocolError(f"{len(codes)} outcomes: expected {self.end - self.first}")
        for i, code in enumerate(codes):
            self.transfer.settle(i, WIRE_OUTCOMES[code])

    def _receive_payloads(self, wire: Wire, message: dict[str, Any], timeout_s: float) -> None:
        """Read payloads from the socket into pages. Payloads from a bad block on are read and discarded."""
        rows, size = parse_payload_rows(message["sent"], blocks=self.end - self.first, sizes=self.sizes)
        blocks = message.get("blocks")
        if not isinstance(blocks, int) or not 0 <= blocks <= self.end - self.first:
            raise ProtocolError(f"payloads of {blocks!r:.40} blocks: expected at most {self.end - self.first}")
        with self.cache.staging_pool.acquire(size) as staging:
            batch = lay_out(rows, staging)
            wire.receive_bytes(batch.payloads, timeout_s)
            if self.transfer.cancelled or batch.first >= self.valid_blocks:
                return
            bad = batch.damaged()
            if bad is not None:
                self._fail_from(bad, Outcome.DAMAGED)
            parts = [part for part in batch.parts if part[0] < self.valid_blocks]
            if not self._scatter(parts, min(blocks, self.valid_blocks)):
                self._fail_from(batch.first, Outcome.FAILED)
                return
        self.transfer.settle_run(batch.first, min(blocks, self.valid_blocks), Outcome.DONE)

    def _fail_from(self, block: int, outcome: Outcome) -> None:
        self.valid_blocks = min(self.valid_blocks, block)
        self.transfer.settle_rest(self.valid_blocks, outcome)

    def _send_payloads(self, wire: Wire, message: dict[str, Any], timeout_s: float) -> None:
        """Send payloads from pages. After a failure send nothing more: the daemon expects no further payloads."""
        rows, size = parse_payload_rows(message["wanted"], blocks=self.end - self.first, sizes=self.sizes)
        if self.gather_failed:
            return
        with self.cache.staging_pool.acquire(size) as staging:
            batch = lay_out(rows, staging)
            if self.transfer.cancelled or not self._copy_from_pages(batch.parts):
                self.gather_failed = True
                wire.send({"taken": False}, timeout_s=timeout_s)
                return
            wire.send({"taken": True, "sums": batch.packed_sums()}, timeout_s=timeout_s)
            wire.send_bytes(batch.payloads, timeout_s=timeout_s)

    def _parse_lease(self, message: dict[str, Any], descriptors: list[int], mappings: SlabMappings) -> LeasedBatch:
        mappings.map_slabs(message.get("extents", ()), descriptors, message.get("gone", ()))
        if not isinstance(message["lent"], bytes) or not isinstance(message.get("blocks"), int):
            raise ProtocolError("leased slots: unknown form")
        return mappings.parse_leases(message["lent"], blocks=self.end - self.first, groups=len(self.sizes))

    def _copy_from_pages(self, parts: Sequence[CopyViewPart]) -> bool:
        """Gather pages; False where that failed. The daemon needs a reply in any case."""
        with log_faults(_log, "pages could not be gathered"):
            self.slot_copy.gather(parts)
            return True
        return False

    def _scatter(self, parts: Sequence[CopyViewPart], blocks: int) -> bool:
        """Fill pages with the parts of the first `blocks` blocks; False where that failed.

        The caller continues in any case: the daemon needs a reply, and later payloads must be read.
        """
        with log_faults(_log, "pages could not be filled"):
            copies = self.slot_copy.scatter(parts)
            self.transfer.begun(blocks, copies)
            wait_all(copies)
            return True
        return False

    def _copy_to_pages(self, lease: LeasedBatch, blocks: int) -> bool:
        """Copy leased slots into pages; return False where the daemon reused a slot, whose bytes are then discarded."""
        same = lease.unchanged()
        if same.all():
            if not self._scatter(lease.parts, blocks):
                return False
            same = lease.unchanged()
        if not same.all():
            bad = min(block for (block, _, _), as_it_was in zip(lease.parts, same, strict=True) if not as_it_was)
            self.transfer.settle_rest(bad, Outcome.NOT_FOUND)
            return False
        for i in range(lease.first, blocks):
            self.transfer.settle(i, Outcome.DONE)
        return True
