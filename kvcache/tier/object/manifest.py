"""The manifest: this process's index of a store, built from the tables of its packs.

A listing, made now and then, names the packs; each pack's table names its records. A cold process reads both. It takes
most tables from one object, the manifest copy (`catalogue` in the store). A process that read many tables one by one
writes that copy. The copy is never authoritative: a pack exists only if the listing names it, and a changed pack has
another etag. Between two listings a pack is found by its name, which holds the signature of its first block.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field

import msgpack
from xxhash import xxh3_64_digest

from kvcache.block.record import Address, RecordError
from kvcache.errors import INVALID_DATA
from kvcache.os_env import Clock
from kvcache.tier.breaker import Counters
from kvcache.tier.object.bucket import Bucket, ListedObject, ObjectExistsError, RefusedError
from kvcache.tier.object.keys import ObjectNames, PackLocation
from kvcache.tier.object.pack import Row, Table, read_table, table_bytes
from kvcache.tier.tier import Outcome

# Tables of packs: read from each pack, or many from the manifest copy

HEAD_BYTES = 16 << 10
"""First read of a pack: enough for the table of 170 records."""
COPY_AFTER_READS = 64
"""Single reads of tables from which on a process writes the manifest copy."""
MAX_COPY_BYTES = 64 << 20
"""Largest manifest copy."""
READ_BATCH_PACKS = 512
"""Tables that one call reads, within that call's time."""


@dataclass(slots=True, eq=False)
class Pack:
    path: str
    etag: str
    table: Table


class PackTables:
    def __init__(self, bucket: Bucket, names: ObjectNames, counters: Counters) -> None:
        self.bucket, self.names, self.counters = bucket, names, counters

    def of(self, path: str, deadline: float | None, head: bytes | None = None) -> Table | None:
        """Return the table of a pack; None where it cannot be read, or belongs under another path.

        A foreign path occurs because any writer of the store can copy a folder.

        Args:
            head: The first bytes of the pack, where the caller has them.

        Raises:
            OSError: The store did not answer.
        """
        try:
            if head is None:
                head = self.bucket.get(path, deadline, end=HEAD_BYTES)
            if head is not None and (end := table_bytes(head)) > len(head):
                head = self.bucket.get(path, deadline, end=end)
            if head is None:
                return None
            table = read_table(head)
        except RecordError as error:
            self.counters.add("foreign" if error.foreign else "damaged")
            return None
        location = PackLocation(table.namespace, table.group, table.shard)
        if not self.names.is_path_of(path, location, table.rows[0].signature):
            self.counters.add("foreign")
            return None
        return table

    def copies(self, namespace: bytes) -> ManifestCopy:
        return ManifestCopy(self, namespace)


class ManifestCopy:
    """The manifest copy of a namespace, read when enough packs need a table; counts the tables that it lacked."""

    def __init__(self, tables: PackTables, namespace: bytes) -> None:
        self._tables = tables
        self._path = tables.names.manifest(namespace)
        self._copies: dict[str, tuple[str, bytes]] | None = None
        self._singly = 0

    @property
    def should_publish(self) -> bool:
        return self._singly >= COPY_AFTER_READS

    def read(self, listed: Sequence[ListedObject]) -> Iterator[Pack]:
        """Yield the packs among the listed objects, with their tables."""
        if len(listed) >= COPY_AFTER_READS and self._copies is None:
            self._copies = self._load()
        singly: list[ListedObject] = []
        for each in listed:
            copy = (self._copies or {}).get(each.path)
            table = self._tables.of(each.path, None, copy[1]) if copy is not None and copy[0] == each.etag else None
            if table is None or table.size_bytes != each.size:
                singly.append(each)
            else:
                yield Pack(each.path, each.etag, table)
        self._singly += len(singly)
        for first in range(0, len(singly), READ_BATCH_PACKS):
            some = singly[first : first + READ_BATCH_PACKS]
            heads = self._tables.bucket.heads([each.path for each in some], HEAD_BYTES, None)
            for each, begin in zip(some, heads, strict=True):
                table = self._tables.of(each.path, None, begin) if begin is not None else None
                if table is not None:
                    yield Pack(each.path, each.etag, table)

    def _load(self) -> dict[str, tuple[str, bytes]]:
        """Return etag and table by path. A table is valid only for its etag."""
        data = self._tables.bucket.get(self._path, None, end=MAX_COPY_BYTES + 1) or b""
        if not 8 <= len(data) <= MAX_COPY_BYTES or xxh3_64_digest(data[8:]) != data[:8]:
            return {}
        try:
            return {str(path): (str(etag), bytes(table)) for path, etag, table in msgpack.unpackb(data[8:])}
        except INVALID_DATA:  # any writer of the store may put any bytes here
            self._tables.counters.add("damaged")
            return {}

    def publish(self, packs: Sequence[Pack]) -> None:
        """Write the manifest copy, with as many packs as fit in MAX_COPY_BYTES."""
        copies, size = [], 0
        for pack in packs:
            size += len(pack.path) + len(pack.etag) + pack.table.table_bytes + 32  # 32: the most that msgpack adds
            if pack.etag and size <= MAX_COPY_BYTES:
                copies.append((pack.path, pack.etag, pack.table.pack()))
        data = msgpack.packb(copies)
        try:
            self._tables.bucket.put(self._path, [memoryview(xxh3_64_digest(data) + data)], None, create=False)
        except (RefusedError, ObjectExistsError, TimeoutError):
            self._tables.counters.add("catalogue_left_out")


MAX_RECORDS = 1 << 20
"""Records in the index, at about 400 bytes of memory each. Packs beyond them are found only by name."""
_LISTING_TIME_FACTOR = 20
"""Least pause between listings, as a multiple of the time that the last one took."""
_DEADLINE_SHARE = 0.5
"""The part of a call's time that it waits for a listing."""
_MISSING_TTL_S = 1.0  # how long a probe's "no such pack" stays valid
_MAX_MISSING = 4096


PackEntry = tuple[Pack, Row]


@dataclass(slots=True)
class NamespaceState:
    """The index of one namespace."""

    packs: dict[str, Pack] = field(default_factory=dict)
    records: int = 0  # in all packs
    rows: dict[PackLocation, dict[bytes, PackEntry]] = field(default_factory=dict)
    listed: float | None = None  # when the last listing ended
    pause_s: float = 0.0  # from the end of a listing to the next one
    turn: threading.Lock = field(default_factory=threading.Lock)  # held by the listing that runs
    listing: Future[None] | None = None  # the last one begun


class Manifest:
    def __init__(
        self,
        bucket: Bucket,
        names: ObjectNames,
        clock: Clock,
        counters: Counters,
        *,
        refresh_s: float,
        background: Callable[[Callable[[], None]], Future[None]],
    ) -> None:
        """`background` runs a listing on another thread, outside any call's deadline."""
        self._background = background
        self._bucket, self._names, self._clock = bucket, names, clock
        self._tables = PackTables(bucket, names, counters)
        self._refresh_s = refresh_s
        self._known: dict[bytes, NamespaceState] = {}
        self._records = 0  # in all known packs
        self._missing: dict[str, float] = {}
        self._lock = threading.RLock()  # reentrant: an executor may run a listing on the calling thread

    # lookups

    def find(
        self, addresses: Sequence[Address], deadline: float | None, *, probe: bool = True, wait: bool = True
    ) -> list[PackEntry | Outcome]:
        """Return the pack and row of each record, or an outcome.

        The outcome is NOT_FOUND where the store does not have the record or it has expired, and TIMED_OUT where the
        listing that would show this was late.

        Args:
            probe: Look for unknown packs by name.
            wait: Wait for a listing that is due.

        Raises:
            OSError: The store did not answer, and nothing is known of the namespace.
        """
        namespaces = {address.namespace for address in addresses}
        # refresh before the lookup: a listing that ends in between may name packs that the lookup missed
        late = {namespace for namespace in namespaces if not self.refresh(namespace, deadline, wait=wait)}
        lacked = len(addresses) + 1
        while True:
            hits: list[PackEntry | Outcome] = [
                self._look(address) or (Outcome.TIMED_OUT if address.namespace in late else Outcome.NOT_FOUND)
                for address in addresses
            ]
            lacking = sum(isinstance(each, Outcome) for each in hits)
            # a probed pack may displace another one when the index is full, so stop without progress
            if lacking >= lacked or not probe or not self._probe_missing(addresses, hits, deadline):
                return hits
            lacked = lacking

    def _probe_missing(
        self, addresses: Sequence[Address], hits: Sequence[PackEntry | Outcome], deadline: float | None
    ) -> bool:
        """Probe by name for the heads of missing chains; return whether the index grew."""
        lacking = [a for a, existing in zip(addresses, hits, strict=True) if isinstance(existing, Outcome)]
        tails = {address.signature for address in lacking}
        more = False
        for address in lacking:
            if address.parent not in tails:
                more |= self.probe(address, deadline)
        return more

    def match_prefix(self, addresses: Sequence[Address], deadline: float | None) -> int:
        """Return how many blocks of a chain the store holds, counted from its head."""
        present = 0
        self.refresh(addresses[0].namespace, deadline)
        while present < len(addresses):
            address = addresses[present]
            if self._look(address) is not None:
                present += 1
            elif not self.probe(address, deadline):
                break
        return present

    def probe(self, address: Address, deadline: float | None) -> bool:
        """Look for a pack that begins with this block; return whether a new one was found."""
        path = self._names.pack(PackLocation.of(address), address.signature)
        now = self._clock.now()
        with self._lock:
            if path in self._space(address.namespace).packs or self._missing.get(path, now) > now:
                return False
        table = self.refresh_table(path, deadline)  # raises without an answer, which is not cached
        with self._lock:
            if path not in self._space(address.namespace).packs:
                if len(self._missing) >= _MAX_MISSING:
                    self._missing.clear()
                self._missing[path] = now + _MISSING_TTL_S
        return table is not None and self._look(address) is not None

    def refresh_table(self, path: str, deadline: float | None, *, etag: str = "") -> Table | None:
        """Read a pack's table again; None where no pack has this name, or the table belongs to another name."""
        table = self._tables.of(path, deadline)
        if table is None:
            self.forget(path)
        else:
            self.add(Pack(path, etag, table))
        return table

    def _look(self, address: Address) -> PackEntry | None:
        with self._lock:
            known = self._known.get(address.namespace)
            hits = known.rows.get(PackLocation.of(address), {}).get(address.signature) if known else None
        if hits is None:
            return None
        row = hits[1]
        if row.parent and address.parent and row.parent != address.parent:
            return None
        return None if self._over(row) else hits

    def _over(self, row: Row) -> bool:
        return 0 < row.expires_ms <= self._clock.wall() * 1000

    def expired(self, pack: Pack) -> bool:
        """Return whether every record of the pack has expired."""
        return all(map(self._over, pack.table.rows))

    # updates

    def refresh(self, namespace: bytes, deadline: float | None, *, now: bool = False, wait: bool = True) -> bool:
        """List a namespace on the listing thread where that is due: a large listing outlasts a caller's deadline.

        Args:
            now: List even where it is not due, and wait for the listing. Raises OSError where it fails or is late.
            wait: Wait for a due listing, for a part of the call's time, then continue with the known packs. The first
                listing of a namespace is waited for in any case, and raises OSError where it fails.

        Returns:
            Whether an unknown record is truly absent: False where the awaited listing failed or is late.
        """
        with self._lock:
            known = self._space(namespace)
        if not (now or self._due(known)):
            return True
        first = known.listed is None
        waited = now or first or wait
        if not waited and self._bucket.breaker.is_open():
            return True  # a listing would use up the breaker's probe, which the caller's own request needs
        future = self._begin(namespace, known)
        if future is None and now:  # a listing that runs already may miss new packs
            self._await(known.listing, deadline, must=False)
            future = self._begin(namespace, known)
        if now:
            if not self._await(future or known.listing, deadline, must=True):
                raise TimeoutError("timeout")
        elif waited:
            listing, began = future or known.listing, self._clock.now()
            end = began + self._bucket.timeout_s if deadline is None else deadline
            if not self._await(listing, began + _DEADLINE_SHARE * (end - began), must=first):
                return False
            return listing is None or listing.exception() is None
        return True

    def _begin(self, namespace: bytes, known: NamespaceState) -> Future[None] | None:
        """Begin a listing and return its future; None where a listing is running."""
        with self._lock:  # so that a caller that finds a running listing also finds its future
            if not known.turn.acquire(blocking=False):
                return None
            try:
                known.listing = self._background(lambda: self._list_in_background(namespace, known))
            except BaseException:
                known.turn.release()
                raise
            return known.listing

    def _list_in_background(self, namespace: bytes, known: NamespaceState) -> None:
        try:
            self._list(namespace, known)
        finally:
            known.turn.release()

    def _await(self, listing: Future[None] | None, deadline: float | None, *, must: bool) -> bool:
        """Return whether the listing ended by the deadline. `must`: raise OSError where it failed."""
        if listing is None:
            return True
        ended = bool(wait_for([listing], self._remaining(deadline)).done)
        if ended and must:
            listing.result()
        return ended

    def _remaining(self, deadline: float | None) -> float | None:
        return None if deadline is None else max(0.0, deadline - self._clock.now())

    def _due(self, known: NamespaceState) -> bool:
        return known.listed is None or self._clock.now() - known.listed >= known.pause_s

    def _list(self, namespace: bytes, known: NamespaceState) -> None:
        began = self._clock.now()
        for _ in self.iterate_packs(namespace):
            pass
        known.listed = self._clock.now()
        known.pause_s = max(self._refresh_s, _LISTING_TIME_FACTOR * (known.listed - began))

    def iterate_packs(self, namespace: bytes) -> Iterator[Pack]:
        """List a namespace page by page, index its packs where they fit, and yield them.

        Packs of earlier pages stay indexed if a later page fails. The end of the listing drops packs that it did not
        name.

        Raises:
            OSError: A page failed.
        """
        with self._lock:
            known = self._space(namespace)
            unlisted = set(known.packs)
        copies = self._tables.copies(namespace)
        for page in self._bucket.pages(self._names.namespace(namespace) + "/"):
            listed = [each for each in page if self._names.is_pack(each.path)]
            unlisted.difference_update(each.path for each in listed)
            existing = [self._same(known, each) for each in listed]
            yield from (pack for pack in existing if pack is not None)
            for pack in copies.read([each for each, pack in zip(listed, existing, strict=True) if pack is None]):
                if self._records + len(pack.table.rows) <= MAX_RECORDS:
                    self.add(pack)
                yield pack
        for path in unlisted:
            self.forget(path)
        if copies.should_publish:
            copies.publish(self.packs(namespace))

    def _same(self, known: NamespaceState, each: ListedObject) -> Pack | None:
        """Return the known pack of a listed object, where its etag is unchanged."""
        pack = known.packs.get(each.path)
        if pack is not None and not pack.etag:
            pack.etag = each.etag  # the pack was read by name, which gives no etag
        return pack if pack is not None and pack.etag == each.etag else None

    def _space(self, namespace: bytes) -> NamespaceState:
        return self._known.setdefault(namespace, NamespaceState())

    def add(self, pack: Pack) -> None:
        """Index a pack. Of a record in two packs the one that expires later counts, else the one added later."""
        table = pack.table
        with self._lock:
            self.forget(pack.path)
            known = self._space(table.namespace)
            known.records += len(table.rows)
            self._records += len(table.rows)
            self._make_room()
            known.packs[pack.path] = pack
            rows = known.rows.setdefault(PackLocation(table.namespace, table.group, table.shard), {})
            for row in table.rows:
                existing = rows.get(row.signature)
                if existing is None or existing[1].parent != row.parent or _end_ms(existing[1]) <= _end_ms(row):
                    rows[row.signature] = pack, row
            self._missing.pop(pack.path, None)

    def _make_room(self) -> None:
        """Drop the oldest packs of the namespace with most records, so that it does not displace other namespaces."""
        while self._records > MAX_RECORDS:
            fullest = max((k for k in self._known.values() if k.packs), key=lambda k: k.records, default=None)
            if fullest is None:
                return
            while self._records > MAX_RECORDS and fullest.packs:
                self._drop(fullest, next(iter(fullest.packs)))

    def forget(self, path: str) -> None:
        """Drop a pack that does not exist, or must not be used."""
        namespace = self._names.namespace_of(path)
        with self._lock:
            known = self._known.get(namespace) if namespace else None
            if known is not None and path in known.packs:
                self._drop(known, path)

    def _drop(self, known: NamespaceState, path: str) -> None:
        pack = known.packs.pop(path)
        table = pack.table
        known.records -= len(table.rows)
        self._records -= len(table.rows)
        rows = known.rows.get(PackLocation(table.namespace, table.group, table.shard), {})
        for row in table.rows:
            if (hits := rows.get(row.signature)) is not None and hits[0] is pack:
                del rows[row.signature]

    def packs(self, namespace: bytes) -> list[Pack]:
        with self._lock:
            return list(self._space(namespace).packs.values())


def _end_ms(row: Row) -> float:
    return row.expires_ms or float("inf")
