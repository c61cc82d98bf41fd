"""Lends slots of the arena to a client, which copies by itself; one thread a connection that moves records.

What is lent for reading is held for as long as the client copies, within the lease; after that it may be given out
again, and the slot's generation, which the client compares before and after its copy, tells it. What is lent for
storing is not given out again before the client has hung up, however long that takes it: until then it may write there.
A client hangs up only once its copy has ended, or because its process has."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest

from kvcache.block.record import header_area
from kvcache.cache.api import check_blocks
from kvcache.cache.cache import Cache
from kvcache.cache.operation import BlockTransfer
from kvcache.cache.request import CacheRequest
from kvcache.cache.slot_copy import NotMovedError, Part
from kvcache.daemon.protocol import (
    DESCRIPTORS,
    FLUSH_S,
    LENT,
    SENT,
    SENT_BYTES,
    ProtocolError,
    asked,
    describe_report,
    refusal,
)
from kvcache.daemon.server.admission import QUOTA
from kvcache.daemon.server.client_session import Session
from kvcache.daemon.wire import Wire
from kvcache.errors import AccessError, KVCacheError, UnreachableError
from kvcache.log import logger
from kvcache.tier.host.arena import Arena, Extent, Slot
from kvcache.tier.tier import Outcome
from kvcache.transfer.copier import Copy

# Moves records over the socket, straight from and into slots, for a client that does not map the arena. It is on
# another host, or its tenant's `share` is "copy". What is sent for a load is not waited for: the socket's own buffers
# are the flow control, and a slot is given back as soon as its bytes are in them. For a store the daemon says what it
# has room for, all of a window at once, so that one wait on the way is enough; the client sends those in that order.
# Each payload has its checksum, taken before it left and compared where it arrives.


class Streamer:
    """A `Mover` for the client at the other end of a connection."""

    def __init__(self, wire: Wire, lease_s: float, moved: Callable[[int], None]) -> None:
        """`lease_s`: for each batch of `SENT_BYTES`. `moved` is told of bytes."""
        self._wire, self._lease_s, self._moved = wire, lease_s, moved
        self._sizes: Sequence[int] = ()
        self.broken = False

    def begin(self, sizes: Sequence[int]) -> None:
        """A load or a store; the payload bytes by group."""
        self._sizes = sizes

    def close(self) -> None:
        """Nothing was lent."""

    def scatter(self, parts: Sequence[Part]) -> Sequence[Copy]:
        blocks = max((block for block, _, _ in parts), default=-1) + 1
        try:
            for batch in batches(parts):
                payloads = [self._payload(part) for part in batch]
                last = batch[-1] is parts[-1]
                rows = self._rows(batch, payloads)
                self._moved(sum(map(len, payloads)))
                self._wire.send({"sent": rows.tobytes(), "blocks": blocks if last else 0}, timeout_s=self._lease_s)
                self._wire.send_bytes(payloads, timeout_s=self._lease_s)
        except (UnreachableError, ProtocolError) as error:
            self.broken = True
            raise NotMovedError(str(error)) from None
        return ()

    def gather(self, parts: Sequence[Part]) -> None:
        """Nobody else has these slots, and nobody but this writes to them: they are as free as before if this fails."""
        wanted = list(batches(parts))
        try:
            for batch in wanted:
                self._wire.send({"wanted": self._rows(batch).tobytes()}, timeout_s=self._lease_s)
            for batch in wanted:
                self._receive(batch)
        except (UnreachableError, ProtocolError) as error:
            self.broken = True
            raise NotMovedError(str(error)) from None

    def _receive(self, batch: Sequence[Part]) -> None:
        reply, _ = self._wire.receive(self._lease_s)
        if reply.get("taken") is not True:
            raise NotMovedError("the client did not want it")
        sums = reply.get("sums")
        if not isinstance(sums, bytes) or len(sums) != 8 * len(batch):
            raise ProtocolError(f"sums of no form that is known: expected {8 * len(batch)} bytes")
        payloads = [self._payload(part) for part in batch]
        self._moved(sum(map(len, payloads)))
        self._wire.receive_bytes(payloads, self._lease_s)
        if np.frombuffer(sums, "<u8").tolist() != [xxh3_64_intdigest(payload) for payload in payloads]:
            raise ProtocolError("bytes that are not those that were sent: damaged on the way")

    def _payload(self, part: Part) -> memoryview:
        _, group, slot = part
        size = self._sizes[group]
        area = header_area(size)
        return slot.view[area : area + size]

    def _rows(self, batch: Sequence[Part], payloads: Sequence[memoryview] = ()) -> np.ndarray:
        sums = [xxh3_64_intdigest(payload) for payload in payloads] or [0] * len(batch)
        return np.array(
            [(i, group, 0, self._sizes[group], sum_) for (i, group, _), sum_ in zip(batch, sums, strict=True)], SENT
        )


def batches(parts: Sequence[Part]) -> Iterator[Sequence[Part]]:
    """Runs of at most `SENT_BYTES` of slots, or one slot."""
    first, size = 0, 0
    for i, (_, _, slot) in enumerate(parts):
        size += slot.extent.slot_bytes
        if size > SENT_BYTES and i > first:
            yield parts[first:i]
            first, size = i, slot.extent.slot_bytes
    if first < len(parts):
        yield parts[first:]


OUTCOMES: tuple[Outcome, ...] = tuple(Outcome)
"""In a message an outcome is one byte, its place in this order."""
_CODES = {outcome: code for code, outcome in enumerate(OUTCOMES)}

_log = logger("kvcache.daemon")


class Lender:
    """A `Mover` for the client at the other end of a connection."""

    def __init__(self, wire: Wire, arena: Arena, lease_s: float, moved: Callable[[int], None]) -> None:
        """`moved` is told of bytes that are lent."""
        self._wire, self._arena, self._lease_s, self._moved = wire, arena, lease_s, moved
        self._known: dict[int, tuple[Extent, bool]] = {}  # extents that this connection told of; whether writable
        self._lent: list[Slot] = []  # to a client that did not answer in time
        self.broken = False

    def begin(self, sizes: Sequence[int]) -> None:
        """A load or a store. The client knows the payloads' sizes."""

    def gather(self, parts: Sequence[Part]) -> None:
        slots = [slot for _, _, slot in parts]
        self._arena.acquire(*slots)
        try:
            self._lend(parts, writable=True)
        except BaseException:
            if self.broken:
                self._lent += slots
            else:
                self._arena.release(*slots)
            raise
        self._arena.release(*slots)

    def close(self) -> None:
        """Have back what was lent."""
        if self._lent:
            self._wire.outlast()
        self._arena.release(*self._lent)
        self._lent = []

    def scatter(self, parts: Sequence[Part]) -> Sequence[Copy]:
        self._lend(parts, writable=False)
        return ()

    def _lend(self, parts: Sequence[Part], *, writable: bool) -> None:
        first = 0
        while first < len(parts):
            new: dict[int, Extent] = {}
            end = first
            for _, _, slot in parts[first:]:
                extent = slot.extent
                told = self._known.get(extent.number)
                if told is None or (writable and not told[1]):
                    if len(new) == DESCRIPTORS and extent.number not in new:
                        break
                    new[extent.number] = extent
                end += 1
            blocks = max(i for i, _, _ in parts) + 1 if end == len(parts) else 0
            self._tell(parts[first:end], list(new.values()), blocks, writable=writable)
            first = end

    def _tell(self, parts: Sequence[Part], new: Sequence[Extent], blocks: int, *, writable: bool) -> None:
        """`blocks`: with these the client has all that it needs of so many; 0 while more is to come."""
        lent = np.array([(i, g, 0, s.extent.number, s.i, s.generation) for i, g, s in parts], LENT)
        descriptors: list[int] = []
        self._moved(sum(slot.extent.slot_bytes for _, _, slot in parts))
        try:
            descriptors.extend(extent.region.export(writable=writable) for extent in new)
            message = {
                "lent": lent.tobytes(),
                "blocks": blocks,
                "extents": [[e.number, e.slot_bytes, e.region.bytes, writable] for e in new],
                "gone": self._gone(),
            }
            self._wire.send(message, descriptors, timeout_s=self._lease_s)
            self._known.update({extent.number: (extent, writable) for extent in new})
            reply, _ = self._wire.receive(self._lease_s)
        except OSError as error:
            raise NotMovedError(f"no descriptor left for the client: {error}") from None
        except (UnreachableError, ProtocolError) as error:
            self.broken = True
            raise NotMovedError(str(error)) from None
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        if reply.get("taken") is not True:
            raise NotMovedError("the client did not want it")

    def _gone(self) -> list[int]:
        """Extents that the connection told of and that are no more."""
        gone = [number for number, (extent, _) in self._known.items() if extent.gone]
        for number in gone:
            del self._known[number]
        return gone


@dataclass(eq=False)
class Moving:
    """A connection that moves records, as the daemon sees it."""

    connection: socket.socket
    session: Session
    busy: bool = False
    ending: bool = False  # it takes no more questions

    def hang_up(self) -> None:
        """Its client sees the end. Where that may still write to what it was lent, this side goes on to listen for the
        other one to hang up: until then those slots are nobody else's."""
        lends = self.busy and not self.session.copies
        hang_up(self.connection, socket.SHUT_WR if lends else socket.SHUT_RDWR)


def hang_up(connection: socket.socket, how: int = socket.SHUT_RDWR) -> None:
    """Whoever waits for it sees its end; it stays theirs to close."""
    with suppress(OSError):  # not by a TLS socket's own method, after which another thread would send in the clear
        socket.socket.shutdown(connection, how)


def serve(moving: Moving, cache: Cache, lease_s: float) -> None:
    """Answer this connection until it ends, or a message makes no sense, or all of it ends."""
    wire, session = Wire(moving.connection, takes=False), moving.session
    lender: Lender | Streamer
    if session.copies:
        lender = Streamer(wire, lease_s, session.meter.move)
    else:
        lender = Lender(wire, cache.host.arena, lease_s, session.meter.move)
    try:
        while not (lender.broken or session.ended or moving.ending):
            message, _ = wire.receive()
            op, _ = asked(message, "mover")
            moving.busy = True
            answer = _answered(op, message, session, cache, lender)
            if not lender.broken:
                wire.send(answer, timeout_s=lease_s)
            moving.busy = lender.broken  # then until the other side has hung up
    except ProtocolError as error:
        with suppress(UnreachableError):
            wire.send(refusal(error), timeout_s=lease_s)
    except UnreachableError as error:
        _log.debug("a connection ended: %s", error)
    finally:
        lender.close()
        moving.busy = False
        wire.close()


def _answered(
    op: str, message: Mapping[str, Any], session: Session, cache: Cache, lender: Lender | Streamer
) -> dict[str, Any]:
    try:
        return {"ok": _answer(op, message, session, cache, lender)}
    except ProtocolError:
        raise
    except KVCacheError as error:
        return refusal(error)
    except Exception as error:  # noqa: BLE001  one client's fault is nobody else's
        _log.exception("%s failed", op)
        return refusal(KVCacheError(f"{op} failed: {error!r:.200}"))


def _answer(
    op: str, message: Mapping[str, Any], session: Session, cache: Cache, lender: Lender | Streamer
) -> dict[str, Any]:
    moves = op in ("load", "store")
    within = session.meter.ask(moves=moves, refusable=moves)
    if session.meter.flooded:
        raise ProtocolError(f"tenant {session.tenant.name!r} asks far more than its operations a second")
    if op == "flush":
        given = message.get("timeout_s")
        report = session.flush(FLUSH_S if given is None else min(FLUSH_S, given))
        return {"done": bool(report), "report": describe_report(report)}
    if op == "check":
        if not session.tenant.operator:
            raise AccessError("an audit tells of all tenants: only an operator may ask for it")
        return {"faults": cache.check()[:1000]}
    if op == "clear":
        return {"records": session.bound(message).clear()}
    if op == "changes":
        return _changes(message, session, cache)
    request = session.request(message["request"])
    if not within:
        return _refused(op, message, request, cache)
    lender.begin(session.sizes(message["request"]))
    move = request.bring if op == "load" else request.keep
    transfer: BlockTransfer = move(lender, message["first"], message["end"], _here)
    return {"outcomes": bytes(_CODES[outcome] for outcome in transfer.outcomes)}


def _refused(op: str, message: Mapping[str, Any], request: CacheRequest, cache: Cache) -> dict[str, Any]:
    """What is beyond the tenant's limits: blocks that are not there, or are not kept."""
    first, end = message["first"], message["end"]
    check_blocks(first, end, len(request.signatures))
    if op == "load":
        cache.flow.counters.add("load_failures", end - first, outcome=QUOTA)
    else:
        cache.flow.drop(end - first, QUOTA, request.chain.namespace_id, tier=cache.host.name)
    outcome = Outcome.ABSENT if op == "load" else Outcome.DROPPED
    return {"outcomes": bytes([_CODES[outcome]]) * (end - first)}


def _changes(message: Mapping[str, Any], session: Session, cache: Cache) -> dict[str, Any]:
    """Of namespaces that this session has bound: nobody is told of another's."""
    bounds = [session.bound({"namespace": number}) for number in message["namespaces"]]
    tenant = session.tenant
    told = cache.changes(message.get("after"), bounds, None if tenant.operator else tenant.name)
    return {
        "next": told.next,
        "lost": told.lost,
        "changes": [[c.kind, c.tier, c.namespace, c.group, c.shard, c.parent, c.signatures] for c in told.changes],
    }


def _here(call: Callable[[], None]) -> None:
    call()
