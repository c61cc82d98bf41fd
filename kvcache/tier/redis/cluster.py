"""Topologies: a single server that owns all keys, or a cluster whose servers own slots of keys that can move.

`ConnectionConfig` builds the topology from the settings.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from redis.crc import key_slot

from kvcache.errors import ConfigError
from kvcache.os_env import Clock
from kvcache.settings.tiers import RedisSettings
from kvcache.tier.breaker import Counters
from kvcache.tier.redis.connect import SENTINEL_PASSWORD_VARIABLE, Endpoint, RefusedError, SentinelEndpoint, split_hosts
from kvcache.tier.redis.pool import FAILURE_REPLIES, REDIRECT_REPLIES, ConnectionPool
from kvcache.tier.redis.wire import RespConnection

SLOTS = 16_384
_MAX_REDIRECT_POOLS = 16
_REFRESH_PAUSE_S = 0.2  # least time between two reads of the slot map; a key that moves in between is a miss

PoolFactory = Callable[[Endpoint], ConnectionPool]


class ServerBatch(NamedTuple):
    """One server's share of a list of keys."""

    pool: ConnectionPool
    keys: Sequence[int]  # indices into the list of keys
    asking: bool = False  # the keys are migrating to this server


class Topology(Protocol):
    def partition(
        self, names: Sequence[bytes], deadline: float | None, targets: Sequence[str] = ()
    ) -> Sequence[ServerBatch]:
        """Divide keys by the server that owns them.

        Args:
            targets: For each key the HOST:PORT that it migrates to, or "".

        Raises:
            OSError: The owners could not be read in time.
        """

    def mark_stale(self) -> None:
        """Read the slot map again before the next call: a server failed, or refused a key."""

    def pools(self) -> list[ConnectionPool]:
        """Return the pools of all known servers."""

    def close(self) -> None: ...


class SingleServer:
    """One server, or the master that sentinels name."""

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool

    def partition(
        self, names: Sequence[object], deadline: float | None, targets: Sequence[str] = ()
    ) -> Sequence[ServerBatch]:
        return [ServerBatch(self._pool, range(len(names)))]

    def mark_stale(self) -> None:
        """Do nothing: there is no other server."""

    def pools(self) -> list[ConnectionPool]:
        return [self._pool]

    def close(self) -> None:
        self._pool.close()


class ClusterTopology:
    """The masters of a Redis Cluster, each with its own pool and breaker.

    Thread safety: any thread may call it; one lock guards the tables and is held while the slot map is read.
    """

    def __init__(self, seeds: Sequence[Endpoint], make: PoolFactory, clock: Clock) -> None:
        self._seeds = {("seed", i): make(seed) for i, seed in enumerate(seeds)}
        self._template_endpoint, self._make, self._clock = seeds[0], make, clock
        self._pools: dict[tuple[str, int], ConnectionPool] = {}
        self._redirect_pools: dict[
            tuple[str, int], ConnectionPool
        ] = {}  # servers without slots yet, to which keys migrate
        self._owners: list[ConnectionPool | None] = [None] * SLOTS
        self._is_stale = True
        self._refreshed_s = float("-inf")
        self._lock = threading.Lock()
        self._closed = False

    def partition(
        self, names: Sequence[bytes], deadline: float | None, targets: Sequence[str] = ()
    ) -> Sequence[ServerBatch]:
        if self._is_stale:
            self._look(deadline)
        results: dict[tuple[ConnectionPool, bool], list[int]] = {}
        owners = self._owners
        for i, name in enumerate(names):
            owner = self._at(targets[i]) if targets and targets[i] else owners[key_slot(name)]
            if owner is None:  # no server owns this slot: any server reports that
                owner = next(iter(self._pools.values()), None)
            if owner is None:
                raise RefusedError("cluster")
            results.setdefault((owner, bool(targets and targets[i])), []).append(i)
        # a failing server may use up the deadline, so the others run first
        shares = [ServerBatch(pool, keys, asking) for (pool, asking), keys in results.items()]
        return sorted(shares, key=lambda share: share.pool.breaker.failing())

    def _at(self, target: str) -> ConnectionPool | None:
        """Return the pool of the server that a redirection names as HOST:PORT."""
        host, _, port = target.rpartition(":")
        where = host, int(port) if port.isdigit() else 0
        with self._lock:
            pool = self._pools.get(where) or self._redirect_pools.get(where)
            if pool is None and host and 0 < where[1] < 1 << 16 and len(self._redirect_pools) < _MAX_REDIRECT_POOLS:
                pool = self._redirect_pools[where] = self._make(self._template_endpoint.with_host(*where))
        return pool

    def mark_stale(self) -> None:
        self._is_stale = True

    def pools(self) -> list[ConnectionPool]:
        return list(self._pools.values())

    def _look(self, deadline: float | None) -> None:
        with self._lock:
            if self._closed:
                raise RefusedError("closed")
            now = self._clock.now()
            if not self._is_stale or (self._pools and now - self._refreshed_s < _REFRESH_PAUSE_S):
                return
            self._refreshed_s, error = now, RefusedError("cluster")
            known = sorted([*self._pools.values(), *self._seeds.values()], key=lambda pool: pool.breaker.failing())
            for pool in known:
                try:
                    slots = pool.run(lambda wire: wire.ask(b"CLUSTER", b"SLOTS"), deadline)
                except OSError:
                    continue
                if isinstance(slots, list) and slots:
                    self._learn(pool, slots)
                    self._is_stale = False
                    return
            if not self._pools:
                raise error

    def _learn(self, source: ConnectionPool, slots: Sequence[Any]) -> None:
        """Take over a slot map as CLUSTER SLOTS returns it: first, last, the master's host and port, replicas."""
        owners: list[ConnectionPool | None] = [None] * SLOTS
        pools: dict[tuple[str, int], ConnectionPool] = {}
        for first, last, (host, port, *_), *_ in slots:
            where = (host.decode() if host else source.host, int(port))  # no host: the server that answered
            if where not in pools:
                known = self._pools.get(where) or self._redirect_pools.pop(where, None)
                pools[where] = known or self._make(self._template_endpoint.with_host(*where))
            owners[first : last + 1] = [pools[where]] * (last + 1 - first)
        removed = [pool for where, pool in self._pools.items() if where not in pools]
        self._owners, self._pools = owners, pools
        for pool in removed:
            pool.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            pools = [*self._pools.values(), *self._redirect_pools.values(), *self._seeds.values()]
        for pool in pools:
            pool.close()


def ask_all(nodes: Topology, work: Callable[[RespConnection], Any], deadline: float | None = None) -> list[Any] | None:
    """Run `work` on each server; None where one does not answer or refuses, or no server is known."""

    def said(wire: RespConnection) -> Any:
        try:
            return work(wire)
        except RefusedError as error:  # a refused command is no fault of the connection
            return error

    try:
        nodes.partition([b""], deadline)
        results = [pool.run(said, deadline) for pool in nodes.pools()]
    except OSError:
        return None
    return None if any(isinstance(each, RefusedError) for each in results) else results


CLUSTER_FAILURE_REPLIES = FAILURE_REPLIES - REDIRECT_REPLIES


# From settings to a topology


class ConnectionConfig:
    """The servers that the settings name, and how to connect to them."""

    def __init__(self, settings: RedisSettings) -> None:
        self._settings, self._urls = settings, split_hosts(settings.url)
        self._tls = {name: getattr(settings, name) for name in ("tls_ca_file", "tls_cert_file", "tls_key_file")}
        password = {"username": settings.username, "password_file": settings.password_file}
        self._endpoints = [Endpoint(url, **password, **self._tls) for url in self._urls]
        names = ", ".join(endpoint.name for endpoint in self._endpoints)
        self.name = f"sentinel {settings.master}" if settings.mode == "sentinel" else names

    def nodes(self, clock: Clock, counters: Counters) -> Topology:
        settings = self._settings
        make = partial(ConnectionPool, clock=clock, counters=counters, timeout_s=settings.timeout_s)
        if settings.mode == "cluster":
            return ClusterTopology(self._endpoints, partial(make, failure_replies=CLUSTER_FAILURE_REPLIES), clock)
        if settings.mode == "sentinel":
            own = {"password_file": settings.sentinel_password_file, "variable": SENTINEL_PASSWORD_VARIABLE}
            endpoints = [Endpoint(url, **own, **self._tls) for url in self._urls]
            master = SentinelEndpoint(endpoints, settings.master, self._endpoints[0])
            return SingleServer(make(master, replaced={"READONLY"}))
        if len(self._urls) > 1:
            raise ConfigError(f"redis.url names {len(self._urls)} hosts: redis.mode = 'standalone' has one")
        return SingleServer(make(self._endpoints[0]))
