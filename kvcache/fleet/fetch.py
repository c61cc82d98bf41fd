"""The chains that a fleet uses most, brought into a node's own memory in the background."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass

from kvcache.cache.cache import Cache
from kvcache.cache.prefetch import Near, Room
from kvcache.cache.request import BoundCache
from kvcache.fleet.heat import Heat
from kvcache.log import logger

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


class Fetch:
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
        near = Near(self._cache.flow, bound, packed, self._room, self._stop.is_set)
        self.fetched.chains += 1
        self.fetched.whole += near.bring("warm-up")
        self.fetched.blocks += near.blocks
        self.fetched.bytes += near.bytes
        self.fetched.full = near.full
