"""The way from settings to servers: one, the master that sentinels name, or a cluster."""

from __future__ import annotations

from functools import partial
from typing import Literal

from kvcache.errors import ConfigError
from kvcache.os_env import Clock
from kvcache.tier.counters import Counters
from kvcache.tier.redis.endpoint import SENTINEL_PASSWORD, Endpoint, Sentinels, apart
from kvcache.tier.redis.nodes import CLUSTER_UNFIT, Cluster, Nodes, One
from kvcache.tier.redis.pool import Pool

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
