"""What one call does to a batch of records, over one wire. An OSError leaves what was not settled to the caller.

A read takes each value off the socket, compares the whole identity and every checksum, and settles block by block. A
write looks at what stands under its keys first, so that a record that is there costs no payload, and sets only where
nothing is. Long records go in parts, the one with the header last."""

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

# How long what is written stays in a server: as the settings say, and never beyond the end that a record has.

_PART_GRACE_MS = 1000  # a part outlives the header that needs it


@dataclass(frozen=True, slots=True)
class RecordTTL:
    """In milliseconds; 0 for no end."""

    record_ms: int
    part_ms: int
    clock: Clock

    def record_ttl_ms(self, header: Header) -> int:
        """Of one in a single value."""
        return self._until_end(header, self.record_ms)

    def head_ttl_ms(self, header: Header) -> int:
        """Of the first value of a long one: the others outlive it."""
        return self._until_end(header, min(self.record_ms or self.part_ms, self.part_ms * 9 // 10))

    def part_ttl_ms(self, header: Header) -> int:
        return min(self.part_ms, self._until_end(header, self.part_ms) + _PART_GRACE_MS)

    def _until_end(self, header: Header, most_ms: int) -> int:
        end = expires_ms(header.fields)
        if not end:
            return most_ms
        remaining = max(1, end - int(self.clock.wall() * 1000))
        return min(most_ms or remaining, remaining)


# How many values go out together.

MAX_IN_FLIGHT_BYTES = 16 << 20
"""On one connection; with more a server spends its time on memory."""


def in_flight_groups(
    values: Sequence[tuple[bytes, list[memoryview]]],
) -> Iterator[list[tuple[bytes, list[memoryview]]]]:
    """As many in a row as may be in flight together."""
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


# How one server's work on blocks of a batch ends: told to the ticket and counted, or kept for another server.

OPS: tuple[Op, ...] = ("read", "write", "contains", "remove")
_NAMES = {op: {outcome: f"{op}_{outcome.value}" for outcome in Outcome} for op in OPS}


class Completion:
    """`blocks`: the numbers that the batch's own ticket has for those of this part, where they differ from the part's.
    `follow`: what turns out to be at another server is not settled, but stands in `moved`, with the place that the
    server named, if it did. `doubtful`: what is known of the servers is no longer so."""

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
            self.moved[block] = check.place if isinstance(check, ErrorReply) else ""
            self.has_stale_topology = self.has_stale_topology or check != "ASK"
            return
        self._counters.add(self._names[outcome])
        if outcome is Outcome.DONE and self._batch.segments:
            self._counters.add(f"{self._batch.op}_bytes", self._batch.size_bytes(block))
        self._batch.ticket.settle(block, outcome, check)

    def settle_run(self, first: int, outcomes: Sequence[Outcome]) -> None:
        """Blocks from `first` on, of a batch without segments, each for a reason that is no other server's."""
        if self._blocks is not None:
            for i, outcome in enumerate(outcomes, first):
                self(i, outcome)
            return
        for outcome, count in Counter(outcomes).items():
            self._counters.add(self._names[outcome], count)
        self._batch.ticket.settle_many(first, outcomes)

    def settle_rest(self, outcome: Outcome, check: str = "") -> None:
        """Those that nobody has settled, and that are not kept for another server."""
        ticket = self._batch.ticket
        for i in self._batch.blocks if self._blocks is None else range(len(self._blocks)):
            block = i if self._blocks is None else self._blocks[i]
            if not ticket.settled(block) and block not in self.moved:
                self(i, outcome, check)


DONE, NOT_FOUND = Outcome.DONE, Outcome.NOT_FOUND
_LOOKUP_BATCH = 1024
"""Keys in a piece of a long question."""
_PIPELINE_DEPTH = 2  # pieces that wait for the server
Result = tuple[Outcome, str]
Head = bytes | ErrorReply

FULL_REPLIES = {"OOM"}
WRITE_REFUSED_REPLIES = {"OOM", "READONLY", "MISCONF", "NOREPLICAS"}
"""Refusals that only writes meet."""

REMOVE_SAME = b"""local v = redis.call('GETRANGE', KEYS[1], 0, math.max(#ARGV[1] - 1, 0))
if v == ARGV[1] then return redis.call('UNLINK', KEYS[1]) end
return 0"""
"""Removes a value that still begins as the one that was judged, its write id included."""


@dataclass(slots=True, eq=False)
class MultipartRecord:
    """A record whose first part was read."""

    i: int
    name: bytes
    header: Header
    pieces: list[memoryview]  # of the whole payload
    first_bytes: int  # of the payload, in the first part
    head: bytes
    sums: bytes = b""  # of what was read of it

    def parts(self) -> list[tuple[bytes, list[memoryview]]]:
        """The other parts: key, and where its bytes go or come from."""
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
        """`signer`: what is written is signed, and only what is signed is read."""
        self._names, self._counters, self._write_breaker, self._signer = names, counters, write_breaker, signer
        self._part_bytes, self._ttl = part_bytes, ttl

    # asking

    def heads(self, wire: RespConnection, names: Sequence[bytes]) -> list[Head]:
        """How the values under these keys begin; empty where there is none."""
        self._ask(wire, names)
        return wire.heads(len(names), HEAD_BYTES)

    def _ask(self, wire: RespConnection, names: Sequence[bytes]) -> None:
        last = b"%d" % (HEAD_BYTES - 1)
        end = b"\r\n$1\r\n0\r\n$%d\r\n%b\r\n" % (len(last), last)
        begins = {
            size: b"%b*4\r\n$8\r\nGETRANGE\r\n$%d\r\n" % (wire.command_prefix, size) for size in set(map(len, names))
        }
        if len(begins) == 1:  # of one place, as nearly always: one join writes them
            (begin,) = begins.values()
            wire.send([begin + (end + begin).join(names) + end])
        else:
            wire.send([b"".join([begins[len(name)] + name + end for name in names])])

    def contains(self, wire: RespConnection, batch: Batch, settle: Completion) -> None:
        pieces = [range(at, min(at + _LOOKUP_BATCH, batch.end)) for at in range(batch.first, batch.end, _LOOKUP_BATCH)]
        for i, piece in enumerate(pieces):  # while the server answers some, the next are written and others judged
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

    # reading

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
        """Take one value off the wire, all of it, and judge it."""
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
        if isinstance(fault, ErrorReply):  # nothing that the record could help
            settle(record.i, *self._refused(fault))
        elif fault:  # a part that went before the rest: without its header the place is free again
            self._counters.add("broken")
            wire.ask(b"EVAL", REMOVE_SAME, b"1", record.name, record.head[:HEAD_BYTES])
            settle(record.i, Outcome.NOT_FOUND, fault)
        else:
            self._judge(record, settle, bad)

    def _judge(self, record: MultipartRecord, settle: Completion, bad: list[tuple[int, bytes, bytes, str]]) -> None:
        """Of one whose identity was compared."""
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
        """Out with a damaged record, unless it is no longer the write that was read."""
        self._counters.add("damaged")
        self._counters.add(f"damaged_{check}")
        wire.ask(b"EVAL", REMOVE_SAME, b"1", name, head)
        return Outcome.DAMAGED, check

    # writing

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
            for record in remaining:  # it came and went
                settle(record.i, Outcome.FAILED, "raced")

    def _sealed(self, i: int, address: Address, segments: Segments) -> MultipartRecord:
        header, head, payload = sealed_record(address, segments, self._signer)
        first = min(header.stored_bytes, self._part_bytes)
        return MultipartRecord(i, self._names.record(address), header, payload, first, head)

    def _standing(
        self, wire: RespConnection, records: Sequence[MultipartRecord], batch: Batch, settle: Completion
    ) -> list[MultipartRecord]:
        """Settle what is there already; the rest. What no reader could use makes room."""
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
        """The header goes last, and leaves no later than what it needs."""
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
            wire.ask(b"UNLINK", *names)  # else they are the parts of the same write, made by another hand
        self._stored(reply, record, settle, raced)

    # removing

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
        others: list[bytes] = []  # a command a record, since a cluster takes none for keys of several
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
        """What a refusal of the server means for a block."""
        self._counters.add("refused")
        self._counters.add(f"refused_{wrong}")
        if wrong == "WRONGTYPE":
            return Outcome.INCOMPATIBLE, "type"
        if wrong in WRITE_REFUSED_REPLIES and self._write_breaker.record_failure():
            self._counters.add("writes_stopped")
        return (Outcome.NO_CAPACITY if wrong in FULL_REPLIES else Outcome.FAILED), wrong


def _other_parts(name: bytes, head: bytes, size: int) -> list[bytes]:
    """The keys of a record's further parts, from the first one's head and length."""
    first, stored = size - header_bytes_of(head), stored_bytes_of(head)
    if not 0 < first < stored or first % CHUNK_BYTES:
        return []
    return [part_key(name, write_id_of(head), number) for number in range(1, -(-stored // first))]
