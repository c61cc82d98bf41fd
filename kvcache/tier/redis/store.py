"""What one call does to a batch of records, over one wire. An OSError leaves what was not settled to the caller.

A read takes each value off the socket, compares the whole identity and every checksum, and settles block by block. A
write looks at what stands under its keys first, so that a record that is there costs no payload, and sets only where
nothing is. Long records go in parts, the one with the header last."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from kvcache.block.cipher import Signer
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
from kvcache.tier.breaker import Breaker, Counters
from kvcache.tier.io_queue import Batch
from kvcache.tier.redis.keys import (
    HEAD_BYTES,
    Names,
    are_heads_of,
    header_bytes_of,
    is_head_of,
    part,
    plausible,
    stored_bytes_of,
    write_id_of,
)
from kvcache.tier.redis.pool import ELSEWHERE
from kvcache.tier.redis.wire import MOST_TAKEN, Wire, Wrong
from kvcache.tier.tier import Op, Outcome, Segments, cut, flat, outgoing, same_record

# How long what is written stays in a server: as the settings say, and never beyond the end that a record has.

_AFTER_MS = 1000  # a part outlives the header that needs it


@dataclass(frozen=True, slots=True)
class Life:
    """In milliseconds; 0 for no end."""

    record_ms: int
    part_ms: int
    clock: Clock

    def of_record(self, header: Header) -> int:
        """Of one in a single value."""
        return self._until_end(header, self.record_ms)

    def of_head(self, header: Header) -> int:
        """Of the first value of a long one: the others outlive it."""
        return self._until_end(header, min(self.record_ms or self.part_ms, self.part_ms * 9 // 10))

    def of_part(self, header: Header) -> int:
        return min(self.part_ms, self._until_end(header, self.part_ms) + _AFTER_MS)

    def _until_end(self, header: Header, most_ms: int) -> int:
        end = expires_ms(header.fields)
        if not end:
            return most_ms
        left = max(1, end - int(self.clock.wall() * 1000))
        return min(most_ms or left, left)


# How many values go out together.

IN_FLIGHT_BYTES = 16 << 20
"""On one connection; with more a server spends its time on memory."""


def groups(
    values: Sequence[tuple[bytes, list[memoryview]]],
) -> Iterator[list[tuple[bytes, list[memoryview]]]]:
    """As many in a row as may be in flight together."""
    group: list[tuple[bytes, list[memoryview]]] = []
    size = 0
    for value in values:
        more = sum(map(len, value[1]))
        if group and size + more > IN_FLIGHT_BYTES:
            yield group
            group, size = [], 0
        group.append(value)
        size += more
    if group:
        yield group


# How one server's work on blocks of a batch ends: told to the ticket and counted, or kept for another server.

OPS: tuple[Op, ...] = ("read", "write", "contains", "remove")
_NAMES = {op: {outcome: f"{op}_{outcome.value}" for outcome in Outcome} for op in OPS}


class Settling:
    """`blocks`: the numbers that the batch's own ticket has for those of this part, where they differ from the part's.
    `follow`: what turns out to be at another server is not settled, but stands in `moved`, with the place that the
    server named, if it did. `doubtful`: what is known of the servers is no longer so."""

    def __init__(
        self, batch: Batch, counters: Counters, *, blocks: Sequence[int] | None = None, follow: bool = False
    ) -> None:
        self._batch, self._counters, self._blocks, self._follow = batch, counters, blocks, follow
        self._names = _NAMES[batch.op]
        self.moved: dict[int, str] = {}
        self.doubtful = False

    def __call__(self, i: int, outcome: Outcome, check: str = "") -> None:
        block = i if self._blocks is None else self._blocks[i]
        if self._follow and check in ELSEWHERE:
            self.moved[block] = check.place if isinstance(check, Wrong) else ""
            self.doubtful = self.doubtful or check != "ASK"
            return
        self._counters.add(self._names[outcome])
        if outcome is Outcome.DONE and self._batch.segments:
            self._counters.add(f"{self._batch.op}_bytes", self._batch.size_bytes(block))
        self._batch.ticket.settle(block, outcome, check)

    def many(self, first: int, outcomes: Sequence[Outcome]) -> None:
        """Blocks from `first` on, of a batch without segments, each for a reason that is no other server's."""
        if self._blocks is not None:
            for i, outcome in enumerate(outcomes, first):
                self(i, outcome)
            return
        for outcome, count in Counter(outcomes).items():
            self._counters.add(self._names[outcome], count)
        self._batch.ticket.settle_many(first, outcomes)

    def rest(self, outcome: Outcome, check: str = "") -> None:
        """Those that nobody has settled, and that are not kept for another server."""
        ticket = self._batch.ticket
        for i in self._batch.blocks if self._blocks is None else range(len(self._blocks)):
            block = i if self._blocks is None else self._blocks[i]
            if not ticket.settled(block) and block not in self.moved:
                self(i, outcome, check)


DONE, ABSENT = Outcome.DONE, Outcome.ABSENT
_QUESTIONS = 1024
"""Keys in a piece of a long question."""
_AHEAD = 2  # pieces that wait for the server
Result = tuple[Outcome, str]
Head = bytes | Wrong

FULL = {"OOM"}
SHUT = {"OOM", "READONLY", "MISCONF", "NOREPLICAS"}
"""Refusals that only writes meet."""

REMOVE_SAME = b"""local v = redis.call('GETRANGE', KEYS[1], 0, math.max(#ARGV[1] - 1, 0))
if v == ARGV[1] then return redis.call('UNLINK', KEYS[1]) end
return 0"""
"""Removes a value that still begins as the one that was judged, its write id included."""


@dataclass(slots=True, eq=False)
class Long:
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
            (part(self.name, self.header.write_id, number), cut(self.pieces, start, self.first_bytes))
            for number, start in enumerate(steps, 1)
        ]


class Store:
    def __init__(
        self,
        names: Names,
        counters: Counters,
        shut: Breaker,
        *,
        part_bytes: int,
        life: Life,
        signer: Signer | None = None,
    ) -> None:
        """`signer`: what is written is signed, and only what is signed is read."""
        self._names, self._counters, self._shut, self._signer = names, counters, shut, signer
        self._part_bytes, self._life = part_bytes, life

    # asking

    def heads(self, wire: Wire, names: Sequence[bytes]) -> list[Head]:
        """How the values under these keys begin; empty where there is none."""
        self._ask(wire, names)
        return wire.heads(len(names), HEAD_BYTES)

    def _ask(self, wire: Wire, names: Sequence[bytes]) -> None:
        last = b"%d" % (HEAD_BYTES - 1)
        end = b"\r\n$1\r\n0\r\n$%d\r\n%b\r\n" % (len(last), last)
        begins = {size: b"%b*4\r\n$8\r\nGETRANGE\r\n$%d\r\n" % (wire.before, size) for size in set(map(len, names))}
        if len(begins) == 1:  # of one place, as nearly always: one join writes them
            (begin,) = begins.values()
            wire.send([begin + (end + begin).join(names) + end])
        else:
            wire.send([b"".join([begins[len(name)] + name + end for name in names])])

    def contains(self, wire: Wire, batch: Batch, settle: Settling) -> None:
        pieces = [range(at, min(at + _QUESTIONS, batch.end)) for at in range(batch.first, batch.end, _QUESTIONS)]
        for i, piece in enumerate(pieces):  # while the server answers some, the next are written and others judged
            self._ask(wire, self._names.records(batch.addresses[piece.start : piece.stop]))
            if i >= _AHEAD:
                self._answered(wire, batch, pieces[i - _AHEAD], settle)
        for piece in pieces[-_AHEAD:]:
            self._answered(wire, batch, piece, settle)

    def _answered(self, wire: Wire, batch: Batch, blocks: range, settle: Settling) -> None:
        wanted = batch.addresses[blocks.start : blocks.stop]
        heads = wire.heads(len(wanted), HEAD_BYTES)
        sound = [head for head in heads if not isinstance(head, Wrong)]
        if len(sound) == len(heads):
            settle.many(blocks.start, [DONE if there else ABSENT for there in are_heads_of(sound, wanted)])
            return
        for i, address, head in zip(blocks, wanted, heads, strict=True):
            settle(i, *self._present(head, address))

    def _present(self, head: Head, address: Address) -> Result:
        if isinstance(head, Wrong):
            return self._refused(head)
        return (Outcome.DONE if is_head_of(head, address) else Outcome.ABSENT), ""

    # reading

    def read(self, wire: Wire, batch: Batch, settle: Settling) -> None:
        names = self._names.records(batch.wanted)
        wire.send([b"".join([wire.command(b"GET", name) for name in names])])
        bad: list[tuple[int, bytes, bytes, str]] = []  # block, key, head, check
        long: list[Long] = []
        for i, name in zip(batch.blocks, names, strict=True):
            size = wire.bulk()
            if size is None:
                settle(i, Outcome.ABSENT, "")
            elif isinstance(size, Wrong):
                settle(i, *self._refused(size))
            else:
                self._receive(wire, size, batch, i, name, settle, bad, long)
        for record in long:
            self._read_parts(wire, record, settle, bad)
        for i, name, head, check in bad:
            settle(i, *self._distrust(wire, name, head, check))

    def _receive(
        self,
        wire: Wire,
        size: int,
        batch: Batch,
        i: int,
        name: bytes,
        settle: Settling,
        bad: list[tuple[int, bytes, bytes, str]],
        long: list[Long],
    ) -> None:
        """Take one value off the wire, all of it, and judge it."""
        address, segments = batch.addresses[i], batch.segments[i]
        left = size
        head = wire.take(min(left, FIXED_BYTES))
        left -= len(head)
        result: Result | None = None
        if len(head) == FIXED_BYTES and (fields := header_bytes_of(head) - FIXED_BYTES) <= min(left, MOST_TAKEN):
            head += wire.take(fields)
            left -= fields
        try:
            header = read_header(head)
        except RecordError as error:
            result = (Outcome.FOREIGN, error.check) if error.foreign else (Outcome.DAMAGED, error.check)
        else:
            pieces = flat(segments[1:], header.stored_bytes)
            whole = left == header.stored_bytes
            if not same_record(header.address, address) or header.address.name != address.name:
                result = Outcome.ABSENT, "signature"
            elif not whole and (left > header.stored_bytes or left == 0 or left % CHUNK_BYTES):
                result = Outcome.DAMAGED, "length"
            elif len(segments[0]) < len(head) or sum(map(len, pieces)) < header.stored_bytes:
                result = Outcome.FAILED, "length"
        if result is not None:
            wire.skip(left)
            wire.end()
            if result[0] is Outcome.DAMAGED:
                bad.append((i, name, head[:HEAD_BYTES], result[1]))
            else:
                settle(i, *result)
            return
        area = segments[0].cast("B")
        area[: len(head)] = head
        area[len(head) :] = bytes(len(area) - len(head))
        record = Long(i, name, header, pieces, left, head, chunk_sums(pieces, left, wire.fill))
        wire.end()
        if whole:
            self._judge(record, settle, bad)
        else:
            long.append(record)

    def _read_parts(self, wire: Wire, record: Long, settle: Settling, bad: list[tuple[int, bytes, bytes, str]]) -> None:
        fault: str = ""
        for group in groups(record.parts()):
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
                    record.sums += chunk_sums(pieces, size, wire.fill)
                wire.end()
            if fault:
                break
        if isinstance(fault, Wrong):  # nothing that the record could help
            settle(record.i, *self._refused(fault))
        elif fault:  # a part that went before the rest: without its header the place is free again
            self._counters.add("broken")
            wire.ask(b"EVAL", REMOVE_SAME, b"1", record.name, record.head[:HEAD_BYTES])
            settle(record.i, Outcome.ABSENT, fault)
        else:
            self._judge(record, settle, bad)

    def _judge(self, record: Long, settle: Settling, bad: list[tuple[int, bytes, bytes, str]]) -> None:
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

    def _distrust(self, wire: Wire, name: bytes, head: bytes, check: str) -> Result:
        """Out with a damaged record, unless it is no longer the write that was read."""
        self._counters.add("damaged")
        self._counters.add(f"damaged_{check}")
        wire.ask(b"EVAL", REMOVE_SAME, b"1", name, head)
        return Outcome.DAMAGED, check

    # writing

    def write(self, wire: Wire, batch: Batch, settle: Settling) -> None:
        new: list[Long] = []
        for i in batch.blocks:
            try:
                new.append(self._sealed(i, batch.addresses[i], batch.segments[i]))
            except RecordError as error:
                settle(i, Outcome.FAILED, error.check)
        new = self._standing(wire, new, batch, settle)
        if new and not self._shut.allows():
            for record in new:
                settle(record.i, Outcome.FAILED, "breaker")
            return
        short = [record for record in new if record.first_bytes == record.header.stored_bytes]
        raced: list[Long] = []
        for group in groups([(record.name, [memoryview(record.head), *record.pieces]) for record in short]):
            lives = (self._life.of_record(record.header) for record in short)
            sets = [wire.store(name, value, expire_ms=ms) for (name, value), ms in zip(group, lives, strict=False)]
            wire.send(list(chain.from_iterable(sets)))
            for _ in group:
                self._stored(wire.reply(), short[0], settle, raced)
                del short[0]
        for record in new:
            if record.first_bytes != record.header.stored_bytes:
                self._write_parts(wire, record, settle, raced)
        if raced:
            left = self._standing(wire, raced, batch, settle)
            for record in left:  # it came and went
                settle(record.i, Outcome.FAILED, "raced")

    def _sealed(self, i: int, address: Address, segments: Segments) -> Long:
        header, head, payload = outgoing(address, segments, self._signer)
        first = min(header.stored_bytes, self._part_bytes)
        return Long(i, self._names.record(address), header, payload, first, head)

    def _standing(self, wire: Wire, records: Sequence[Long], batch: Batch, settle: Settling) -> list[Long]:
        """Settle what is there already; the rest. What no reader could use makes room."""
        left = []
        heads = self.heads(wire, [record.name for record in records])
        for record, head in zip(records, heads, strict=True):
            if isinstance(head, Wrong):
                settle(record.i, *self._refused(head))
            elif head and is_head_of(head, batch.addresses[record.i]):
                settle(record.i, Outcome.DONE, "")
            elif plausible(head):
                settle(record.i, Outcome.FAILED, "key")
            else:
                if head:
                    wire.ask(b"EVAL", REMOVE_SAME, b"1", record.name, head)
                left.append(record)
        return left

    def _stored(self, reply: object, record: Long, settle: Settling, raced: list[Long]) -> None:
        if isinstance(reply, Wrong):
            settle(record.i, *self._refused(reply))
        elif reply is None:
            raced.append(record)
        else:
            self._shut.passed()
            settle(record.i, Outcome.DONE, "")

    def _write_parts(self, wire: Wire, record: Long, settle: Settling, raced: list[Long]) -> None:
        """The header goes last, and leaves no later than what it needs."""
        names, part_ms = [], self._life.of_part(record.header)
        for group in groups(record.parts()):
            sets = [wire.store(name, value, expire_ms=part_ms, only_new=False) for name, value in group]
            wire.send(list(chain.from_iterable(sets)))
            replies = [wire.reply() for _ in group]
            names += [name for name, _ in group]
            wrong = next((reply for reply in replies if isinstance(reply, Wrong)), None)
            if wrong is not None:
                wire.ask(b"UNLINK", *names)
                settle(record.i, *self._refused(wrong))
                return
        value = [memoryview(record.head), *cut(record.pieces, 0, record.first_bytes)]
        wire.send(wire.store(record.name, value, expire_ms=self._life.of_head(record.header)))
        reply = wire.reply()
        if not isinstance(reply, Wrong) and reply is not None:
            self._stored(reply, record, settle, raced)
            return
        (head,) = self.heads(wire, [record.name])
        if isinstance(head, Wrong) or not plausible(head) or write_id_of(head) != record.header.write_id:
            wire.ask(b"UNLINK", *names)  # else they are the parts of the same write, made by another hand
        self._stored(reply, record, settle, raced)

    # removing

    def remove(self, wire: Wire, batch: Batch, settle: Settling) -> None:
        names = self._names.records(batch.wanted)
        heads = self.heads(wire, names)
        there = []
        for i, address, name, head in zip(batch.blocks, batch.wanted, names, heads, strict=True):
            outcome, check = self._present(head, address)
            if outcome is Outcome.DONE and not isinstance(head, Wrong):
                there.append((i, name, head))
            else:
                settle(i, outcome, check)
        ask = [wire.command(b"STRLEN", n) + wire.command(b"EVAL", REMOVE_SAME, b"1", n, head) for _, n, head in there]
        wire.send(ask)
        others: list[bytes] = []  # a command a record, since a cluster takes none for keys of several
        gone: list[tuple[int, Outcome]] = []
        for i, name, head in there:
            size, removed = wire.reply(), wire.reply()
            if isinstance(removed, Wrong):
                settle(i, *self._refused(removed))
                continue
            if removed and isinstance(size, int):
                parts = _other_parts(name, head, size)
                others += [wire.command(b"UNLINK", *parts)] if parts else []
            gone.append((i, Outcome.DONE if removed else Outcome.ABSENT))
        wire.send(others)
        for _ in others:
            wire.reply()
        for i, outcome in gone:
            settle(i, outcome, "")

    def _refused(self, wrong: Wrong) -> Result:
        """What a refusal of the server means for a block."""
        self._counters.add("refused")
        self._counters.add(f"refused_{wrong}")
        if wrong == "WRONGTYPE":
            return Outcome.FOREIGN, "type"
        if wrong in SHUT and self._shut.failed():
            self._counters.add("writes_stopped")
        return (Outcome.NO_ROOM if wrong in FULL else Outcome.FAILED), wrong


def _other_parts(name: bytes, head: bytes, size: int) -> list[bytes]:
    """The keys of a record's further parts, from the first one's head and length."""
    first, stored = size - header_bytes_of(head), stored_bytes_of(head)
    if not 0 < first < stored or first % CHUNK_BYTES:
        return []
    return [part(name, write_id_of(head), number) for number in range(1, -(-stored // first))]
