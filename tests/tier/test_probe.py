"""A breaker's probe that succeeds takes its whole batch: the first store after a recovery is kept."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from kvcache.os_env import Executor, InlineExecutor, OsEnv, ThreadExecutor
from kvcache.settings.tiers import ObjectSettings, RedisSettings
from kvcache.testing.tier import Clock, chain, intact, record, write
from kvcache.tier.object import ObjectTier
from kvcache.tier.redis import RedisTier
from kvcache.tier.tier import Outcome, Tier
from tests.fault.simulated_disk import SimDisk
from tests.peer import redis_server
from tests.peer.redis_proxy import RedisProxy
from tests.peer.s3_server import MISSING, HttpFaultProxy, shared
from tests.tier.tier_files import DeferredExecutor, Open

DONE, FAILED = Outcome.DONE, Outcome.FAILED
needs_redis = pytest.mark.skipif(bool(redis_server.MISSING), reason=redis_server.MISSING)
needs_objects = pytest.mark.skipif(bool(MISSING["seaweedfs"]), reason=MISSING["seaweedfs"])


class Threads(DeferredExecutor):
    """The tier's own threads run as `DeferredExecutor`, its other background work where it is submitted."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def __call__(self, threads: int, name: str) -> Executor:
        return self if name == self._name else InlineExecutor()


def stored(tier: Tier, threads: Threads, count: int, seed: int) -> list[Outcome]:
    """What a batch of several pieces ends as."""
    blocks = chain(count, seed=seed)
    ticket = tier.submit("write", blocks, [record(address) for address in blocks])
    assert len(threads.calls) > 1
    threads.release()
    return list(ticket.outcomes)


def failed(tier: Tier, threads: Threads) -> None:
    """Three stores, each of which fails: the breaker opens."""
    for seed in range(3):
        (address,) = chain(1, seed=seed)
        ticket = tier.submit("write", [address], [record(address)])
        threads.release()
        assert ticket.outcomes == (FAILED,)


def test_the_nvme_probe_stores_its_whole_batch(store: Open) -> None:
    disk, clock, threads = SimDisk(0), Clock(), Threads("nvme")
    tier = store(os_env=OsEnv(disk=disk, clock=clock, executor=threads))
    disk.fails = {"write": (1.0, errno.EIO)}
    failed(tier, threads)
    assert tier.counters["breaker_opened"] == 1
    disk.fails, ask = {}, disk.ask

    def others_first(kind: str, grows: int = 0) -> None:
        if kind == "write":
            threads.release()
        ask(kind, grows)

    disk.ask = others_first  # type: ignore[method-assign]
    clock.seconds += 2
    assert stored(tier, threads, 200, 9) == [DONE] * 200


@pytest.fixture
def values() -> Iterator[redis_server.RedisServer]:
    server = redis_server.RedisServer()
    yield server
    server.end()


@needs_redis
def test_the_redis_probe_stores_its_whole_batch(values: redis_server.RedisServer) -> None:
    proxy, clock, threads = RedisProxy(values.port), Clock(), Threads("redis")
    with ExitStack() as stack:
        stack.callback(proxy.end)
        tier = RedisTier(RedisSettings(url=proxy.url, timeout_s=60), os_env=OsEnv(clock=clock, executor=threads))
        stack.callback(tier.close)
        proxy.drop = True
        failed(tier, threads)
        assert tier.breaker == "open"
        proxy.clear_faults()
        (pool,) = tier._nodes.pools()
        take = pool._take

        def others_first(*given: Any, **named: Any) -> Any:
            threads.release()
            return take(*given, **named)

        pool._take = others_first  # type: ignore[method-assign]
        clock.seconds += 1
        assert stored(tier, threads, 200, 9) == [DONE] * 200
        assert tier.breaker == "closed"


@needs_redis
def test_redis_stores_resume_after_refused_writes(values: redis_server.RedisServer) -> None:
    clock, threads = Clock(), Threads("redis")
    tier = RedisTier(RedisSettings(url=values.tcp, timeout_s=60), os_env=OsEnv(clock=clock, executor=threads))
    try:
        values.client.replicaof("127.0.0.1", "1")
        failed(tier, threads)
        assert (tier.breaker, tier.counters["writes_stopped"]) == ("closed", 1)
        values.client.replicaof("NO", "ONE")
        judge = tier._store._stored

        def others_first(*given: Any) -> None:
            threads.release()
            judge(*given)

        tier._store._stored = others_first  # type: ignore[method-assign, assignment]
        clock.seconds += 1
        assert stored(tier, threads, 200, 9) == [DONE] * 200
    finally:
        tier.close()


class Door(HttpFaultProxy):
    """`before`: called with each request's path before it is served."""

    before: Callable[[str], object] = staticmethod(lambda path: None)

    def _serve(self, asked: BaseHTTPRequestHandler) -> None:
        self.before(asked.path)
        super()._serve(asked)


@pytest.fixture
def admission() -> Iterator[Door]:
    made = Door(shared("seaweedfs").port)
    yield made
    made.end()


def objects(admission: Door, os_env: OsEnv, prefix: str, **settings: Any) -> ObjectTier:
    given = {**shared("seaweedfs").settings, "endpoint": admission.endpoint, "timeout_s": 60, **settings}
    return ObjectTier(ObjectSettings().model_copy(update={**given, "prefix": prefix}), os_env)


@needs_objects
def test_the_object_probe_stores_its_whole_batch(admission: Door) -> None:
    clock, threads = Clock(), Threads("object")
    tier = objects(admission, OsEnv(clock=clock, executor=threads), "probe", pack_bytes=40_000)
    try:
        assert tier.match_prefix(chain(1)).result(60) == 0  # lists
        admission.status = 503
        failed(tier, threads)
        assert (tier.breaker, tier.counters["writes_stopped"]) == ("open", 1)
        admission.clear_faults()
        admission.before = lambda path: threads.release()
        clock.seconds += 1
        assert stored(tier, threads, 12, 9) == [DONE] * 12
        assert (tier.breaker, tier.health_issues()) == ("closed", [])
    finally:
        admission.before = Door.before
        tier.close()


class Counted(ThreadExecutor):
    """`begun`: how many calls were submitted."""

    begun = 0

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        self.begun += 1
        return super().submit(call)


@needs_objects
def test_a_background_listing_does_not_use_the_probe(admission: Door) -> None:
    """A store begins one in the background: it is the store that the breaker lets through."""
    clock, listing, came, go_on = Clock(), Counted(1, "listing"), threading.Event(), threading.Event()

    def threads(number: int, name: str) -> Executor:
        return listing if name == "object-listing" else ThreadExecutor(number, name)

    def hold(path: str) -> None:
        if "list-type" in path:
            came.set()
            assert go_on.wait(60)

    tier = objects(admission, OsEnv(clock=clock, executor=threads), "due", refresh_s=10)
    put = tier._bucket.put

    def after_the_listing(*given: Any, **named: Any) -> str:
        assert listing.begun == 1 or came.wait(60)
        return put(*given, **named)

    try:
        blocks = chain(3)
        assert set(write(tier, blocks)) == {DONE}
        assert listing.begun == 1
        admission.status = 503
        for _ in range(3):
            assert set(tier.read(blocks, [record(address) for address in blocks])) == {FAILED}
        assert tier.breaker == "open"
        admission.clear_faults()
        admission.before, tier._bucket.put = hold, after_the_listing  # type: ignore[method-assign]
        clock.seconds += 20
        assert write(tier, chain(2, seed=1)) == (DONE, DONE)
        go_on.set()
        assert intact(tier, blocks)
        assert listing.begun == 2  # the next call begins it
    finally:
        go_on.set()
        tier.close()
