"""Transfer connections in the daemon: leases slots to clients that map the arena, and sends payloads to others.

One thread serves each transfer connection (`serve_transfers`). It moves blocks through one of two classes:
  - `SlotLease`: the client copies between a leased slot and its pages.
  - `SocketTransport`: the payload bytes go over the socket.

A slot leased for reading is held while the client copies, at most `daemon.lease_s`. After that the arena may reuse it;
the client compares the slot's generation before and after its copy and discards what it copied.

A slot leased for storing is not reused before the client has hung up, because until then the client may write to it. A
client hangs up only after its copy has ended, or because its process has.
"""

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
from kvcache.cache.slot_copy import CopyPart, PeerAbortedError
from kvcache.daemon.protocol import (
    LEASE_DTYPE,
    MAX_BATCH_BYTES,
    MAX_FLUSH_S,
    MAX_FRAME_DESCRIPTORS,
    PAYLOAD_DTYPE,
    ProtocolError,
    describe_report,
    error_reply,
    parse_request,
)
from kvcache.daemon.server.admission import QUOTA_REASON
from kvcache.daemon.server.client_session import ClientSession
from kvcache.daemon.wire import Wire
from kvcache.errors import AccessError, KVCacheError, UnreachableError
from kvcache.log import logger
from kvcache.tier.host.arena import Arena, Slab, Slot
from kvcache.tier.tier import Outcome
from kvcache.transfer.copier import CopyHandle

# Payloads over the socket, read from and written to slots directly. They serve clients that do not map the arena:
# those of another host, and those of a tenant with `share = "copy"`. For a load the daemon waits for no reply: the
# socket buffers are the flow control, and a slot is released once its bytes are in them. For a store the daemon
# requests a whole window of payloads at once, so that one round trip is enough; the client sends them in that order.
# The sender takes a checksum of each payload, and the receiver compares it.


class SocketTransport:
    """A slot copy (`load_via`, `store_via`) that sends and receives payloads over the client's connection."""

    def __init__(self, wire: Wire, lease_s: float, on_bytes_moved: Callable[[int], None]) -> None:
        """Serve one client.

        Args:
            wire: The client's connection.
            lease_s: Timeout of each batch of at most `MAX_BATCH_BYTES`.
            on_bytes_moved: Called with the number of bytes.
        """
        self._wire, self._lease_s, self._on_bytes_moved = wire, lease_s, on_bytes_moved
        self._sizes: Sequence[int] = ()
        self.broken = False

    def begin(self, sizes: Sequence[int]) -> None:
        """Start a load or a store; `sizes` are the payload bytes by group."""
        self._sizes = sizes

    def close(self) -> None:
        """Do nothing: no slot was leased."""

    def scatter(self, parts: Sequence[CopyPart]) -> Sequence[CopyHandle]:
        blocks = max((block for block, _, _ in parts), default=-1) + 1
        try:
            for batch in payload_batches(parts):
                payloads = [self._payload(part) for part in batch]
                last = batch[-1] is parts[-1]
                rows = self._rows(batch, payloads)
                self._on_bytes_moved(sum(map(len, payloads)))
                self._wire.send({"sent": rows.tobytes(), "blocks": blocks if last else 0}, timeout_s=self._lease_s)
                self._wire.send_bytes(payloads, timeout_s=self._lease_s)
        except (UnreachableError, ProtocolError) as error:
            self.broken = True
            raise PeerAbortedError(str(error)) from None
        return ()

    def gather(self, parts: Sequence[CopyPart]) -> None:
        """Receive payloads into slots.

        No other thread or client uses these slots, so that they are free again after a failure.
        """
        wanted = list(payload_batches(parts))
        try:
            for batch in wanted:
                self._wire.send({"wanted": self._rows(batch).tobytes()}, timeout_s=self._lease_s)
            for batch in wanted:
                self._receive(batch)
        except (UnreachableError, ProtocolError) as error:
            self.broken = True
            raise PeerAbortedError(str(error)) from None

    def _receive(self, batch: Sequence[CopyPart]) -> None:
        reply, _ = self._wire.receive(self._lease_s)
        if reply.get("taken") is not True:
            raise PeerAbortedError("the client cancelled it")
        sums = reply.get("sums")
        if not isinstance(sums, bytes) or len(sums) != 8 * len(batch):
            raise ProtocolError(f"checksums: expected {8 * len(batch)} bytes")
        payloads = [self._payload(part) for part in batch]
        self._on_bytes_moved(sum(map(len, payloads)))
        self._wire.receive_bytes(payloads, self._lease_s)
        if np.frombuffer(sums, "<u8").tolist() != [xxh3_64_intdigest(payload) for payload in payloads]:
            raise ProtocolError("received bytes differ from their checksums: damaged in transit")

    def _payload(self, part: CopyPart) -> memoryview:
        _, group, slot = part
        size = self._sizes[group]
        area = header_area(size)
        return slot.view[area : area + size]

    def _rows(self, batch: Sequence[CopyPart], payloads: Sequence[memoryview] = ()) -> np.ndarray:
        sums = [xxh3_64_intdigest(payload) for payload in payloads] or [0] * len(batch)
        return np.array(
            [(i, group, 0, self._sizes[group], sum_) for (i, group, _), sum_ in zip(batch, sums, strict=True)],
            PAYLOAD_DTYPE,
        )


def payload_batches(parts: Sequence[CopyPart]) -> Iterator[Sequence[CopyPart]]:
    """Split `parts` into batches whose slots take at most `MAX_BATCH_BYTES`, or into single slots."""
    first, size = 0, 0
    for i, (_, _, slot) in enumerate(parts):
        size += slot.slab.slot_bytes
        if size > MAX_BATCH_BYTES and i > first:
            yield parts[first:i]
            first, size = i, slot.slab.slot_bytes
    if first < len(parts):
        yield parts[first:]


WIRE_OUTCOMES: tuple[Outcome, ...] = tuple(Outcome)
"""An outcome is one byte in a message: its position in this order."""
_OUTCOME_CODES = {outcome: code for code, outcome in enumerate(WIRE_OUTCOMES)}

_log = logger("kvcache.daemon")


class SlotLease:
    """A slot copy (`load_via`, `store_via`) by a client that maps the arena."""

    def __init__(self, wire: Wire, arena: Arena, lease_s: float, on_bytes_moved: Callable[[int], None]) -> None:
        """`on_bytes_moved` is called with the number of bytes leased."""
        self._wire, self._arena, self._lease_s, self._on_bytes_moved = wire, arena, lease_s, on_bytes_moved
        self._exported_slabs: dict[
            int, tuple[Slab, bool]
        ] = {}  # slabs whose descriptor this connection has sent, and whether writable
        self._unreturned_slots: list[Slot] = []  # leased to a client that did not reply in time
        self.broken = False

    def begin(self, sizes: Sequence[int]) -> None:
        """Start a load or a store. The client knows the sizes of the payloads."""

    def gather(self, parts: Sequence[CopyPart]) -> None:
        slots = [slot for _, _, slot in parts]
        self._arena.acquire(*slots)
        try:
            self._lease_slots(parts, writable=True)
        except BaseException:
            if self.broken:
                self._unreturned_slots += slots
            else:
                self._arena.release(*slots)
            raise
        self._arena.release(*slots)

    def close(self) -> None:
        """Release every leased slot, after the client has hung up."""
        if self._unreturned_slots:
            self._wire.wait_for_hangup()
        self._arena.release(*self._unreturned_slots)
        self._unreturned_slots = []

    def scatter(self, parts: Sequence[CopyPart]) -> Sequence[CopyHandle]:
        self._lease_slots(parts, writable=False)
        return ()

    def _lease_slots(self, parts: Sequence[CopyPart], *, writable: bool) -> None:
        first = 0
        while first < len(parts):
            new: dict[int, Slab] = {}
            end = first
            for _, _, slot in parts[first:]:
                slab = slot.slab
                exported = self._exported_slabs.get(slab.number)
                if exported is None or (writable and not exported[1]):
                    if len(new) == MAX_FRAME_DESCRIPTORS and slab.number not in new:
                        break
                    new[slab.number] = slab
                end += 1
            blocks = max(i for i, _, _ in parts) + 1 if end == len(parts) else 0
            self._send_lease(parts[first:end], list(new.values()), blocks, writable=writable)
            first = end

    def _send_lease(self, parts: Sequence[CopyPart], new: Sequence[Slab], blocks: int, *, writable: bool) -> None:
        """Lease slots and wait for the client's reply.

        Args:
            parts: The slots, by block and group.
            new: Slabs whose descriptor the client still needs.
            blocks: Number of blocks that are complete with this message; 0 while more messages follow.
            writable: For a store.
        """
        lease_rows = np.array([(i, g, 0, s.slab.number, s.i, s.generation) for i, g, s in parts], LEASE_DTYPE)
        descriptors: list[int] = []
        self._on_bytes_moved(sum(slot.slab.slot_bytes for _, _, slot in parts))
        try:
            descriptors.extend(slab.region.export(writable=writable) for slab in new)
            message = {
                "lent": lease_rows.tobytes(),
                "blocks": blocks,
                "extents": [[e.number, e.slot_bytes, e.region.bytes, writable] for e in new],
                "gone": self._removed_slabs(),
            }
            self._wire.send(message, descriptors, timeout_s=self._lease_s)
            self._exported_slabs.update({slab.number: (slab, writable) for slab in new})
            reply, _ = self._wire.receive(self._lease_s)
        except OSError as error:
            raise PeerAbortedError(f"no file descriptor for the client: {error}") from None
        except (UnreachableError, ProtocolError) as error:
            self.broken = True
            raise PeerAbortedError(str(error)) from None
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        if reply.get("taken") is not True:
            raise PeerAbortedError("the client cancelled it")

    def _removed_slabs(self) -> list[int]:
        """Return the slabs that this connection has announced and the arena has unmapped; forget them."""
        unmapped = [number for number, (slab, _) in self._exported_slabs.items() if slab.unmapped]
        for number in unmapped:
            del self._exported_slabs[number]
        return unmapped


@dataclass(eq=False)
class TransferConnection:
    """A transfer connection, as the loop's thread sees it."""

    connection: socket.socket
    session: ClientSession
    busy: bool = False
    ending: bool = False  # takes no further messages

    def hang_up(self) -> None:
        """Hang up, so that the client sees the end.

        Where the client may still write to leased slots, the daemon closes its sending side only and waits for the
        client to hang up. Until then these slots are not reused.
        """
        lends = self.busy and not self.session.streams_payloads
        hang_up(self.connection, socket.SHUT_WR if lends else socket.SHUT_RDWR)


def hang_up(connection: socket.socket, how: int = socket.SHUT_RDWR) -> None:
    """Shut the socket down, which wakes the thread that waits on it; that thread still closes it."""
    with suppress(OSError):  # a TLS socket's own `shutdown` would let another thread send in the clear
        socket.socket.shutdown(connection, how)


def serve_transfers(moving: TransferConnection, cache: Cache, lease_s: float) -> None:
    """Answer this connection until it ends, its session ends, the daemon ends, or a message is malformed."""
    wire, session = Wire(moving.connection, accepts_descriptors=False), moving.session
    transport: SlotLease | SocketTransport
    if session.streams_payloads:
        transport = SocketTransport(wire, lease_s, session.rate_limit.count_bytes)
    else:
        transport = SlotLease(wire, cache.host.arena, lease_s, session.rate_limit.count_bytes)
    try:
        while not (transport.broken or session.ended or moving.ending):
            message, _ = wire.receive()
            op, _ = parse_request(message, "mover")
            moving.busy = True
            answer = _reply(op, message, session, cache, transport)
            if not transport.broken:
                wire.send(answer, timeout_s=lease_s)
            moving.busy = transport.broken  # then until the client has hung up
    except ProtocolError as error:
        with suppress(UnreachableError):
            wire.send(error_reply(error), timeout_s=lease_s)
    except UnreachableError as error:
        _log.debug("connection ended: %s", error)
    finally:
        transport.close()
        moving.busy = False
        wire.close()


def _reply(
    op: str, message: Mapping[str, Any], session: ClientSession, cache: Cache, transport: SlotLease | SocketTransport
) -> dict[str, Any]:
    try:
        return {"ok": _execute(op, message, session, cache, transport)}
    except ProtocolError:
        raise
    except KVCacheError as error:
        return error_reply(error)
    except Exception as error:  # noqa: BLE001  boundary to foreign code: the error is the reply to one client
        _log.exception("%s failed", op)
        return error_reply(KVCacheError(f"{op} failed: {error!r:.200}"))


def _execute(
    op: str, message: Mapping[str, Any], session: ClientSession, cache: Cache, transport: SlotLease | SocketTransport
) -> dict[str, Any]:
    moves = op in ("load", "store")
    within = session.rate_limit.count_operation(moves=moves, refusable=moves)
    if session.rate_limit.overdrawn:
        raise ProtocolError(f"tenant {session.tenant.name!r} far exceeds its operations a second")
    if op == "flush":
        given = message.get("timeout_s")
        report = session.flush(MAX_FLUSH_S if given is None else min(MAX_FLUSH_S, given))
        return {"done": bool(report), "report": describe_report(report)}
    if op == "check":
        if not session.tenant.operator:
            raise AccessError("an audit covers all tenants: only an operator may request it")
        return {"faults": cache.check()[:1000]}
    if op == "clear":
        return {"records": session.find_namespace(message).clear()}
    if op == "changes":
        return _kv_events(message, session, cache)
    request = session.request(message["request"])
    if not within:
        return _rate_limited(op, message, request, cache)
    transport.begin(session.payload_sizes(message["request"]))
    move = request.load_via if op == "load" else request.store_via
    transfer: BlockTransfer = move(transport, message["first"], message["end"], _run_inline)
    return {"outcomes": bytes(_OUTCOME_CODES[outcome] for outcome in transfer.outcomes)}


def _rate_limited(op: str, message: Mapping[str, Any], request: CacheRequest, cache: Cache) -> dict[str, Any]:
    """Return the outcomes of a transfer beyond the tenant's limits: blocks not found, or dropped."""
    first, end = message["first"], message["end"]
    check_blocks(first, end, len(request.signatures))
    if op == "load":
        cache.counters.add("load_failures", end - first, outcome=QUOTA_REASON)
    else:
        cache.tier_manager.drop(end - first, QUOTA_REASON, request.chain.namespace_id, tier=cache.host.name)
    outcome = Outcome.NOT_FOUND if op == "load" else Outcome.DROPPED
    return {"outcomes": bytes([_OUTCOME_CODES[outcome]]) * (end - first)}


def _kv_events(message: Mapping[str, Any], session: ClientSession, cache: Cache) -> dict[str, Any]:
    """Return events of namespaces that this session has bound; no event of another tenant."""
    handles = [session.find_namespace({"namespace": number}) for number in message["namespaces"]]
    tenant = session.tenant
    events = cache.kv_events(message.get("after"), handles, None if tenant.operator else tenant.name)
    return {
        "next": events.next,
        "lost": events.lost,
        "changes": [[c.kind, c.tier, c.namespace, c.group, c.shard, c.parent, c.signatures] for c in events.kv_events],
    }


def _run_inline(call: Callable[[], None]) -> None:
    call()
