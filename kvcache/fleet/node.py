"""A cache as a node of its fleet: reports its most used chains, prefetches the fleet's, and answers `kvcache warm`."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvcache.cache.cache import Cache
from kvcache.cache.prefetch import ByteBudget, Prefetcher
from kvcache.cache.request import CacheNamespace
from kvcache.errors import ConfigError
from kvcache.fleet.coordination import Coordination
from kvcache.fleet.popularity import MAX_CHAINS, Popularity, PopularityReporter
from kvcache.fleet.warm import EngineClient, NodeCallbacks, Prompt, WarmLimits, WarmUp
from kvcache.log import logger

# Prefetch of the fleet's most used chains into this node's host memory, in the background.

_log = logger("kvcache.fleet")


@dataclass(slots=True)
class PrefetchProgress:
    """Progress of a prefetch.

    `chains` were tried. Of `whole` of them, host memory now holds every block that any tier has.
    """

    chains: int = 0
    whole: int = 0
    blocks: int = 0
    bytes: int = 0
    full: bool = False  # the byte budget or host memory has no capacity for the rest
    fault: str = ""


class Prefetch:
    def __init__(
        self, cache: Cache, popularity: Popularity, handles: Iterable[CacheNamespace], count: int, limit: ByteBudget
    ) -> None:
        self._cache, self._popularity, self._count, self._room = cache, popularity, count, limit
        self._handles = {handle.id: handle for handle in handles}.values()
        self.progress = PrefetchProgress()
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
        """Prefetch the chains. Never raises."""
        try:
            for handle in self._handles:
                for packed in self._popularity.hottest(handle.id, self._count):
                    if self._stop.is_set() or self.progress.full:
                        return
                    self._prefetch_chain(handle, packed)
        except OSError as error:
            self.progress.fault = str(error)
            _log.warning("cannot read the fleet's popular prefixes: %s", error)
        except Exception as error:  # noqa: BLE001  worker thread that must survive: a cache fault never fails a request
            self.progress.fault = repr(error)
            _log.exception("reading the fleet's popular prefixes failed")
        finally:
            self._done.set()

    def _prefetch_chain(self, handle: CacheNamespace, packed: bytes) -> None:
        near = Prefetcher(handle, packed, self._room, self._stop.is_set)
        self.progress.chains += 1
        self.progress.whole += near.prefetch("warm-up")
        self.progress.blocks += near.blocks
        self.progress.bytes += near.bytes
        self.progress.full = near.full


SETTLE_TIMEOUT_S = 30.0
"""For computed blocks to reach the shared tiers."""
_MAX_KEPT = 16  # prefetches whose progress can still be asked for


def join_fleet(cache: Cache) -> FleetNode | None:
    """Make the cache a node of its fleet, where the settings name a Redis. The node closes with the cache."""
    if cache.settings.redis.enabled:
        return FleetNode(cache)
    cache.control_handlers["warm"] = _refuse_without_fleet
    return None


def _refuse_without_fleet(requested: dict[Any, Any]) -> dict[str, Any]:
    raise ConfigError("redis.enabled is false in this cache's settings: this cache has no fleet")


def warm_up(cache: Cache, url: str, prompts: Sequence[Prompt]) -> WarmUp:
    """Have the engine at `url`, whose cache this is, read or compute these prompts in the background."""
    settings, clock = cache.settings.warm, cache.os_env.clock
    coordination = Coordination(cache.settings.redis, cache.os_env) if cache.settings.redis.enabled else None
    watch = cache.tier_manager.watch(anew=True)

    def begin() -> None:
        nonlocal watch
        watch = cache.tier_manager.watch(anew=True)

    def settle() -> bool:
        return bool(cache.tier_manager.flush(SETTLE_TIMEOUT_S, watch=watch, first=cache.on_flush, fleet=True))

    warm = WarmUp(
        EngineClient(url),
        prompts,
        coordination,
        clock,
        NodeCallbacks(begin=begin, settle=settle, used_bytes=lambda: cache.host.usage().used_bytes),
        WarmLimits(
            max_bytes=min(settings.max_bytes, cache.settings.host.capacity_bytes // 2),
            patience_s=settings.deadline_s,
            lease_s=settings.lease_s,
        ),
    )
    if settings.before_ready:
        end = clock.now() + settings.deadline_s
        cache.readiness_checks.append(lambda: warm.ready or clock.now() >= end)
    cache.on_close.append(warm.stop)
    if coordination is not None:
        cache.on_close.append(coordination.close)
    warm.start()
    return warm


class FleetNode:
    def __init__(self, cache: Cache) -> None:
        settings, self._cache = cache.settings.warm, cache
        self._coordination = Coordination(cache.settings.redis, cache.os_env)
        self._popularity = Popularity(self._coordination)
        self._most_bytes = min(settings.max_bytes, cache.settings.host.capacity_bytes // 2)
        self._room = ByteBudget(self._most_bytes)
        self._prefetches: list[Prefetch] = []
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        reports = settings.report_popularity and cache.settings.explain.memory_bytes > 0
        self._popularity_reporter = (
            PopularityReporter(cache, self._popularity, report_interval_s=settings.popularity_interval_s)
            if reports
            else None
        )
        self._end = cache.os_env.clock.now() + settings.deadline_s
        if settings.hot:
            cache.on_bind.append(lambda handle: self.prefetch([handle], settings.hot, self._room))
            if settings.before_ready:
                cache.readiness_checks.append(self.ready)
        cache.control_handlers["warm"] = self.answer
        cache.on_close.append(self.close)

    def ready(self) -> bool:
        """Return whether every prefetch is done, or the deadline has passed."""
        return self._cache.os_env.clock.now() >= self._end or all(prefetch.ready for prefetch in self._prefetches)

    def prefetch(self, handles: list[CacheNamespace], count: int, limit: ByteBudget) -> Prefetch:
        prefetch = Prefetch(self._cache, self._popularity, handles, count, limit)
        with self._lock:
            self._prefetches = [*self._prefetches[-_MAX_KEPT:], prefetch]
            self._threads = [*(thread for thread in self._threads if thread.is_alive()), prefetch.start()]
        return prefetch

    def answer(self, requested: dict[Any, Any]) -> dict[str, Any]:
        """Answer `kvcache warm`.

        Args:
            requested: `hot`: start to prefetch that many chains; without it, report the last prefetch. `max_bytes`: the
                byte budget.
        """
        count, most = requested.get("hot"), requested.get("max_bytes")
        if count is not None:
            if not isinstance(count, int) or isinstance(count, bool) or not 0 < count <= MAX_CHAINS:
                raise ConfigError(f"hot = {count!r:.40}: expected 1 to {MAX_CHAINS} chains")
            if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 0):
                raise ConfigError(f"max_bytes = {most!r:.40}: expected a number of bytes")
            handles = self._cache.handles
            if not handles:
                raise ConfigError("no engine has bound a namespace yet: start an engine first")
            self.prefetch(handles, count, ByteBudget(self._most_bytes if most is None else most))
        if not self._prefetches:
            return {"done": True}
        last = self._prefetches[-1]
        return {"done": last.ready, **asdict(last.progress)}

    def close(self) -> None:
        with self._lock:
            fetches, threads = list(self._prefetches), list(self._threads)
        for prefetch in fetches:
            prefetch.stop()
        self._coordination.close()  # wakes threads that wait for a server
        for thread in threads:
            thread.join()
        if self._popularity_reporter is not None:
            self._popularity_reporter.close()
