"""Moves records over the socket, straight from and into slots, for a client that does not map the arena.

It is on another host, or its tenant's `share` is "copy". What is sent for a load is not waited for: the socket's own
buffers are the flow control, and a slot is given back as soon as its bytes are in them. For a store the daemon says
what it has room for, all of a window at once, so that one wait on the way is enough; the client sends those in that
order. Each payload has its checksum, taken before it left and compared where it arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from xxhash import xxh3_64_intdigest

from kvcache.block.record import header_area
from kvcache.cache.slot_copy import NotMovedError, Part
from kvcache.daemon.protocol import SENT, SENT_BYTES, ProtocolError
from kvcache.daemon.wire import Wire
from kvcache.errors import UnreachableError
from kvcache.transfer.copier import Copy


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
