"""Reads, writes, lookups and removals of a batch of records over one connection.

A read compares the whole identity and every checksum of a value and settles each block. A write first reads the heads
under its keys, so that a resident record costs no payload, and sets a value only where none exists. Long records are
split into parts; the part with the header is written last. After an OSError the caller settles the remaining blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from kvcache.block.cipher import RecordSigner
from kvcache.block.record import (
    CHUNK_BYTES,
    FIXED_BYTES,
    Address,
    Header,
    RecordError,
    chunk_sums,
    expires_ms,
    read_header,
)
from kvcache.os_env import Clock
from kvcache.tier.breaker import CircuitBreaker, Counters
from kvcache.tier.io_queue import Batch
from kvcache.tier.redis.keys import (
    HEAD_BYTES,
    KeyNames,
    are_heads_of,
    header_bytes_of,
    is_head_of,
    looks_like_record,
    part_key,
    stored_bytes_of,
    write_id_of,
)
from kvcache.tier.redis.pool import REDIRECT_REPLIES
from kvcache.tier.redis.wire import MAX_TAKE_BYTES, ErrorReply, RespConnection
from kvcache.tier.tier import Op, Outcome, Segments, flatten, same_record, sealed_record, slice_segments

# Expiry of values: as the settings say, and never later than the record's own end.

MAX_PART_TTL_MS = 86_400_000
"""Of the parts of a split record, so that nothing is left of a writer that was killed between them."""
_PART_GRACE_MS = 1000  # so that a part outlives the header that needs it


@dataclass(frozen=True, slots=True)
class RecordTTL:
    """Expiry of values, in milliseconds; 0 for none."""

    record_ms: int
    part_ms: int
    clock: Clock

    def record_ttl_ms(self, header: Header) -> int:
        """Return the expiry of a record in a single value."""
        return self._until_end(header, self.record_ms)

    def head_ttl_ms(self, header: Header) -> int:
        """Return the expiry of the first part of a long record; the further parts outlive it."""
        return self._until_end(header, min(self.record_ms or self.part_ms, self.part_ms * 9 // 10))

    def part_ttl_ms(self, header: Header) -> int:
        return min(self.part_ms, self._until_end(header, self.part_ms) + _PART_GRACE_MS)

    def _until_end(self, header: Header, most_ms: int) -> int:
        end = expires_ms(header.fields)
        if not end:
            return most_ms
        remaining = max(1, end - int(self.clock.wall() * 1000))
        return min(most_ms or remaining, remaining)


# Groups of values in flight

MAX_IN_FLIGHT_BYTES = 16 << 20
"""Value bytes in flight on one connection. With more, the server spends its time on memory."""


def in_flight_groups(
    values: Sequence[tuple[bytes, list[memoryview]]],
) -> Iterator[list[tuple[bytes, list[memoryview]]]]:
    """Split values into consecutive groups of at most MAX_IN_FLIGHT_BYTES; a larger value is a group alone."""
    group: list[tuple[bytes, list[memoryview]]] = []
    size = 0
    for value in values:
        more = sum(map(len, value[1]))
        if group and size + more > MAX_IN_FLIGHT_BYTES:
            yield group
            group, size = [], 0
        group.append(value)
        size += more
    if group:
        yield group


# Completion of blocks

OPS: tuple[Op, ...] = ("read", "write", "contains", "remove")
_NAMES = {op: {outcome: f"{op}_{outcome.value}" for outcome in Outcome} for op in OPS}


class Completion:
    """Settles the blocks of one server's share of a batch, and counts the outcomes.

    Args:
        blocks: For each block of the share its number in the batch's ticket; None where they are equal.
        follow: Keep a redirected block in `moved`, with the target that the server named or "", and do not settle it.

    `has_stale_topology` is set by a redirection that shows the known slot map to be wrong.
    """

    def __init__(
        self, batch: Batch, counters: Counters, *, blocks: Sequence[int] | None = None, follow: bool = False
    ) -> None:
        self._batch, self._counters, self._blocks, self._follow = batch, counters, blocks, follow
        self._names = _NAMES[batch.op]
        self.moved: dict[int, str] = {}
        self.has_stale_topology = False

    def __call__(self, i: int, outcome: Outcome, check: str = "") -> None:
        block = i if self._blocks is None else self._blocks[i]
        if self._follow and check in REDIRECT_REPLIES:
            self.moved[block] = check.target if isinstance(check, ErrorReply) else ""
            self.has_stale_topology = self.has_stale_topology or check != "ASK"
            return
        self._counters.add(self._names[outcome])
        if outcome is Outcome.DONE and self._batch.segments:
            self._counters.add(f"{self._batch.op}_bytes", self._batch.size_bytes(block))
        self._batch.ticket.settle(block, outcome, check)

    def settle_run(self, first: int, outcomes: Sequence[Outcome]) -> None:
        """Settle blocks from `first` on, of a batch without segments. No outcome may be a redirection."""
        if self._blocks is not None:
            for i, outcome in enumerate(outcomes, first):
                self(i, outcome)
            return
        for outcome, count in Counter(outcomes).items():
            self._counters.add(self._names[outcome], count)
        self._batch.ticket.settle_many(first, outcomes)

    def settle_rest(self, outcome: Outcome, check: str = "") -> None:
        """Settle the blocks that are neither settled nor in `moved`."""
        ticket = self._batch.ticket
        for i in self._batch.blocks if self._blocks is None else range(len(self._blocks)):
            block = i if self._blocks is None else self._blocks[i]
            if not ticket.settled(block) and block not in self.moved:
                self(i, outcome, check)


DONE, NOT_FOUND = Outcome.DONE, Outcome.NOT_FOUND
_LOOKUP_BATCH = 1024
"""Keys of a long lookup that are sent together."""
_PIPELINE_DEPTH = 2  # groups of keys that wait for the server's replies
Result = tuple[Outcome, str]
Head = bytes | ErrorReply

FULL_REPLIES = {"OOM"}
WRITE_REFUSED_REPLIES = {"OOM", "READONLY", "MISCONF", "NOREPLICAS"}
"""Refusals of writes by a server that still answers reads."""

REMOVE_SAME = b"""local v = redis.call('GETRANGE', KEYS[1], 0, math.max(#ARGV[1] - 1, 0))
if v == ARGV[1] then return redis.call('UNLINK', KEYS[1]) end
return 0"""
"""Removes a value only while it begins with the head that was read, write id included."""


@dataclass(slots=True, eq=False)
class MultipartRecord:
    """A record whose payload may be split into parts. `pieces` refer to the caller's memory."""

    i: int
    name: bytes
    header: Header
    pieces: list[memoryview]  # the whole payload
    first_bytes: int  # payload bytes in the first part
    head: bytes
    sums: bytes = b""  # checksums of the payload bytes read so far

    def parts(self) -> list[tuple[bytes, list[memoryview]]]:
        """Return the further parts: the key, and the memory to read into or write from."""
        steps = range(self.first_bytes, self.header.stored_bytes, self.first_bytes)
        return [
            (part_key(self.name, self.header.write_id, number), slice_segments(self.pieces, start, self.first_bytes))
            for number, start in enumerate(steps, 1)
        ]


class Store:
    def __init__(
        self,
        names: KeyNames,
        counters: Counters,
        write_breaker: CircuitBreaker,
        *,
        part_bytes: int,
        ttl: RecordTTL,
        signer: RecordSigner | None = None,
    ) -> None:
        """With a `signer`, writes sign records, and reads refuse records without a valid signature."""
        self._names, self._counters, self._write_breaker, self._signer = names, counters, write_breaker, signer
        self._part_bytes, self._ttl = part_bytes, ttl

    # lookups

    def heads(self, wire: RespConnection, names: Sequence[bytes]) -> list[Head]:
        """Return the first HEAD_BYTES of the values under these keys; empty where there is no value."""
        self._ask(wire, names)
        return wire.heads(len(names), HEAD_BYTES)

    def _ask(self, wire: RespConnection, names: Sequence[bytes]) -> None:
        last = b"%d" % (HEAD_BYTES - 1)
        end = b"\r\n$1\r\n0\r\n$%d\r\n%b\r\n" % (len(last), last)
        begins = {
            size: b"%b*4\r\n$8\r\nGETRANGE\r\n$%d\r\n" % (wire.command_prefix, size) for size in set(map(len, names))
        }
        if len(begins) == 1:  # keys of one length, nearly always: one join makes the command
            (begin,) = begins.values()
            wire.send([begin + (end + begin).join(names) + end])
        else:
            wire.send([b"".join([begins[len(name)] + name + end for name in names])])

    def contains(self, wire: RespConnection, batch: Batch, settle: Completion) -> None:
        pieces = [range(at, min(at + _LOOKUP_BATCH, batch.end)) for at in range(batch.first, batch.end, _LOOKUP_BATCH)]
        for i, piece in enumerate(pieces):  # overlap the server's work with sending and comparing
            self._ask(wire, self._names.records(batch.addresses[piece.start : piece.stop]))
            if i >= _PIPELINE_DEPTH:
                self._answered(wire, batch, pieces[i - _PIPELINE_DEPTH], settle)
        for piece in pieces[-_PIPELINE_DEPTH:]:
            self._answered(wire, batch, piece, settle)

    def _answered(self, wire: RespConnection, batch: Batch, blocks: range, settle: Completion) -> None:
        wanted = batch.addresses[blocks.start : blocks.stop]
        heads = wire.heads(len(wanted), HEAD_BYTES)
        sound = [head for head in heads if not isinstance(head, ErrorReply)]
        if len(sound) == len(heads):
            settle.settle_run(blocks.start, [DONE if present else NOT_FOUND for present in are_heads_of(sound, wanted)])
            return
        for i, address, head in zip(blocks, wanted, heads, strict=True):
            settle(i, *self._present(head, address))

    def _present(self, head: Head, address: Address) -> Result:
        if isinstance(head, ErrorReply):
            return self._refused(head)
        return (Outcome.DONE if is_head_of(head, address) else Outcome.NOT_FOUND), ""

    # reads

    def read(self, wire: RespConnection, batch: Batch, settle: Completion) -> None:
        names = self._names.records(batch.block_addresses)
        wire.send([b"".join([wire.command(b"GET", name) for name in names])])
        bad: list[tuple[int, bytes, bytes, str]] = []  # block, key, head, check
        long: list[MultipartRecord] = []
        for i, name in zip(batch.blocks, names, strict=True):
            size = wire.bulk()
            if size is None:
                settle(i, Outcome.NOT_FOUND, "")
            elif isinstance(size, ErrorReply):
                settle(i, *self._refused(size))
            else:
                self._receive(wire, size, batch, i, name, settle, bad, long)
        for record in long:
            self._read_parts(wire, record, settle, bad)
        for i, name, head, check in bad:
            settle(i, *self._distrust(wire, name, head, check))

    def _receive(
        self,
        wire: RespConnection,
        size: int,
        batch: Batch,
        i: int,
        name: bytes,
        settle: Completion,
        bad: list[tuple[int, bytes, bytes, str]],
        long: list[MultipartRecord],
    ) -> None:
        """Receive one whole value and verify it, or append it to `bad` or `long`."""
        address, segments = batch.addresses[i], batch.segments[i]
        remaining = size
        head = wire.read_exact(min(remaining, FIXED_BYTES))
        remaining -= len(head)
        result: Result | None = None
        if len(head) == FIXED_BYTES and (fields := header_bytes_of(head) - FIXED_BYTES) <= min(
            remaining, MAX_TAKE_BYTES
        ):
            head += wire.read_exact(fields)
            remaining -= fields
        try:
            header = read_header(head)
        except RecordError as error:
            result = (Outcome.INCOMPATIBLE, error.check) if error.foreign else (Outcome.DAMAGED, error.check)
        else:
            pieces = flatten(segments[1:], header.stored_bytes)
            whole = remaining == header.stored_bytes
            if not same_record(header.address, address) or header.address.name != address.name:
                result = Outcome.NOT_FOUND, "signature"
            elif not whole and (remaining > header.stored_bytes or remaining == 0 or remaining % CHUNK_BYTES):
                result = Outcome.DAMAGED, "length"
            elif len(segments[0]) < len(head) or sum(map(len, pieces)) < header.stored_bytes:
                result = Outcome.FAILED, "length"
        if result is not None:
            wire.skip(remaining)
            wire.end()
            if result[0] is Outcome.DAMAGED:
                bad.append((i, name, head[:HEAD_BYTES], result[1]))
            else:
                settle(i, *result)
            return
        area = segments[0].cast("B")
        area[: len(head)] = head
        area[len(head) :] = bytes(len(area) - len(head))
        record = MultipartRecord(
            i, name, header, pieces, remaining, head, chunk_sums(pieces, remaining, wire.read_into)
        )
        wire.end()
        if whole:
            self._judge(record, settle, bad)
        else:
            long.append(record)

    def _read_parts(
        self,
        wire: RespConnection,
        record: MultipartRecord,
        settle: Completion,
        bad: list[tuple[int, bytes, bytes, str]],
    ) -> None:
        fault: str = ""
        for group in in_flight_groups(record.parts()):
            wire.send([b"".join([wire.command(b"GET", name) for name, _ in group])])
            for _, pieces in group:
                size = wire.bulk()
                if not isinstance(size, int):
                    fault = fault or (size or "part")
                    continue
                if size != sum(map(len, pieces)) or fault:
                    fault = fault or "length"
                    wire.skip(size)
                else:
                    record.sums += chunk_sums(pieces, size, wire.read_into)
                wire.end()
            if fault:
                break
        if isinstance(fault, ErrorReply):  # the refusal says nothing about the record
            settle(record.i, *self._refused(fault))
        elif fault:  # a part was evicted first: removing the header frees the key for a new write
            self._counters.add("broken")
            wire.ask(b"EVAL", REMOVE_SAME, b"1", record.name, record.head[:HEAD_BYTES])
            settle(record.i, Outcome.NOT_FOUND, fault)
        else:
            self._judge(record, settle, bad)

    def _judge(self, record: MultipartRecord, settle: Completion, bad: list[tuple[int, bytes, bytes, str]]) -> None:
        """Verify checksums and signature of a record whose identity already matched."""
        header, check = record.header, ""
        if record.sums != header.chunk_sums:
            check = "payload_sum"
        elif self._signer is not None and not self._signer.signed(record.head, header, record.pieces):
            check = "digest"
        if check:
            bad.append((record.i, record.name, record.head[:HEAD_BYTES], check))
        else:
            settle(record.i, DONE, "")

    def _distrust(self, wire: RespConnection, name: bytes, head: bytes, check: str) -> Result:
        """Remove a damaged record, unless another write replaced it since the read."""
        self._counters.add("damaged")
        self._counters.add(f"damaged_{check}")
        wire.ask(b"EVAL", REMOVE_SAME, b"1", name, head)
        return Outcome.DAMAGED, check

    # writes

    def write(self, wire: RespConnection, batch: Batch, settle: Completion) -> None:
        new: list[MultipartRecord] = []
        for i in batch.blocks:
            try:
                new.append(self._sealed(i, batch.addresses[i], batch.segments[i]))
            except RecordError as error:
                settle(i, Outcome.FAILED, error.check)
        new = self._standing(wire, new, batch, settle)
        if new and not self._write_breaker.allows():
            for record in new:
                settle(record.i, Outcome.FAILED, "breaker")
            return
        short = [record for record in new if record.first_bytes == record.header.stored_bytes]
        raced: list[MultipartRecord] = []
        for group in in_flight_groups([(record.name, [memoryview(record.head), *record.pieces]) for record in short]):
            lives = (self._ttl.record_ttl_ms(record.header) for record in short)
            sets = [wire.store(name, value, expire_ms=ms) for (name, value), ms in zip(group, lives, strict=False)]
            wire.send(list(chain.from_iterable(sets)))
            for _ in group:
                self._stored(wire.reply(), short[0], settle, raced)
                del short[0]
        for record in new:
            if record.first_bytes != record.header.stored_bytes:
                self._write_parts(wire, record, settle, raced)
        if raced:
            remaining = self._standing(wire, raced, batch, settle)
            for record in remaining:  # another writer's value existed at the write, and no longer does
                settle(record.i, Outcome.FAILED, "raced")

    def _sealed(self, i: int, address: Address, segments: Segments) -> MultipartRecord:
        header, head, payload = sealed_record(address, segments, self._signer)
        first = min(header.stored_bytes, self._part_bytes)
        return MultipartRecord(i, self._names.record(address), header, payload, first, head)

    def _standing(
        self, wire: RespConnection, records: Sequence[MultipartRecord], batch: Batch, settle: Completion
    ) -> list[MultipartRecord]:
        """Settle the records that the server already holds; return the others.

        Removes a value that no reader could use.
        """
        remaining = []
        heads = self.heads(wire, [record.name for record in records])
        for record, head in zip(records, heads, strict=True):
            if isinstance(head, ErrorReply):
                settle(record.i, *self._refused(head))
            elif head and is_head_of(head, batch.addresses[record.i]):
                settle(record.i, Outcome.DONE, "")
            elif looks_like_record(head):
                settle(record.i, Outcome.FAILED, "key")
            else:
                if head:
                    wire.ask(b"EVAL", REMOVE_SAME, b"1", record.name, head)
                remaining.append(record)
        return remaining

    def _stored(self, reply: object, record: MultipartRecord, settle: Completion, raced: list[MultipartRecord]) -> None:
        if isinstance(reply, ErrorReply):
            settle(record.i, *self._refused(reply))
        elif reply is None:
            raced.append(record)
        else:
            self._write_breaker.record_success()
            settle(record.i, Outcome.DONE, "")

    def _write_parts(
        self, wire: RespConnection, record: MultipartRecord, settle: Completion, raced: list[MultipartRecord]
    ) -> None:
        """Write the further parts, then the header, whose expiry is earlier than that of the parts."""
        names, part_ms = [], self._ttl.part_ttl_ms(record.header)
        for group in in_flight_groups(record.parts()):
            sets = [wire.store(name, value, expire_ms=part_ms, only_new=False) for name, value in group]
            wire.send(list(chain.from_iterable(sets)))
            replies = [wire.reply() for _ in group]
            names += [name for name, _ in group]
            wrong = next((reply for reply in replies if isinstance(reply, ErrorReply)), None)
            if wrong is not None:
                wire.ask(b"UNLINK", *names)
                settle(record.i, *self._refused(wrong))
                return
        value = [memoryview(record.head), *slice_segments(record.pieces, 0, record.first_bytes)]
        wire.send(wire.store(record.name, value, expire_ms=self._ttl.head_ttl_ms(record.header)))
        reply = wire.reply()
        if not isinstance(reply, ErrorReply) and reply is not None:
            self._stored(reply, record, settle, raced)
            return
        (head,) = self.heads(wire, [record.name])
        if isinstance(head, ErrorReply) or not looks_like_record(head) or write_id_of(head) != record.header.write_id:
            wire.ask(b"UNLINK", *names)  # with an equal write id the parts belong to the record that is there
        self._stored(reply, record, settle, raced)

    # removals

    def remove(self, wire: RespConnection, batch: Batch, settle: Completion) -> None:
        names = self._names.records(batch.block_addresses)
        heads = self.heads(wire, names)
        present = []
        for i, address, name, head in zip(batch.blocks, batch.block_addresses, names, heads, strict=True):
            outcome, check = self._present(head, address)
            if outcome is Outcome.DONE and not isinstance(head, ErrorReply):
                present.append((i, name, head))
            else:
                settle(i, outcome, check)
        ask = [wire.command(b"STRLEN", n) + wire.command(b"EVAL", REMOVE_SAME, b"1", n, head) for _, n, head in present]
        wire.send(ask)
        others: list[bytes] = []  # one command a record: a cluster refuses a command with keys of several slots
        deleted: list[tuple[int, Outcome]] = []
        for i, name, head in present:
            size, removed = wire.reply(), wire.reply()
            if isinstance(removed, ErrorReply):
                settle(i, *self._refused(removed))
                continue
            if removed and isinstance(size, int):
                parts = _other_parts(name, head, size)
                others += [wire.command(b"UNLINK", *parts)] if parts else []
            deleted.append((i, Outcome.DONE if removed else Outcome.NOT_FOUND))
        wire.send(others)
        for _ in others:
            wire.reply()
        for i, outcome in deleted:
            settle(i, outcome, "")

    def _refused(self, wrong: ErrorReply) -> Result:
        """Return the outcome of a block whose command the server refused, and count the refusal."""
        self._counters.add("refused")
        self._counters.add(f"refused_{wrong}")
        if wrong == "WRONGTYPE":
            return Outcome.INCOMPATIBLE, "type"
        if wrong in WRITE_REFUSED_REPLIES and self._write_breaker.record_failure():
            self._counters.add("writes_stopped")
        return (Outcome.NO_CAPACITY if wrong in FULL_REPLIES else Outcome.FAILED), wrong


def _other_parts(name: bytes, head: bytes, size: int) -> list[bytes]:
    """Return the keys of a record's further parts, from the head and length of its first value."""
    first, stored = size - header_bytes_of(head), stored_bytes_of(head)
    if not 0 < first < stored or first % CHUNK_BYTES:
        return []
    return [part_key(name, write_id_of(head), number) for number in range(1, -(-stored // first))]
