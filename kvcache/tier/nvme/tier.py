"""The NVMe tier: records in preallocated segment files on a local drive, readable again after a restart.

One tier owns one directory on one drive; `drives.py` joins several drives into one tier. A segment file holds slots of
one size, and a slot holds one record. A journal with checksums says which slot holds which record.

Layers, from the top:

- `NvmeTier` (this file): queue, worker threads, counters, periodic flush and compaction. It opens no file itself.
- `Store`: what one call does to a batch: allocate slots, write payloads, journal, publish; read and verify.
- `DurabilityBarrier`: syncs, what they cover, and compaction of the journal.
- `Catalog`: one state in two places, the index in memory and the journal on the drive.
- `Index`, `Allocator`, `Segment`, `Journal`, `Directory`: the parts of the catalog.

Alternatives:

- io_uring. Measured at the same depth and syncs, a ring read as fast as threads with `preadv` and wrote no faster. It
  saves 0.03 s of processor time a GB at 364 KiB. The tier reads and writes neighbours together, up to 9 MiB a call,
  where a ring saves 0.004 s. Hence threads. `docs/log.md` has the figures.
- Writing zeros to a new segment, so that its first records are written at full speed. Every byte would be written
  twice.
- Verifying checksums on all threads. Four threads that compete for the interpreter lock read 2.9 GB/s. One verifying
  thread at a time reads 3.5 GB/s.
- Scanning records at start. The journal is read instead: a million blocks open in under two seconds.

Invariants:

- A record can be found only after its payload is written and its journal entry is appended.
- A slot is free only after the journal has ended its assignment to a record. A crash can cause an unused slot or file,
  never a slot with two owners.
- A read compares the whole identity and every checksum. A stale or damaged slot is a miss and never a wrong block.
- A failed sync is final: the operating system may drop the data and report success on the next sync. Records that a
  failed sync covered are read, verified and written again first.
- Segment files and the largest possible journal together never exceed `capacity_bytes`.
- Writers never take all of several threads, so a drive that hangs on writes still reads.

Threads: `threads` workers of `QueuedTier` do reads, writes and removals, and between them one worker at a time flushes
and compacts. `contains` is answered from memory on the caller's thread. `sync`, `compact` and the tools (scrub, check,
wipe) run on the caller's thread too.

Locks, taken in this order: `DurabilityBarrier._syncing` (one sync or compaction at a time), `Catalog.journal_lock` (one
change at a time, held during I/O), `Catalog.memory` (index and allocator, never held during I/O). `QueuedTier._lock`
guards the queue. `Store._checking` lets one thread verify at a time.

To change it: `docs/spec/journal.md` specifies the bytes of the directory; a change to them needs a new version. The
tier's contract is in `kvcache/tier/tier.py`. All I/O of a store passes through `OsEnv.disk`, so that the fault tests
can tear, reorder and fail it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from kvcache.block.namespace import Owner
from kvcache.block.record import Address
from kvcache.errors import ConfigError
from kvcache.os_env import OsEnv
from kvcache.settings.tiers import NvmeSettings
from kvcache.tier.io_queue import Batch, QueuedTier
from kvcache.tier.nvme.allocator import Allocator
from kvcache.tier.nvme.catalog import Catalog, expirations, log
from kvcache.tier.nvme.index import OwnerFile
from kvcache.tier.nvme.inspect import audit, scrub, usage_by_namespace
from kvcache.tier.nvme.restore_order import runs, scan
from kvcache.tier.nvme.secure_erase import wipe
from kvcache.tier.nvme.segment import MAX_IO_BYTES
from kvcache.tier.nvme.store import Settle, Store
from kvcache.tier.tier import Op, Outcome, RecordFilter, ScrubReport, Usage

_MIN_CAPACITY_BYTES = 768 << 10
_FLUSH_BYTES = 64 << 20
_FLUSH_S = 0.5
_FLUSH_RETRY_S = 1.0  # after a failed flush
_WRITE_HANG_S = 10.0  # while a write takes longer than this, the tier refuses new ones
_CLOSE_S = 30.0  # how long `close` waits for the drive


class NvmeTier(QueuedTier):
    """A tier of records in a directory of a local drive; the records are readable again after a restart.

    `durability` says when written data is forced to the medium. A killed process loses no write that said DONE,
    whatever the setting. A record that a power cut takes is a miss.

    - `block`: before a write says DONE.
    - `batch`: when no job waits; with the first write after 64 MiB or half a second; and by `sync`.
    - `none`: whenever the operating system writes it.

    Raises:
        ConfigError: a setting is out of range.
        StoreError: the directory cannot be used; see `kvcache/tier/nvme/directory.py` and `journal.py`.

    Thread safety: all methods may be called from any thread.
    """

    name = "nvme"
    durable = True
    shared = False

    def __init__(
        self, path: str, settings: NvmeSettings, *, served_address: str = "", os_env: OsEnv | None = None
    ) -> None:
        """Open or create the store.

        Args:
            path: the directory; those in `settings` are not used.
            served_address: where other processes reach this cache; shown to a process that wants the same directory.
        """
        if settings.capacity_bytes < _MIN_CAPACITY_BYTES:
            raise ConfigError(
                f"nvme.capacity_bytes = {settings.capacity_bytes}: expected at least {_MIN_CAPACITY_BYTES}"
            )
        super().__init__(
            threads=settings.threads,
            queue_bytes=settings.queue_bytes,
            os_env=os_env,
            log=log,
            work_unit_bytes=MAX_IO_BYTES,
        )
        self.path = path
        self._store = Store(
            path,
            allocator=Allocator(settings.capacity_bytes, settings.segment_bytes),
            durability=settings.durability,
            min_free_bytes=settings.min_free_bytes,
            served_address=served_address,
            os_env=self._os_env,
        )
        self._owners = OwnerFile(self._store.directory)
        self._is_maintaining = False
        self._flush_after = 0.0
        self._safe = False  # the result of `close`

    def _complete_inline(self, batch: Batch) -> bool:
        """Settle calls that need no I/O: `contains`, and writes while another write hangs."""
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
        """Settle the blocks of a batch that are still pending."""
        settle, outcomes = self._settling(batch), batch.ticket.outcomes
        for i in batch.blocks:
            if not outcomes[i].settled:
                settle(i, outcome, check)

    def _write_is_stuck(self) -> bool:
        """Return whether a write hangs, in which case no other write should start."""
        with self._lock:
            oldest = min(self._writing.values(), default=None)
        return oldest is not None and self._os_env.clock.now() - oldest > _WRITE_HANG_S

    def _maintain(self) -> None:
        """Flush and compact when due, on one thread at a time; that thread counts as a writer."""
        while self._flush_due() or self._store.barrier.should_compact:
            with self._lock:
                if self._is_maintaining or not self._queue.try_start_write():
                    return  # the thread that maintains or writes now calls `_maintain` next
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
                self._start_workers()  # for writes that found no thread during maintenance

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
        """Event counts since the tier was opened, by name."""
        return self._store.counters.snapshot()

    def duplicates_of(self, other: NvmeTier) -> list[Address]:
        """Return this tier's records whose names the other tier holds as well."""
        mine, theirs = self._store.catalog.index, other._store.catalog.index
        found = [mine.find(name) for name in mine.locations.keys() & theirs.locations.keys()]
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
        """Read and verify every record, and remove the damaged and the unwanted ones.

        Afterwards a drive suspected of damage is trusted again.

        Args:
            on_progress: called with each record's size in bytes.
            dry_run: only count; remove nothing and keep the suspicion.
        """
        found = scrub(self.catalog, on_progress, dry_run=dry_run, unwanted=unwanted)
        if not dry_run:
            self._store.clear_suspicion()
        return found

    def expirations(self) -> Iterator[tuple[Address, int]]:
        return expirations(self.catalog)

    def keep_files(self, keep: bool) -> None:
        self.catalog.keep_files(keep)

    def wipe(self) -> bool:
        """Overwrite all bytes here that belong to no record, and drop outdated entries from the journal."""
        try:
            wipe(self.catalog)
        except OSError as error:
            log.warning("nvme directory %s: some freed space was not overwritten: %s", self.path, error)
            return False
        return self.compact()

    def note_owner(self, namespace: bytes, owner: Owner) -> None:
        self._owners.note(namespace, owner)

    def owners(self) -> Mapping[bytes, Owner]:
        return self._owners.all()

    def compact(self) -> bool:
        """Compact the journal to its shortest form; False where the drive failed."""
        return self._store.barrier.compact(due=False)

    @property
    def catalog(self) -> Catalog:
        """The catalog, for the tools of this package."""
        return self._store.catalog

    def free_slots(self, record_bytes: int) -> int:
        return self._store.catalog.free_slots(record_bytes)

    def colocated(self, address: Address) -> list[Address]:
        """Return the records of the same segment, this one included."""
        return self._store.addresses_in_segment(address)

    def runs(self) -> Iterator[tuple[Address, bytes]]:
        """Yield all records in runs: the address of a run's first record, and the signatures of the run.

        The records of a run share namespace, group and shard, and each follows its parent. Heads are yielded before
        tails.
        """
        return runs(*self.puts())

    def scan(self) -> Iterator[Address]:
        """Yield all records, each after its parent where the parent is here too."""
        return scan(self.runs())

    def puts(self) -> tuple[NDArray[np.void], dict[int, bytes]]:
        """Return a copy of all put entries of the journal, and the namespaces by number."""
        with self._store.catalog.memory:
            return self._store.catalog.index.puts()

    def has_names(self, addresses: Sequence[Address]) -> list[bool]:
        """Return for each address whether any record has its name; answered from memory."""
        return [found is not None for found in self._store.catalog.names_taken(addresses)]

    def sync(self) -> bool:
        return self._store.sync()

    def usage(self) -> Usage:
        catalog = self._store.catalog
        with catalog.memory:
            return Usage(len(catalog.index.locations), catalog.allocator.used_bytes(), catalog.allocator.capacity_bytes)

    def usage_by_namespace(self) -> dict[bytes, tuple[int, int]]:
        return usage_by_namespace(self.catalog)

    def check(self, on_progress: Callable[[], object] = lambda: None) -> list[str]:
        """Verify every record and the bookkeeping; `on_progress` is called once a record."""
        return audit(self.catalog, on_progress)

    def close(self) -> bool:
        """Run what was submitted, sync it, and release the directory. Idempotent.

        Returns:
            True where everything is as durable as `durability` promises. False where the sync failed, or where the
            drive does not answer within 30 s. In that case queued work fails, and directory and threads stay as they
            are, because a running write cannot be cancelled.
        """
        with self._lock:
            if self._closed:
                return self._safe
            self._closed = True
        idle = self._drain(_CLOSE_S)
        if idle:
            self._executor.close()
            self._safe = self._store.close()
            return self._safe
        log.warning("nvme directory %s: the drive does not answer; closing without it", self._store.directory.path)
        self._fail_queued("hung")
        return False
