"""One chain brought into host memory before anybody asks for it, head first, at the lowest priority."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from kvcache.cache.promote import Arrival
from kvcache.cache.request import BoundCache
from kvcache.cache.tier_manager import Flow
from kvcache.index.block_run import ALL, Chained, Run, wanted
from kvcache.tier.tier import BACKGROUND, Outcome

WINDOW_BYTES = 16 << 20
"""On their way at a time: what a request waits for goes before it."""
ANSWER_S = 5.0
"""For shared tiers to say what they have, and for one record to come."""
_PAUSE_S = 0.002


class Room:
    """Bytes that may be brought, by several chains together. Thread-safe."""

    def __init__(self, most_bytes: int) -> None:
        self._left = most_bytes
        self._lock = threading.Lock()

    def take(self, size_bytes: int) -> bool:
        with self._lock:
            if size_bytes > self._left:
                return False
            self._left -= size_bytes
            return True

    def give_back(self, size_bytes: int) -> None:
        """Of what was taken and does not come."""
        with self._lock:
            self._left += size_bytes


class Near:
    """`packed`: the chain's signatures, from its first block on. Host memory bounds what is brought, as `room` does,
    where there is one, and `most_blocks` of the chain. Nothing that was used after this began leaves for it. `ends`: it
    stops where this is so, looked at now and then."""

    def __init__(
        self,
        flow: Flow,
        bound: BoundCache,
        packed: bytes,
        room: Room | None,
        ends: Callable[[], bool],
        *,
        most_blocks: int = ALL,
    ) -> None:
        self._most_blocks = most_blocks
        self._flow, self._bound, self._packed, self._room, self._ends = flow, bound, packed, room, ends
        self.blocks = self.bytes = 0  # that came
        self.full = False  # the limit on bytes, or host memory, had no room for the rest

    def bring(self, id: str) -> bool:
        """Whether all of it that any tier has is in host memory. `id`: what the log calls who wants it."""
        bound, index = self._bound, self._flow.index
        with bound.request(id=id, deadline_s=ANSWER_S) as request:
            hit = request.match(signatures=self._packed, head=bound.id)
            clock, pause = self._flow.port.clock, threading.Event()
            end = clock.now() + ANSWER_S
            while hit.pending and clock.now() < end and not self._ends():
                pause.wait(_PAUSE_S)
                hit = request.match()
            before = request.begin()
        lookup = index.lookup(bound.names, bound.needs)  # all there is, whatever the plan says of loading it
        lookup.match(self._packed)
        blocks = min(lookup.blocks, self._most_blocks)
        return bool(blocks) and self._bring(blocks, before)

    def _bring(self, blocks: int, before: int) -> bool:
        flow, bound, packed = self._flow, self._bound, self._packed
        need = wanted(bound.layout, blocks)
        chains = [Chained(bound.id, packed, p.group, p.shard, p.payload_bytes, bound.id) for p in bound.everywhere]
        step = max(1, WINDOW_BYTES // sum(chain.payload_bytes for chain in chains))
        for first in range(0, blocks, step):
            far = []
            for place, chain in zip(bound.everywhere, chains, strict=True):
                part = range(max(first, need[place.group].start), min(first + step, blocks))
                near = flow.index.where(Run(place.name, packed).part(part.start, part.stop)) if part else b""
                far += [(chain[i], chain.payload_bytes) for i, mask in zip(part, near, strict=True) if not mask & 1]
            size = sum(payload for _, payload in far)
            if self._room is not None and not self._room.take(size):
                self.full = True
                return False
            arrivals = flow.promoter.begin(
                far,
                lambda count, size: flow.slots(count, size, bound.tenant, before=before),
                priority=BACKGROUND,
                deadline=None,
            )
            if not self._came(arrivals, [payload for _, payload in far]) or self._ends():
                return False
        return True

    def _came(self, arrivals: Sequence[Arrival | Outcome], sizes: Sequence[int]) -> bool:
        """Whether all did. What is late may still come, and is not waited for once one was."""
        promoter, patience_s, whole = self._flow.promoter, ANSWER_S, True
        for arrival, size in zip(arrivals, sizes, strict=True):
            outcome = arrival if isinstance(arrival, Outcome) else promoter.wait(arrival, patience_s)
            if outcome is Outcome.DONE:
                self.blocks, self.bytes = self.blocks + 1, self.bytes + size
                continue
            whole, self.full = False, self.full or outcome is Outcome.NO_ROOM
            if isinstance(arrival, Arrival) and not arrival.outcome.settled:
                patience_s = 0.0
            elif self._room is not None:
                self._room.give_back(size)
        return whole
