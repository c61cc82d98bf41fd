"""The chains that a fleet uses most, brought into a node's own memory in the background."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass

from kvcache.fleet.heat import Heat
from kvcache.hierarchy.cache import Cache
from kvcache.hierarchy.prefix import wanted
from kvcache.hierarchy.request import BoundCache
from kvcache.hierarchy.run import Chained, Run
from kvcache.observe.request import logger
from kvcache.tier.tier import BACKGROUND, Outcome

WINDOW_BYTES = 16 << 20
"""On their way at a time: what a request waits for goes before it."""
_ASK_S = 5.0
_PAUSE_S = 0.002

_log = logger("kvcache.fleet")


@dataclass(slots=True)
class Fetched:
    """Progress. `chains` of the fleet's were looked at, of which `whole` are near now."""

    chains: int = 0
    whole: int = 0
    blocks: int = 0
    bytes: int = 0
    full: bool = False  # the limit on bytes, or host memory, had no room for the rest
    fault: str = ""


class Room:
    """Bytes that may be brought, by several fetches together. Thread-safe."""

    def __init__(self, most_bytes: int) -> None:
        self._left = most_bytes
        self._lock = threading.Lock()

    def take(self, size_bytes: int) -> bool:
        with self._lock:
            if size_bytes > self._left:
                return False
            self._left -= size_bytes
            return True


class Fetch:
    """Host memory bounds what is brought, as `room` does. Nothing that was used after this began leaves for it."""

    def __init__(self, cache: Cache, heat: Heat, bounds: Iterable[BoundCache], count: int, room: Room) -> None:
        self._cache, self._heat, self._count, self._room = cache, heat, count, room
        self._bounds = {bound.id: bound for bound in bounds}.values()
        self.fetched = Fetched()
        self._done = threading.Event()
        self._stop = threading.Event()

    @property
    def ready(self) -> bool:
        return self._done.is_set()

    def start(self) -> threading.Thread:
        thread = threading.Thread(target=self.run, name="kvcache-fetch", daemon=True)
        thread.start()
        return thread

    def stop(self) -> None:
        self._stop.set()

    def run(self) -> None:
        """Raises for nothing."""
        try:
            for bound in self._bounds:
                for packed in self._heat.hottest(bound.id, self._count):
                    if self._stop.is_set() or self.fetched.full:
                        return
                    self._one(bound, packed)
        except OSError as error:
            self.fetched.fault = str(error)
            _log.warning("the fleet's hottest chains: %s", error)
        except Exception as error:  # noqa: BLE001  never in the way
            self.fetched.fault = repr(error)
            _log.exception("the fleet's hottest chains: a defect")
        finally:
            self._done.set()

    def _one(self, bound: BoundCache, packed: bytes) -> None:
        self.fetched.chains += 1
        clock = self._cache.flow.port.clock
        with bound.request(id="warm-up", deadline_s=_ASK_S) as request:
            hit = request.match(signatures=packed, head=bound.id)
            end = clock.now() + _ASK_S
            while hit.pending and clock.now() < end and not self._stop.wait(_PAUSE_S):
                hit = request.match()
            before = request.begin()
        lookup = self._cache.index.lookup(
            bound.names, bound.needs
        )  # all there is, whatever the plan says of loading it
        lookup.match(packed)
        if lookup.blocks and self._bring(bound, packed, lookup.blocks, before):
            self.fetched.whole += 1

    def _bring(self, bound: BoundCache, packed: bytes, blocks: int, before: int) -> bool:
        """Head first, a window at a time; whether all of it is near."""
        flow = self._cache.flow
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
            if not self._room.take(size):
                self.fetched.full = True
                return False
            arrivals = flow.promoter.begin(
                far,
                lambda count, size: flow.slots(count, size, bound.tenant, before=before),
                priority=BACKGROUND,
                deadline=None,
            )
            for arrival in arrivals:
                outcome = arrival if isinstance(arrival, Outcome) else flow.promoter.wait(arrival, _ASK_S)
                if outcome is not Outcome.DONE:
                    self.fetched.full = outcome is Outcome.NO_ROOM
                    return False
                self.fetched.blocks += 1
            self.fetched.bytes += size
            if self._stop.is_set():
                return False
        return True
