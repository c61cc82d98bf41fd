"""Reads, writes, lookups and removals of a batch of records. After an OSError the caller settles the remaining blocks.

A read fetches the records of a pack together, compares the whole identity and every checksum, and only then fills the
caller's segments. A late read therefore leaves the segments untouched. A write packs the new records and creates an
object only under a free name.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

from kvcache.block.cipher import RecordSigner
from kvcache.block.record import Address, RecordError, read_header, verify
from kvcache.tier.breaker import CircuitBreaker, Counters
from kvcache.tier.io_queue import Batch
from kvcache.tier.object.bucket import Bucket, ObjectExistsError, RefusedError
from kvcache.tier.object.keys import ObjectNames, PackLocation
from kvcache.tier.object.manifest import Manifest, Pack
from kvcache.tier.object.pack import MAX_ROWS, PackRecord, Row, Table, build_pack
from kvcache.tier.tier import Outcome, Segments, flatten, sealed_record

DONE, NOT_FOUND, FAILED = Outcome.DONE, Outcome.NOT_FOUND, Outcome.FAILED
Settle = Callable[[int, Outcome, str], None]
MULTIPART_BYTES = 32 << 20
"""Larger objects are uploaded in parts."""
_MAX_TRIES = 3  # attempts against concurrent writers since the last attempt that made progress


class Store:
    def __init__(
        self,
        bucket: Bucket,
        manifest: Manifest,
        names: ObjectNames,
        counters: Counters,
        write_breaker: CircuitBreaker,
        *,
        pack_bytes: int,
        signer: RecordSigner | None,
    ) -> None:
        """Create the operations on one store.

        Args:
            write_breaker: Stops only writes: a store may refuse writes and still serve reads.
            signer: Signs each record that is written; reads refuse records without a valid signature.
        """
        self._bucket, self._manifest, self._names, self._counters = bucket, manifest, names, counters
        self._write_breaker, self._signer, self._pack_bytes = write_breaker, signer, pack_bytes
        self._supports_create = True  # the store can create without overwriting
        self._remove_lock = threading.Lock()

    def contains(self, batch: Batch, settle: Settle) -> None:
        for i, located in zip(batch.blocks, self._manifest.find(batch.block_addresses, batch.deadline), strict=True):
            settle(i, located if isinstance(located, Outcome) else DONE, "")

    # reads

    def read(self, batch: Batch, settle: Settle) -> None:
        remaining = list(batch.blocks)
        for again in (False, True):  # a missing pack may have been rewritten without some of its records
            located = self._manifest.find([batch.addresses[i] for i in remaining], batch.deadline, wait=False)
            packs: dict[Pack, list[tuple[int, Row]]] = {}
            for i, existing in zip(remaining, located, strict=True):
                if isinstance(existing, Outcome):
                    settle(i, existing, "")
                else:
                    packs.setdefault(existing[0], []).append((i, existing[1]))
            remaining = []
            for pack, wanted in packs.items():
                remaining += self._read_pack(batch, pack, sorted(wanted, key=lambda each: each[1].at), settle)
            if not remaining:
                return
            if not again:
                self._manifest.refresh(batch.addresses[remaining[0]].namespace, batch.deadline, now=True)
        for i in remaining:
            settle(i, NOT_FOUND, "")

    def _read_pack(self, batch: Batch, pack: Pack, wanted: Sequence[tuple[int, Row]], settle: Settle) -> list[int]:
        """Read records of one pack; return the blocks to look up again, because the pack changed or is missing."""
        parts = [(row.at, row.at + row.size) for _, row in wanted]
        got = self._bucket.ranges(pack.path, parts, batch.deadline)
        if got is None:
            self._counters.add("gone_packs")
            self._manifest.forget(pack.path)
            return [i for i, _ in wanted]
        bad: list[tuple[int, Row, str]] = []
        for (i, row), data in zip(wanted, got, strict=True):
            try:
                self._take(batch.addresses[i], data, row, batch.segments[i])
                settle(i, DONE, "")
            except RecordError as error:
                if error.check == "room":
                    settle(i, FAILED, "length")
                elif error.foreign:
                    settle(i, Outcome.INCOMPATIBLE, error.check)
                else:
                    bad.append((i, row, error.check))
        if bad and self._manifest.refresh_table(pack.path, batch.deadline, etag=pack.etag) != pack.table:
            return [i for i, _, _ in bad]  # the pack changed since its table was read
        for i, row, check in bad:
            self._counters.add("damaged")
            self._counters.add(f"damaged_{check}")
            self.remove_rows(pack, {row.signature}, batch.deadline)
            settle(i, Outcome.DAMAGED, check)
        return []

    def _take(self, address: Address, data: memoryview, row: Row, segments: Segments) -> None:
        """Verify a record and copy it to the caller's segments. Raises RecordError where that fails."""
        if len(data) != row.size:
            raise RecordError("short", f"{len(data)} bytes of {row.size}")
        header = read_header(data)
        body = data[header.header_bytes :]
        if len(body) != header.stored_bytes:
            raise RecordError("length", f"{len(body)} bytes of payload: {header.stored_bytes} were stored")
        verify(data, body, address)
        if self._signer is not None and not self._signer.signed(bytes(data[: header.header_bytes]), header, [body]):
            raise RecordError("digest", "not signed by a configured key")
        area, pieces = segments[0].cast("B"), flatten(segments[1:], len(body))
        if len(area) < header.header_bytes or sum(map(len, pieces)) < len(body):
            raise RecordError("room", "the caller's segments are too small")
        area[: header.header_bytes] = data[: header.header_bytes]
        area[header.header_bytes :] = bytes(len(area) - header.header_bytes)
        at = 0
        for piece in pieces:
            piece[:] = body[at : at + len(piece)]
            at += len(piece)

    # writes

    def write(self, batch: Batch, settle: Settle) -> None:
        new: list[PackRecord] = []
        known = self._manifest.find(batch.block_addresses, batch.deadline, probe=False, wait=False)
        for i, existing in zip(batch.blocks, known, strict=True):
            try:
                record = self._cut(i, batch.addresses[i], batch.segments[i])
            except RecordError as error:
                settle(i, FAILED, error.check)
                continue
            if isinstance(existing, Outcome):
                new.append(record)
            else:
                settle(i, DONE, "")
        if new and not self._write_breaker.allows():
            for record in new:
                settle(record.i, FAILED, "breaker")
            return
        for run in self._runs(new):
            self._write_run(run, batch.deadline, settle)

    def _cut(self, i: int, address: Address, segments: Segments) -> PackRecord:
        _, head, payload = sealed_record(address, segments, self._signer)
        return PackRecord(i, address, [memoryview(head), *payload])

    def _runs(self, records: Sequence[PackRecord]) -> Iterator[list[PackRecord]]:
        """Split records into runs: consecutive blocks of a chain, at most one pack each."""
        run: list[PackRecord] = []
        size = 0
        for record in records:
            behind = bool(run) and record.address.parent == run[-1].address.signature
            together = behind and PackLocation.of(record.address) == PackLocation.of(run[0].address)
            if run and (not together or len(run) == MAX_ROWS or size + record.size > self._pack_bytes):
                yield run
                run, size = [], 0
            run.append(record)
            size += record.size
        if run:
            yield run

    def _write_run(self, run: list[PackRecord], deadline: float | None, settle: Settle) -> None:
        tries = 0
        while tries < _MAX_TRIES:
            try:
                self._put(run, deadline)
            except ObjectExistsError:
                remaining = self._reconcile_run(run, deadline, settle)
                if not remaining:
                    return
                tries, run = (0 if len(remaining) < len(run) else tries + 1), remaining
                continue
            except RefusedError as error:
                if error.reason == "unsupported" and self._supports_create:
                    self._supports_create, tries = False, tries + 1
                    continue
                self._refused(run, error.reason, settle)
                return
            self._write_breaker.record_success()
            for record in run:
                settle(record.i, DONE, "")
            return
        for record in run:
            settle(record.i, FAILED, "raced")

    def _refused(self, run: Sequence[PackRecord], reason: str, settle: Settle) -> None:
        self._counters.add("refused", len(run))
        if (
            reason != "breaker" and self._write_breaker.record_failure()
        ):  # a refusal by the bucket's breaker says nothing about the store
            self._counters.add("writes_stopped")
        for record in run:
            settle(record.i, FAILED, reason)

    def _put(self, run: Sequence[PackRecord], deadline: float | None) -> None:
        """Write a pack. Raises ObjectExistsError where another pack begins with the same block."""
        table, pieces = build_pack(run)
        path = self._names.pack(PackLocation.of(run[0].address), table.rows[0].signature)
        whole = table.size_bytes <= MULTIPART_BYTES
        if self._supports_create and whole:
            etag = self._bucket.put(path, pieces, deadline, create=True)
        elif self._manifest.probe(run[0].address, deadline):
            raise ObjectExistsError
        else:
            side_path = self._names.pack(PackLocation.of(run[0].address), table.rows[0].signature, other=True)
            part_bytes = None if whole else self._pack_bytes
            etag = self._bucket.put(side_path, pieces, deadline, create=False, part_bytes=part_bytes)
            path, etag = (
                (path, "")
                if self._supports_create and self._moved(side_path, path, table, deadline)
                else (side_path, etag)
            )
        self._manifest.add(Pack(path, etag, table))
        self._counters.add("written_packs")

    def _moved(self, side_path: str, path: str, table: Table, deadline: float | None) -> bool:
        """Rename a pack to the name that readers probe; return whether that succeeded.

        Where it fails, the pack keeps its other name and a listing finds it. Raises ObjectExistsError where the name
        exists.
        """
        try:
            self._bucket.move(side_path, path, deadline)
        except ObjectExistsError:
            self._bucket.delete([side_path], deadline)
            raise
        except TimeoutError:
            return self._move_arrived(side_path, path, table)
        except OSError:
            return False
        return True

    def _move_arrived(self, side_path: str, path: str, table: Table) -> bool:
        """Return whether a move that timed out arrived, and delete the source, which such a move may leave behind.

        Checks once, within `timeout_s`. Raises ObjectExistsError where the name holds another pack.
        """
        try:
            existing = self._manifest.refresh_table(path, None)
            if existing is not None:
                self._bucket.delete([side_path], None)
        except OSError:
            return False
        if existing is not None and existing != table:
            raise ObjectExistsError
        return existing is not None

    def _reconcile_run(self, run: list[PackRecord], deadline: float | None, settle: Settle) -> list[PackRecord]:
        """Settle the records that a concurrent writer's pack holds; return the records still to write."""
        path = self._names.pack(PackLocation.of(run[0].address), run[0].address.signature)
        table = self._manifest.refresh_table(path, deadline)
        if table is None:  # no reader can use this object
            self._bucket.delete([path], deadline)
            return run
        existing = {row.signature for row in table.rows}
        remaining = self._missing_records(run, deadline)
        stale = existing & {record.address.signature for record in remaining}
        if stale:  # expired records, or with another parent: remove only these
            self.remove_rows(Pack(path, "", table), stale, deadline)
            remaining = self._missing_records(run, deadline)
        missing = {record.i for record in remaining}
        for record in run:
            if record.i not in missing:
                settle(record.i, DONE, "")
        return remaining

    def _missing_records(self, run: Sequence[PackRecord], deadline: float | None) -> list[PackRecord]:
        located = self._manifest.find([record.address for record in run], deadline, probe=False, wait=False)
        return [record for record, existing in zip(run, located, strict=True) if isinstance(existing, Outcome)]

    # removals

    def remove(self, batch: Batch, settle: Settle) -> None:
        packs: dict[Pack, list[tuple[int, Row]]] = {}
        for i, existing in zip(batch.blocks, self._manifest.find(batch.block_addresses, batch.deadline), strict=True):
            if isinstance(existing, Outcome):
                settle(i, existing, "")
            else:
                packs.setdefault(existing[0], []).append((i, existing[1]))
        for pack, wanted in packs.items():
            removed = self.remove_rows(pack, {row.signature for _, row in wanted}, batch.deadline)
            for i, row in wanted:
                settle(i, DONE if row.signature in removed else NOT_FOUND, "")

    def remove_rows(self, pack: Pack, removed: set[bytes], deadline: float | None) -> set[bytes]:
        """Remove records from a pack and return the signatures that it held; other records move to a new pack."""
        with self._remove_lock:
            table = self._manifest.refresh_table(pack.path, deadline, etag=pack.etag)
            if table is None:
                return set()
            kept = [row for row in table.rows if row.signature not in removed]
            data = self._bucket.get(pack.path, deadline) if kept else None
            if data is not None:
                view = memoryview(data)
                whole = [row for row in kept if row.at + row.size <= len(data)]
                rest = [PackRecord(k, table.address(r), [view[r.at : r.at + r.size]]) for k, r in enumerate(whole)]
                self._rewrite(rest, deadline)
            self._bucket.delete([pack.path], deadline)
            self._manifest.forget(pack.path)
            return removed & {row.signature for row in table.rows}

    def _rewrite(self, rest: Sequence[PackRecord], deadline: float | None) -> None:
        sound = []
        for record in rest:
            try:
                read_header(record.pieces[0])
                sound.append(record)
            except RecordError:
                self._counters.add("damaged")
        if sound:
            table, pieces = build_pack(sound)
            path = self._names.pack(PackLocation.of(sound[0].address), table.rows[0].signature, other=True)
            etag = self._bucket.put(path, pieces, deadline, create=False)
            self._manifest.add(Pack(path, etag, table))
