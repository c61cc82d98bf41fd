"""What lies in a store, as this process knows it: the tables of its packs.

The listing says which packs there are and is asked now and then; a pack's own table says what is in it. A cold process
reads both, the tables of most packs from one object, the catalogue, which whoever had to read many of them singly
leaves there. The catalogue is a copy and never the truth: what the listing does not name is not there, and a pack that
changed has another mark. Between two listings a prefix that goes on is found by its name, since a pack bears that of
its first block.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field

import msgpack
from xxhash import xxh3_64_digest

from kvcache.block.address import Address
from kvcache.block.record import RecordError
from kvcache.port import Clock
from kvcache.tier.counters import Counters
from kvcache.tier.object.bucket import Bucket, Listed, RefusedError, TakenError
from kvcache.tier.object.name import Names, Place
from kvcache.tier.object.pack import Row, Table, read_table, table_bytes

HEAD_BYTES = 16 << 10
"""Read of a pack to learn its table: that of 170 records."""
WORTH_COPYING = 64
"""Packs that had to be read singly, from which on a catalogue is left for the next."""
AT_ONCE = 512
"""Tables that are read in one call, which has its own time."""
_LISTING_SHARE = 20
"""Listings take at most so small a part of the time."""
_MOMENT_S = 1.0  # how long it is remembered that there is no pack of a name
_MOST_MISSING = 4096


@dataclass(slots=True, eq=False)
class Pack:
    path: str
    mark: str
    table: Table


Found = tuple[Pack, Row]


@dataclass(slots=True)
class Known:
    """Of one namespace."""

    packs: dict[str, Pack] = field(default_factory=dict)
    rows: dict[Place, dict[bytes, Found]] = field(default_factory=dict)
    listed: float | None = None  # when
    pause_s: float = 0.0  # until the next listing
    turn: threading.Lock = field(default_factory=threading.Lock)  # one lists at a time
    listing: Future[None] | None = None  # the last that was begun


class Catalogue:
    def __init__(
        self,
        bucket: Bucket,
        names: Names,
        clock: Clock,
        counters: Counters,
        *,
        refresh_s: float,
        background: Callable[[Callable[[], None]], Future[None]],
    ) -> None:
        """`background` runs a listing, where nobody's time is counted."""
        self._background = background
        self._bucket, self._names, self._clock, self._counters = bucket, names, clock, counters
        self._refresh_s = refresh_s
        self._known: dict[bytes, Known] = {}
        self._missing: dict[str, float] = {}
        self._lock = threading.RLock()  # an executor may run a listing where it is begun

    # asking

    def find(
        self, addresses: Sequence[Address], deadline: float | None, *, ask: bool = True, wait: bool = True
    ) -> list[Found | None]:
        """Where these are; None for what is not there, or has expired. `ask`: look for what is not known by name.
        `wait`: for a listing that is due.
        OSError where the store did not answer and nothing is known."""
        for namespace in {address.namespace for address in addresses}:
            self.refresh(namespace, deadline, wait=wait)
        while True:
            found = [self._look(address) for address in addresses]
            if not ask or not self._asked(addresses, found, deadline):
                return found

    def _asked(self, addresses: Sequence[Address], found: Sequence[Found | None], deadline: float | None) -> bool:
        """Ask by name for the heads of what was not found; whether there is more now."""
        lacking = [address for address, there in zip(addresses, found, strict=True) if there is None]
        tails = {address.signature for address in lacking}
        more = False
        for address in lacking:
            if address.parent not in tails:
                more |= self.ask(address, deadline)
        return more

    def leading(self, addresses: Sequence[Address], deadline: float | None) -> int:
        """How many of a chain are there, from its head."""
        here = 0
        self.refresh(addresses[0].namespace, deadline)
        while here < len(addresses):
            address = addresses[here]
            if self._look(address) is not None:
                here += 1
            elif not self.ask(address, deadline):
                break
        return here

    def ask(self, address: Address, deadline: float | None) -> bool:
        """Look for a pack that begins with this block; whether there is one that was not known."""
        path = self._names.pack(Place.of(address), address.signature)
        now = self._clock.now()
        with self._lock:
            if path in self._space(address.namespace).packs or self._missing.get(path, now) > now:
                return False
        try:
            return self.learn(path, deadline) is not None and self._look(address) is not None
        finally:
            with self._lock:
                if path not in self._space(address.namespace).packs:
                    if len(self._missing) >= _MOST_MISSING:
                        self._missing.clear()
                    self._missing[path] = now + _MOMENT_S

    def learn(self, path: str, deadline: float | None, *, mark: str = "") -> Table | None:
        """Read a pack's table anew; None where there is no pack of this name, or its table is no table."""
        head = self._bucket.get(path, deadline, end=HEAD_BYTES)
        table = self._table(path, head, deadline)
        if table is None:
            self.forget(path)
        else:
            self.add(Pack(path, mark, table))
        return table

    def _table(self, path: str, head: bytes | None, deadline: float | None) -> Table | None:
        try:
            if head is not None and (end := table_bytes(head)) > len(head):
                head = self._bucket.get(path, deadline, end=end)
            return None if head is None else read_table(head)
        except RecordError as error:
            self._counters.add("foreign" if error.foreign else "damaged")
            return None

    def _look(self, address: Address) -> Found | None:
        with self._lock:
            known = self._known.get(address.namespace)
            found = known.rows.get(Place.of(address), {}).get(address.signature) if known else None
        if found is None:
            return None
        row = found[1]
        if row.parent and address.parent and row.parent != address.parent:
            return None
        return None if self._over(row) else found

    def _over(self, row: Row) -> bool:
        return 0 < row.expires_ms <= self._clock.wall() * 1000

    def expired(self, pack: Pack) -> bool:
        """Whether nothing in it is of use any more."""
        return all(map(self._over, pack.table.rows))

    # learning

    def refresh(self, namespace: bytes, deadline: float | None, *, now: bool = False, wait: bool = True) -> None:
        """List a namespace where that is due, or `now`, on a thread of its own: a large one takes longer than who asks
        has time. It is waited for where it is needed, `now` or for the first time (OSError where it failed or is late);
        else by who would `wait`, and others go on with what is known."""
        with self._lock:
            known = self._space(namespace)
        if not (now or self._due(known)):
            return
        must = now or known.listed is None
        future = self._begin(namespace, known)
        if future is None and now:  # one under way may not see what is asked about
            self._await(known.listing, deadline, must=True)
            future = self._begin(namespace, known)
        if must or wait:
            self._await(future or known.listing, deadline, must=must)

    def _begin(self, namespace: bytes, known: Known) -> Future[None] | None:
        """None where a listing is under way."""
        with self._lock:  # whoever finds one under way finds its future as well
            if not known.turn.acquire(blocking=False):
                return None
            try:
                known.listing = self._background(lambda: self._relist(namespace, known))
            except BaseException:
                known.turn.release()
                raise
            return known.listing

    def _relist(self, namespace: bytes, known: Known) -> None:
        try:
            self._list(namespace, known)
        finally:
            known.turn.release()

    def _await(self, listing: Future[None] | None, deadline: float | None, *, must: bool) -> None:
        try:
            if listing is not None:
                listing.result(self._left(deadline))
        except FutureTimeoutError:
            if must:
                raise TimeoutError("timeout") from None
        except OSError:
            if must:
                raise

    def _left(self, deadline: float | None) -> float | None:
        return None if deadline is None else max(0.0, deadline - self._clock.now())

    def _due(self, known: Known) -> bool:
        return known.listed is None or self._clock.now() - known.listed >= known.pause_s

    def _list(self, namespace: bytes, known: Known) -> None:
        began = self._clock.now()
        before = set(known.packs)
        there = self._bucket.list(self._names.namespace(namespace) + "/", None)
        listed = {each.path: each for each in there if self._names.is_pack(each.path)}
        for path in before - listed.keys():
            self.forget(path)
        new = [each for path, each in listed.items() if path not in before or self._changed(known, path, each)]
        if len(new) >= WORTH_COPYING:
            new = self._copied(namespace, new, None)
        for first in range(0, len(new), AT_ONCE):  # what came stays, also where the rest does not
            some = new[first : first + AT_ONCE]
            heads = self._bucket.heads([each.path for each in some], HEAD_BYTES, None)
            for each, head in zip(some, heads, strict=True):
                table = self._table(each.path, head, None)
                if table is not None and table.namespace == namespace:
                    self.add(Pack(each.path, each.mark, table))
        if len(new) >= WORTH_COPYING:
            self._leave_copy(namespace, known, None)
        known.listed = self._clock.now()
        known.pause_s = max(self._refresh_s, _LISTING_SHARE * (known.listed - began))

    def _changed(self, known: Known, path: str, each: Listed) -> bool:
        pack = known.packs.get(path)
        if pack is not None and not pack.mark:
            pack.mark = each.mark  # it was read by name, after it was made
        return pack is None or pack.mark != each.mark

    def _copied(self, namespace: bytes, new: Sequence[Listed], deadline: float | None) -> list[Listed]:
        """Learn from the catalogue what it has; the rest."""
        data = self._bucket.get(self._names.catalogue(namespace), deadline) or b""
        if len(data) < 8 or xxh3_64_digest(data[8:]) != data[:8]:
            return list(new)
        try:
            copies = {str(path): (str(mark), bytes(table)) for path, mark, table in msgpack.unpackb(data[8:])}
        except Exception:  # noqa: BLE001  whoever can write there may write anything
            self._counters.add("damaged")
            return list(new)
        rest = []
        for each in new:
            mark, head = copies.get(each.path, ("", b""))
            table = self._table(each.path, head, deadline) if mark == each.mark else None
            if table is None or table.namespace != namespace or table.size_bytes != each.size:
                rest.append(each)
            else:
                self.add(Pack(each.path, each.mark, table))
        return rest

    def _leave_copy(self, namespace: bytes, known: Known, deadline: float | None) -> None:
        with self._lock:
            packs = [pack for pack in known.packs.values() if pack.mark]
        data = msgpack.packb([(pack.path, pack.mark, pack.table.pack()) for pack in packs])
        try:
            copy = [memoryview(xxh3_64_digest(data) + data)]
            self._bucket.put(self._names.catalogue(namespace), copy, deadline, create=False)
        except (RefusedError, TakenError, TimeoutError):
            self._counters.add("catalogue_left_out")

    def _space(self, namespace: bytes) -> Known:
        return self._known.setdefault(namespace, Known())

    def add(self, pack: Pack) -> None:
        """This pack is there. Of a record that two have, the one that lasts longer counts, else the later one."""
        self.forget(pack.path)
        table = pack.table
        with self._lock:
            known = self._space(table.namespace)
            known.packs[pack.path] = pack
            rows = known.rows.setdefault(Place(table.namespace, table.group, table.shard), {})
            for row in table.rows:
                there = rows.get(row.signature)
                if there is None or there[1].parent != row.parent or _end_ms(there[1]) <= _end_ms(row):
                    rows[row.signature] = pack, row
            self._missing.pop(pack.path, None)

    def forget(self, path: str) -> None:
        """This pack is not there, or not to be used."""
        namespace = self._names.namespace_of(path)
        with self._lock:
            known = self._known.get(namespace) if namespace else None
            pack = known.packs.pop(path, None) if known else None
            if known is None or pack is None:
                return
            table = pack.table
            rows = known.rows.get(Place(table.namespace, table.group, table.shard), {})
            for row in table.rows:
                if (found := rows.get(row.signature)) is not None and found[0] is pack:
                    del rows[row.signature]

    def packs(self, namespace: bytes) -> list[Pack]:
        with self._lock:
            return list(self._space(namespace).packs.values())

    def rows(self, namespace: bytes) -> list[Found]:
        """Each record that is there, once."""
        with self._lock:
            return [found for rows in self._space(namespace).rows.values() for found in rows.values()]


def _end_ms(row: Row) -> float:
    return row.expires_ms or float("inf")
