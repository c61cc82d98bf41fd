"""Which server has which key: one that has all, or a cluster, where each has some and keys move between them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

from redis.crc import key_slot

from kvcache.errors import ConfigError
from kvcache.os_env import Clock
from kvcache.tier.breaker import Counters
from kvcache.tier.redis.connect import SENTINEL_PASSWORD, Endpoint, RefusedError, Sentinels, apart
from kvcache.tier.redis.pool import ELSEWHERE, UNFIT, Pool
from kvcache.tier.redis.wire import Wire

SLOTS = 16_384
_MOST_GUESTS = 16
_PAUSE_S = 0.2  # between two looks at a cluster: what moves meanwhile is a miss

Make = Callable[[Endpoint], Pool]


class Share(NamedTuple):
    """What one server is asked for."""

    pool: Pool
    keys: Sequence[int]  # numbers of the keys that were divided
    asking: bool = False  # they are on their way there


class Nodes(Protocol):
    def divide(self, names: Sequence[bytes], deadline: float | None, places: Sequence[str] = ()) -> Sequence[Share]:
        """By server, which of these keys are its own. `places`: for each key the server that it is on its way to, or
        nothing. OSError where that cannot be learnt in time."""

    def doubt(self) -> None:
        """A server refused what was thought to be its own, or is gone: before the next call, look anew."""

    def pools(self) -> list[Pool]:
        """Of all servers that are known."""

    def close(self) -> None: ...


class One:
    """A server, or whichever one sentinels name."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def divide(self, names: Sequence[object], deadline: float | None, places: Sequence[str] = ()) -> Sequence[Share]:
        return [Share(self._pool, range(len(names)))]

    def doubt(self) -> None:
        """There is no other."""

    def pools(self) -> list[Pool]:
        return [self._pool]

    def close(self) -> None:
        self._pool.close()


class Cluster:
    """The masters of a Redis Cluster, each with a pool and a breaker of its own."""

    def __init__(self, seeds: Sequence[Endpoint], make: Make, clock: Clock) -> None:
        self._seeds = {("seed", i): make(seed) for i, seed in enumerate(seeds)}
        self._entrance, self._make, self._clock = seeds[0], make, clock
        self._pools: dict[tuple[str, int], Pool] = {}
        self._guests: dict[tuple[str, int], Pool] = {}  # that have no slots yet, but keys on their way
        self._owners: list[Pool | None] = [None] * SLOTS
        self._in_doubt = True
        self._looked = float("-inf")
        self._lock = threading.Lock()
        self._closed = False

    def divide(self, names: Sequence[bytes], deadline: float | None, places: Sequence[str] = ()) -> Sequence[Share]:
        if self._in_doubt:
            self._look(deadline)
        found: dict[tuple[Pool, bool], list[int]] = {}
        owners = self._owners
        for i, name in enumerate(names):
            owner = self._at(places[i]) if places and places[i] else owners[key_slot(name)]
            if owner is None:  # a hole in the cluster: any server says so
                owner = next(iter(self._pools.values()), None)
            if owner is None:
                raise RefusedError("cluster")
            found.setdefault((owner, bool(places and places[i])), []).append(i)
        # a server that fails may take all the time there is: the others are asked before it
        shares = [Share(pool, keys, asking) for (pool, asking), keys in found.items()]
        return sorted(shares, key=lambda share: share.pool.breaker.failing())

    def _at(self, place: str) -> Pool | None:
        """The server that another one names, as HOST:PORT."""
        host, _, port = place.rpartition(":")
        where = host, int(port) if port.isdigit() else 0
        with self._lock:
            pool = self._pools.get(where) or self._guests.get(where)
            if pool is None and host and 0 < where[1] < 1 << 16 and len(self._guests) < _MOST_GUESTS:
                pool = self._guests[where] = self._make(self._entrance.at(*where))
        return pool

    def doubt(self) -> None:
        self._in_doubt = True

    def pools(self) -> list[Pool]:
        return list(self._pools.values())

    def _look(self, deadline: float | None) -> None:
        with self._lock:
            if self._closed:
                raise RefusedError("closed")
            now = self._clock.now()
            if not self._in_doubt or (self._pools and now - self._looked < _PAUSE_S):
                return
            self._looked, error = now, RefusedError("cluster")
            known = sorted([*self._pools.values(), *self._seeds.values()], key=lambda pool: pool.breaker.failing())
            for pool in known:
                try:
                    slots = pool.run(lambda wire: wire.ask(b"CLUSTER", b"SLOTS"), deadline)
                except OSError:
                    continue
                if isinstance(slots, list) and slots:
                    self._learn(pool, slots)
                    self._in_doubt = False
                    return
            if not self._pools:
                raise error

    def _learn(self, told: Pool, slots: Sequence[Any]) -> None:
        """`slots` as CLUSTER SLOTS says them: first, last, the master's host and port, replicas."""
        owners: list[Pool | None] = [None] * SLOTS
        pools: dict[tuple[str, int], Pool] = {}
        for first, last, (host, port, *_), *_ in slots:
            where = (host.decode() if host else told.host, int(port))  # no host: the one that was asked
            if where not in pools:
                known = self._pools.get(where) or self._guests.pop(where, None)
                pools[where] = known or self._make(self._entrance.at(*where))
            owners[first : last + 1] = [pools[where]] * (last + 1 - first)
        gone = [pool for where, pool in self._pools.items() if where not in pools]
        self._owners, self._pools = owners, pools
        for pool in gone:
            pool.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            pools = [*self._pools.values(), *self._guests.values(), *self._seeds.values()]
        for pool in pools:
            pool.close()


def ask(nodes: Nodes, work: Callable[[Wire], Any], deadline: float | None = None) -> list[Any] | None:
    """What each server says; None where one does not answer or refuses, or none is known."""

    def said(wire: Wire) -> Any:
        try:
            return work(wire)
        except RefusedError as error:  # this command only: no fault of the connection
            return error

    try:
        nodes.divide([b""], deadline)
        found = [pool.run(said, deadline) for pool in nodes.pools()]
    except OSError:
        return None
    return None if any(isinstance(each, RefusedError) for each in found) else found


CLUSTER_UNFIT = UNFIT - ELSEWHERE


# The way from settings to servers: one, the master that sentinels name, or a cluster.

Mode = Literal["standalone", "sentinel", "cluster"]


class Entrance:
    def __init__(self, url: str, *, username: str, password_file: str, sentinel_password_file: str, **tls: str) -> None:
        """`tls`: as `Endpoint` has its files."""
        self._urls, self._tls, self._sentinel_password_file = apart(url), tls, sentinel_password_file
        self._endpoints = [Endpoint(each, username=username, password_file=password_file, **tls) for each in self._urls]
        self.name = ", ".join(endpoint.name for endpoint in self._endpoints)

    def nodes(self, mode: Mode, master: str, clock: Clock, counters: Counters, *, timeout_s: float) -> Nodes:
        make = partial(Pool, clock=clock, counters=counters, timeout_s=timeout_s)
        if mode == "cluster":
            return Cluster(self._endpoints, partial(make, unfit=CLUSTER_UNFIT), clock)
        if mode == "sentinel":
            own = {"password_file": self._sentinel_password_file, "variable": SENTINEL_PASSWORD}
            asked = [Endpoint(url, **own, **self._tls) for url in self._urls]
            return One(make(Sentinels(asked, master, self._endpoints[0]), replaced={"READONLY"}))
        if len(self._urls) > 1:
            raise ConfigError(f"redis.url names {len(self._urls)} hosts: redis.mode = 'standalone' has one")
        return One(make(self._endpoints[0]))
