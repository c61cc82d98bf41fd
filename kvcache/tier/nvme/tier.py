"""The NVMe tier: the contract of a tier over a store, on a bounded number of threads of its own.

What was asked for together is done in pieces, the most urgent one next. Nothing here touches a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from kvcache.block.namespace import Owner
from kvcache.block.record import Address
from kvcache.errors import ConfigError
from kvcache.os_env import OsEnv
from kvcache.tier.io_queue import Batch, QueuedTier
from kvcache.tier.nvme.allocator import Allocator
from kvcache.tier.nvme.catalog import Catalog, expirations, log
from kvcache.tier.nvme.index import OwnerFile
from kvcache.tier.nvme.inspect import audit, scrub, usage_by_namespace
from kvcache.tier.nvme.restore_order import runs, scan
from kvcache.tier.nvme.secure_erase import wipe
from kvcache.tier.nvme.segment import MAX_IO_BYTES
from kvcache.tier.nvme.store import Durability, Settle, Store
from kvcache.tier.tier import Op, Outcome, RecordFilter, ScrubReport, Usage

_MIN_CAPACITY_BYTES = 768 << 10
_FLUSH_BYTES = 64 << 20
_FLUSH_S = 0.5
_FLUSH_RETRY_S = 1.0  # after a flush that failed
_WRITE_HANG_S = 10.0  # a write under way for so long, and no new one begins
_CLOSE_S = 30.0  # how long closing waits for a drive


class NvmeTier(QueuedTier):
    """Records in a directory of a local drive, there again after a restart.

    `durability` says when written data is made safe against a power cut (a killed process loses nothing that said
    DONE in any of them): `block`, before a write says DONE; `batch`, when no job waits, at the latest with the first
    write after 64 MiB or half a second, and by `sync`; `none`, whenever the system does it. Whatever a power cut takes
    is a miss.

    StoreError where the directory cannot be used: see `kvcache/tier/nvme/directory.py` and `journal.py`.
    """

    name = "nvme"
    durable = True
    shared = False

    def __init__(
        self,
        path: str,
        *,
        capacity_bytes: int,
        segment_bytes: int = 256 << 20,
        durability: Durability = "batch",
        threads: int = 4,
        queue_bytes: int = 256 << 20,
        min_free_bytes: int = 1 << 30,
        served_address: str = "",
        os_env: OsEnv | None = None,
    ) -> None:
        """`serves`: where others reach this process's cache, for whoever wants the same directory."""
        if capacity_bytes < _MIN_CAPACITY_BYTES:
            raise ConfigError(f"nvme.capacity_bytes = {capacity_bytes}: expected at least {_MIN_CAPACITY_BYTES}")
        if durability not in get_args(Durability):
            raise ConfigError(f"nvme.durability = {durability!r}: expected one of {', '.join(get_args(Durability))}")
        for setting, value in (("segment_bytes", segment_bytes), ("threads", threads), ("queue_bytes", queue_bytes)):
            if value < 1:
                raise ConfigError(f"nvme.{setting} = {value}: expected at least 1")
        super().__init__(threads=threads, queue_bytes=queue_bytes, os_env=os_env, log=log, work_unit_bytes=MAX_IO_BYTES)
        self.path = path
        self._store = Store(
            path,
            allocator=Allocator(capacity_bytes, segment_bytes),
            durability=durability,
            floor_bytes=min_free_bytes,
            served_address=served_address,
            os_env=self._os_env,
        )
        self._owners = OwnerFile(self._store.directory)
        self._is_maintaining = False
        self._flush_after = 0.0
        self._safe = False  # what `close` said

    def _complete_inline(self, batch: Batch) -> bool:
        """`contains` is answered from memory; everything else has a thread to wait for."""
        if batch.op == "contains":
            self._store.contains(batch.addresses, self._settling(batch))
        elif batch.op == "write" and self._write_is_stuck():
            self._settle_rest(batch, Outcome.FAILED, "hung")
        else:
            return False
        return True

    def _execute(self, piece: Batch) -> None:
        if piece.op == "read":
            self._store.read(piece, self._settling(piece))
        elif piece.op == "write":
            self._store.write(piece, self._settling(piece))
        else:
            self._store.remove(piece, self._settling(piece))

    def _failing(self, op: Op) -> bool:
        return op == "write" and self._store.failing

    def _count_defect(self) -> None:
        self._store.counters.add("faults")

    def _settling(self, batch: Batch) -> Settle:
        counters, ticket = self._store.counters, batch.ticket

        def settle(i: int, outcome: Outcome, check: str) -> None:
            counters.add(f"{batch.op}_{outcome.value}")
            if outcome is Outcome.DONE and batch.segments:
                counters.add(f"{batch.op}_bytes", batch.size_bytes(i))
            ticket.settle(i, outcome, check)

        return settle

    def _settle_rest(self, batch: Batch, outcome: Outcome, check: str = "") -> None:
        """Settle what of a batch is not settled."""
        settle, outcomes = self._settling(batch), batch.ticket.outcomes
        for i in batch.blocks:
            if not outcomes[i].settled:
                settle(i, outcome, check)

    def _write_is_stuck(self) -> bool:
        """Whether a write has been under way for so long that no other should join it."""
        with self._lock:
            oldest = min(self._writing.values(), default=None)
        return oldest is not None and self._os_env.clock.now() - oldest > _WRITE_HANG_S

    def _maintain(self) -> None:
        """Flush and compact where it is time, on one thread at most, which counts as a writer."""
        while self._flush_due() or self._store.barrier.should_compact:
            with self._lock:
                if self._is_maintaining or not self._queue.try_start_write():
                    return  # who tends or writes comes here next
                self._is_maintaining = True
                self._writing[self] = self._os_env.clock.now()
            try:
                if self._flush_due() and not self._store.flush():
                    self._flush_after = self._os_env.clock.now() + _FLUSH_RETRY_S
                if self._store.barrier.should_compact:
                    self._store.barrier.compact()
            finally:
                with self._lock:
                    self._is_maintaining = False
                    self._writing.pop(self, None)
                    self._queue.finish_write()
                self._start_workers()  # for writes that found no thread meanwhile

    def _flush_due(self) -> bool:
        catalog = self._store.catalog
        if self._store.durability != "batch" or not catalog.dirty_bytes:
            return False
        now = self._os_env.clock.now()
        if now < self._flush_after:
            return False
        return not len(self._queue) or catalog.dirty_bytes >= _FLUSH_BYTES or now - catalog.oldest_dirty_s >= _FLUSH_S

    @property
    def counters(self) -> dict[str, int]:
        """What happened since the tier was opened, by name."""
        return self._store.counters.snapshot()

    def duplicates_of(self, other: NvmeTier) -> list[Address]:
        """The records under whose names another tier holds one too."""
        mine, theirs = self._store.catalog.index, other._store.catalog.index
        found = [mine.find(name) for name in mine.places.keys() & theirs.places.keys()]
        return [mine.address(record[2]) for record in found if record is not None]

    def on_loss(self, tell: Callable[[Address], object]) -> None:
        self.catalog.on_loss = tell

    def health_issues(self) -> list[str]:
        if self._write_is_stuck():
            return [f"nvme directory {self.path}: a write has been under way for {_WRITE_HANG_S:.0f} s"]
        return self._store.health_issues()

    def scrub(
        self,
        on_progress: Callable[[int], object] = lambda size_bytes: None,
        *,
        dry_run: bool = False,
        unwanted: RecordFilter | None = None,
    ) -> ScrubReport:
        """Read and check every record, and let the damaged ones go, and the unwanted; then the drive is no longer
        suspect. `told` hears of each record's bytes. `dry_run`: count them only."""
        found = scrub(self.catalog, on_progress, dry_run=dry_run, unwanted=unwanted)
        if not dry_run:
            self._store.clear_suspicion()
        return found

    def expirations(self) -> Iterator[tuple[Address, int]]:
        return expirations(self.catalog)

    def keep_files(self, keep: bool) -> None:
        self.catalog.keep_files(keep)

    def wipe(self) -> bool:
        """Overwrite what lies here and is no record, and drop from the journal what is no longer true."""
        try:
            wipe(self.catalog)
        except OSError as error:
            log.warning("nvme directory %s: not all could be overwritten: %s", self.path, error)
            return False
        return self.compact()

    def note_owner(self, namespace: bytes, owner: Owner) -> None:
        self._owners.note(namespace, owner)

    def owners(self) -> Mapping[bytes, Owner]:
        return self._owners.all()

    def compact(self) -> bool:
        """Write the journal anew, as short as can be; False where the drive did not let it."""
        return self._store.barrier.compact(due=False)

    @property
    def catalog(self) -> Catalog:
        """For the tools of this folder."""
        return self._store.catalog

    def room(self, record_bytes: int) -> int:
        return self._store.catalog.room(record_bytes)

    def colocated(self, address: Address) -> list[Address]:
        """The records of the same segment, this one included."""
        return self._store.addresses_in_segment(address)

    def runs(self) -> Iterator[tuple[Address, bytes]]:
        """All records in few steps: the address of a run's first record, and the signatures of it and of those that
        follow it in the same namespace, group and shard, one behind the other. Heads before tails."""
        return runs(*self.puts())

    def scan(self) -> Iterator[Address]:
        """All records, each behind its parent where that is here too."""
        return scan(self.runs())

    def puts(self) -> tuple[NDArray[np.void], dict[int, bytes]]:
        """What the journal says of all records, and what their namespaces are."""
        with self._store.catalog.memory:
            return self._store.catalog.index.puts()

    def has_names(self, addresses: Sequence[Address]) -> list[bool]:
        """Whether something stands under the name of each, from memory."""
        return [found is not None for found in self._store.catalog.names_taken(addresses)]

    def sync(self) -> bool:
        return self._store.sync()

    def usage(self) -> Usage:
        catalog = self._store.catalog
        with catalog.memory:
            return Usage(len(catalog.index.places), catalog.allocator.used_bytes(), catalog.allocator.capacity_bytes)

    def usage_by_namespace(self) -> dict[bytes, tuple[int, int]]:
        return usage_by_namespace(self.catalog)

    def check(self, on_progress: Callable[[], object] = lambda: None) -> list[str]:
        """`told` is called once a record."""
        return audit(self.catalog, on_progress)

    def close(self) -> bool:
        """Run what was submitted, make it durable, let go of the directory. Idempotent. Where the drive does not
        answer for long, what waits fails, and directory and threads stay behind: a write under way cannot be called
        back."""
        with self._lock:
            if self._closed:
                return self._safe
            self._closed = True
        idle = self._drain(_CLOSE_S)
        if idle:
            self._executor.close()
            self._safe = self._store.close()
            return self._safe
        log.warning("nvme directory %s: the drive does not answer; left as it is", self._store.directory.path)
        self._fail_queued("hung")
        return False
