"""The object tier: a `Tier` over an object store that a fleet of caches shares.

The tier sets no capacity and evicts nothing. Lifecycle rules of the store, `kvcache object prune` and the records' own
expiry remove objects.

Records of a chain that are written together share one object, a pack (`pack.py`): a store takes about as long for
100 KiB as for 8 MiB. `manifest.py` indexes the packs, `store.py` reads and writes them, and `bucket.py` calls the store
within deadlines.

Threads: `connections` workers run batches, one thread runs lookups, one runs listings, and one runs the event loop of
all calls to the store. Each wait for a call ends at the call's deadline, so a store that hangs holds no thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from kvcache.block.cipher import RecordSigner
from kvcache.block.namespace import Owner
from kvcache.block.record import Address
from kvcache.os_env import OsEnv
from kvcache.settings.tiers import ObjectSettings
from kvcache.tier.breaker import CircuitBreaker
from kvcache.tier.io_queue import Batch
from kvcache.tier.object.bucket import Bucket, RefusedError, log, open_store
from kvcache.tier.object.inspect import StoreInspector
from kvcache.tier.object.keys import ObjectNames
from kvcache.tier.object.manifest import Manifest
from kvcache.tier.object.store import Settle, Store
from kvcache.tier.remote import RemoteTier
from kvcache.tier.tier import Op, Outcome, Usage

_CLOSE_S = 5.0  # how long `close` waits for running calls before it drops them
_UNBOUNDED_BYTES = 1 << 60


class ObjectTier(RemoteTier):
    """Records in an object store: S3 and compatible stores, Google Cloud Storage, Azure, or a directory.

    The constructor sends nothing to the store. An unreachable store is a miss until it answers.
    """

    name = "object"

    def __init__(self, settings: ObjectSettings, os_env: OsEnv | None = None) -> None:
        names, key_file, timeout_s = ObjectNames(settings.prefix), settings.signing_key_file, settings.timeout_s
        signer = RecordSigner.of(key_file, "object.signing_key_file") if key_file else None
        backend = open_store(
            settings.url,
            endpoint=settings.endpoint,
            region=settings.region,
            credentials_file=settings.credentials_file,
            timeout_s=timeout_s,
        )
        super().__init__(
            connections=settings.connections,
            queue_bytes=settings.queue_bytes,
            os_env=os_env,
            log=log,
            work_unit_bytes=settings.pack_bytes,
            spread=1,
        )
        clock = self._os_env.clock
        self.where, self._timeout_s, self._names = settings.url, timeout_s, names
        self._bucket = Bucket(
            backend,
            settings.url,
            timeout_s=timeout_s,
            max_concurrent_calls=4 * settings.connections,
            clock=clock,
            counters=self._counters,
        )
        self._listing_executor = self._os_env.executor(1, f"{self.name}-listing")
        self._manifest = Manifest(
            self._bucket,
            names,
            clock,
            self._counters,
            refresh_s=settings.refresh_s,
            background=self._listing_executor.submit,
        )
        self._write_breaker = CircuitBreaker(clock, pause_s=0.25, max_pause_s=10.0)
        self._store = Store(
            self._bucket,
            self._manifest,
            names,
            self._counters,
            self._write_breaker,
            pack_bytes=settings.pack_bytes,
            signer=signer,
        )
        self.inspector = StoreInspector(self._bucket, self._manifest, names)

    def _failing(self, op: Op) -> bool:
        return self._bucket.breaker.is_open() or (op == "write" and self._write_breaker.is_open())

    def _execute(self, piece: Batch) -> None:
        settle = self._settle(piece)
        try:
            getattr(self._store, piece.op)(piece, settle)
        except TimeoutError:
            self._settle_rest(piece, Outcome.TIMED_OUT, "timeout")
        except RefusedError as error:
            self._settle_rest(piece, Outcome.FAILED, error.reason)

    def _settle(self, batch: Batch) -> Settle:
        counters, ticket = self._counters, batch.ticket

        def settle(i: int, outcome: Outcome, check: str = "") -> None:
            counters.add(f"{batch.op}_{outcome.value}")
            if outcome is Outcome.DONE and batch.segments:
                counters.add(f"{batch.op}_bytes", batch.size_bytes(i))
            ticket.settle(i, outcome, check)

        return settle

    def _settle_rest(self, batch: Batch, outcome: Outcome, check: str = "") -> None:
        settle = self._settle(batch)
        for i in batch.blocks:
            if not batch.ticket.settled(i):
                settle(i, outcome, check)

    def _match_prefix(self, addresses: Sequence[Address], deadline: float | None) -> int:
        return self._manifest.match_prefix(addresses, deadline)

    @property
    def breaker(self) -> str:
        return "open" if self._bucket.breaker.is_open() else "closed"

    def free_slots(self, record_bytes: int) -> int:
        """Return 0 while the write breaker is open; else no limit, because a store reports none."""
        return 0 if self._write_breaker.is_open() else _UNBOUNDED_BYTES // record_bytes

    def scan(self) -> Iterator[Address]:
        """Return all records under this prefix, parents first. Reads the tables of all packs."""
        try:
            return iter(self.inspector.addresses())
        except OSError:
            return iter(())

    def purge(self, namespace: bytes) -> int:
        """Delete every object of the namespace, until a listing shows none; return how many records there were.

        Raises:
            OSError: The store refused, or other processes go on storing.
        """
        return self.inspector.purge(namespace)

    def note_owner(self, namespace: bytes, owner: Owner) -> None:
        self.inspector.note_owner(namespace, owner)

    def owners(self) -> Mapping[bytes, Owner]:
        """Return the owner of each namespace. Raises OSError where the store does not answer."""
        return self.inspector.owners()

    def usage(self) -> Usage:
        """Return the usage of all namespaces under this prefix, by any writer; 0 while the store does not answer."""
        try:
            return self.inspector.usage()
        except OSError:
            return Usage(0, 0, 0)

    def check(self) -> list[str]:
        """Return faults: objects that are no readable pack, or of a wrong length. Reads no payload."""
        if self._closed:
            return []
        try:
            return self.inspector.check()
        except OSError:
            return [f"object {self.where}: the store does not answer"]

    def health_issues(self) -> list[str]:
        write_breaker = not self._closed and (self._bucket.breaker.is_open() or self._write_breaker.is_open())
        return [f"object {self.where}: the store does not answer or refuses; the tier retries"] if write_breaker else []

    def _disconnect(self) -> None:
        self._bucket.close()

    def close(self) -> bool:
        """Finish submitted work for up to 5 s, then drop the calls; unfinished work fails. Idempotent."""
        closed = self._close(_CLOSE_S)
        self._listing_executor.close()
        return closed
