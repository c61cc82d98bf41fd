"""A cache as a node of its fleet: it tells what it uses, fetches what the others use, and answers `kvcache warm`."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvcache.cache.cache import Cache
from kvcache.cache.prefetch import Near, Room
from kvcache.cache.request import BoundCache
from kvcache.errors import ConfigError
from kvcache.fleet.coordination import Board
from kvcache.fleet.popularity import CHAINS, Heat, Teller
from kvcache.fleet.warm import Engine, Prompt, Warm
from kvcache.log import logger

# The chains that a fleet uses most, brought into a node's own memory in the background.

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


SETTLE_S = 30.0
"""For what was computed to reach the fleet."""
_MOST_KEPT = 16  # of fetches, for whoever asks how far they are


def join(cache: Cache) -> Node | None:
    """Where the settings name a Redis; ends with the cache."""
    if cache.settings.redis.enabled:
        return Node(cache)
    cache.answers["warm"] = _alone
    return None


def _alone(asked: dict[Any, Any]) -> dict[str, Any]:
    raise ConfigError("redis.enabled is false in this cache's settings: it has no fleet to fetch from")


def warm_up(cache: Cache, url: str, prompts: Sequence[Prompt]) -> Warm:
    """Have the engine at `url`, whose cache this is, read or compute these prompts, in the background."""
    settings, clock = cache.settings.warm, cache.flow.port.clock
    board = Board(cache.settings.redis, cache.flow.port) if cache.settings.redis.enabled else None
    watch = cache.flow.watch(anew=True)

    def begin() -> None:
        nonlocal watch
        watch = cache.flow.watch(anew=True)

    def settle() -> bool:
        return bool(cache.flow.flush(SETTLE_S, watch=watch, first=cache.at_flush, fleet=True))

    warm = Warm(
        Engine(url),
        prompts,
        board,
        clock,
        begin=begin,
        settle=settle,
        held=lambda: cache.host.usage().used_bytes,
        most_bytes=min(settings.max_bytes, cache.settings.host.capacity_bytes // 2),
        patience_s=settings.deadline_s,
        lease_s=settings.lease_s,
    )
    if settings.before_ready:
        end = clock.now() + settings.deadline_s
        cache.waits.append(lambda: warm.ready or clock.now() >= end)
    cache.at_close.append(warm.stop)
    if board is not None:
        cache.at_close.append(board.close)
    warm.start()
    return warm


class Node:
    def __init__(self, cache: Cache) -> None:
        settings, self._cache = cache.settings.warm, cache
        self._board = Board(cache.settings.redis, cache.flow.port)
        self._heat = Heat(self._board, half_life_s=settings.heat_half_life_s)
        self._most_bytes = min(settings.max_bytes, cache.settings.host.capacity_bytes // 2)
        self._room = Room(self._most_bytes)
        self._fetches: list[Fetch] = []
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        telling = settings.heat and cache.settings.explain.memory_bytes > 0
        self._teller = Teller(cache, self._heat, every_s=settings.heat_every_s) if telling else None
        self._end = cache.flow.port.clock.now() + settings.deadline_s
        if settings.hot:
            cache.at_bind.append(lambda bound: self.fetch([bound], settings.hot, self._room))
            if settings.before_ready:
                cache.waits.append(self.ready)
        cache.answers["warm"] = self.answer
        cache.at_close.append(self.close)

    def ready(self) -> bool:
        """All that was to be fetched was, or had its time."""
        return self._cache.flow.port.clock.now() >= self._end or all(fetch.ready for fetch in self._fetches)

    def fetch(self, bounds: list[BoundCache], count: int, room: Room) -> Fetch:
        fetch = Fetch(self._cache, self._heat, bounds, count, room)
        with self._lock:
            self._fetches = [*self._fetches[-_MOST_KEPT:], fetch]
            self._threads = [*(thread for thread in self._threads if thread.is_alive()), fetch.start()]
        return fetch

    def answer(self, asked: dict[Any, Any]) -> dict[str, Any]:
        """`hot`: begin to fetch so many chains; without, how far the last fetch is. `max_bytes`: at most."""
        count, most = asked.get("hot"), asked.get("max_bytes")
        if count is not None:
            if not isinstance(count, int) or isinstance(count, bool) or not 0 < count <= CHAINS:
                raise ConfigError(f"hot = {count!r:.40}: expected 1 to {CHAINS} chains")
            if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 0):
                raise ConfigError(f"max_bytes = {most!r:.40}: expected a number of bytes")
            bounds = self._cache.bounds
            if not bounds:
                raise ConfigError("no engine has bound a namespace here yet: there is nothing to fetch for")
            self.fetch(bounds, count, Room(self._most_bytes if most is None else most))
        if not self._fetches:
            return {"done": True}
        last = self._fetches[-1]
        return {"done": last.ready, **asdict(last.fetched)}

    def close(self) -> None:
        with self._lock:
            fetches, threads = list(self._fetches), list(self._threads)
        for fetch in fetches:
            fetch.stop()
        self._board.close()  # wakes who waits for a server
        for thread in threads:
            thread.join()
        if self._teller is not None:
            self._teller.close()
