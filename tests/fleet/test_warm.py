"""Warming up: computed once in the fleet, whichever node dies, sleeps or is absent; and never in the way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from kvcache.errors import UnreachableError
from kvcache.fleet.coordination import Coordination, LeaseResult, PromptLease
from kvcache.fleet.warm import EngineError, NodeCallbacks, PrefillUsage, Prompt, WarmLimits, WarmUp
from kvcache.os_env import OsEnv
from kvcache.settings.tiers import RedisSettings
from tests.peer.redis_server import MISSING, RedisServer

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)

PROMPTS = [Prompt("text", f"prompt {i}") for i in range(6)]
CLOCK = OsEnv().clock


class Fleet:
    """What its engines have computed, and what of that the others can read."""

    def __init__(self) -> None:
        self.stored: set[str] = set()
        self.computed: list[str] = []
        self.lock = threading.Lock()


class Node:
    """A stand-in for an engine with a cache: what is computed here is for the others only once it is settled."""

    model = "m"

    def __init__(self, fleet: Fleet) -> None:
        self.fleet, self.own, self.asked = fleet, [], 0

    def prefill(self, prompt: Prompt) -> PrefillUsage:
        self.asked += 1
        with self.fleet.lock:
            if prompt.content in self.fleet.stored:
                return PrefillUsage(10, 10)
            self.fleet.computed.append(prompt.content)
        self.own.append(prompt.content)
        return PrefillUsage(10, 0)

    def settle(self) -> bool:
        with self.fleet.lock:
            self.fleet.stored |= set(self.own)
        return True


def warm(node: Any, coordination: Coordination | None, **options: Any) -> WarmUp:
    """`options`: fields of `NodeCallbacks` and `WarmLimits`, and `on_result`."""
    callbacks = {"settle": node.settle} | {
        name: options.pop(name) for name in ("settle", "used_bytes") & options.keys()
    }
    on_result = options.pop("on_result", lambda result: None)
    limits = WarmLimits(**options)
    return WarmUp(node, PROMPTS, coordination, CLOCK, NodeCallbacks(**callbacks), limits, on_result)


def whats(work: WarmUp) -> list[str]:
    return [step.what for step in sorted(work.steps, key=lambda step: step.number)]


def test_three_nodes_compute_each_prompt_once(make_coordination: Callable[[], Coordination]) -> None:
    fleet = Fleet()
    works = [warm(Node(fleet), make_coordination()) for _ in range(3)]
    threads = [work.start() for work in works]
    for thread in threads:
        thread.join(60)
    assert all(work.ready for work in works)
    assert sorted(fleet.computed) == [prompt.content for prompt in PROMPTS]
    for of_prompt in zip(*map(whats, works), strict=True):
        assert sorted(of_prompt) == ["computed", "fetched", "fetched"]
    counts = [work.counts for work in works]
    assert sum(each["cached_tokens"] for each in counts) == 2 * 10 * len(PROMPTS)
    assert {each["tokens"] for each in counts} == {60}
    assert {each["waiting"] for each in counts} == {0}


def test_a_node_that_dies_is_replaced(make_coordination: Callable[[], Coordination]) -> None:
    """Its lease goes by itself, since no node renews it."""
    dead = PromptLease(make_coordination(), PROMPTS[2].digest("m"), lease_s=0.05)
    assert dead.acquire() is LeaseResult.ACQUIRED
    fleet = Fleet()
    work = warm(Node(fleet), make_coordination())
    work.run()
    assert whats(work) == ["computed"] * 6
    assert not dead.mark_stored()


def test_prompts_leased_by_another_node_come_last(make_coordination: Callable[[], Coordination]) -> None:
    other = PromptLease(make_coordination(), PROMPTS[0].digest("m"))
    assert other.acquire() is LeaseResult.ACQUIRED
    fleet, order = Fleet(), []

    def tell(step: Any) -> None:
        order.append(step.number)
        if len(order) == 5:  # only the other's is left
            fleet.stored.add(PROMPTS[0].content)
            assert other.mark_stored()

    work = warm(Node(fleet), make_coordination(), on_result=tell)
    work.run()
    assert order == [1, 2, 3, 4, 5, 0]
    assert whats(work) == ["fetched", *["computed"] * 5]


def test_unshared_prompts_are_not_reported_as_stored(make_coordination: Callable[[], Coordination]) -> None:
    fleet = Fleet()
    first = warm(Node(fleet), make_coordination(), settle=lambda: False)
    first.run()
    assert {step.why for step in first.steps} == {"the computed blocks did not reach the fleet in time"}
    second = warm(Node(fleet), make_coordination())
    second.run()
    assert whats(second) == ["computed"] * 6


def test_without_a_server_each_node_computes_all_prompts(make_coordination: Callable[[], Coordination]) -> None:
    away = Coordination(RedisSettings(enabled=True, url="redis://127.0.0.1:1/0", timeout_s=0.2))
    for coordination in (None, away):
        work = warm(Node(Fleet()), coordination)
        work.run()
        assert whats(work) == ["alone"] * 6
    away.close()


def test_a_refusing_engine_fails_one_prompt(
    make_coordination: Callable[[], Coordination],
) -> None:
    class Refusing(Node):
        def prefill(self, prompt: Prompt) -> PrefillUsage:
            if prompt.content in ("prompt 1", "prompt 4"):
                raise EngineError("too long") if prompt.content == "prompt 1" else UnreachableError("gone")
            return super().prefill(prompt)

    fleet = Fleet()
    work = warm(Refusing(fleet), make_coordination())
    work.run()
    assert whats(work) == ["computed", "failed", "computed", "computed", "failed", "computed"]
    assert [step.why for step in work.steps if step.what == "failed"] == ["too long", "gone"]
    another = warm(Node(fleet), make_coordination())
    another.run()
    assert whats(another) == ["fetched", "computed", "fetched", "fetched", "computed", "fetched"]


def test_an_unexpected_error_ends_warming_and_sets_ready(make_coordination: Callable[[], Coordination]) -> None:
    class Broken(Node):
        def prefill(self, prompt: Prompt) -> PrefillUsage:
            raise ZeroDivisionError

    work = warm(Broken(Fleet()), make_coordination())
    work.run()
    assert work.ready
    assert work.counts["waiting"] == 6
    assert PromptLease(make_coordination(), PROMPTS[0].digest("m")).acquire() is LeaseResult.ACQUIRED, (
        "the lease was given up"
    )


def test_warming_respects_byte_and_time_limits(make_coordination: Callable[[], Coordination]) -> None:
    node = Node(Fleet())
    work = warm(node, make_coordination(), used_bytes=lambda: 100 * node.asked, max_bytes=250)
    work.run()
    assert whats(work) == ["computed"] * 3 + ["left"] * 3
    late = warm(Node(Fleet()), make_coordination(), patience_s=0.0)
    late.run()
    assert whats(late) == ["left"] * 6


def test_a_stop_ends_warming_after_the_current_prompt(make_coordination: Callable[[], Coordination]) -> None:
    work: list[WarmUp] = []
    node = Node(Fleet())
    work.append(warm(node, make_coordination(), on_result=lambda step: work[0].stop()))
    work[0].run()
    assert (node.asked, work[0].ready) == (1, True)


def test_a_server_lost_midway_leaves_nodes_independent() -> None:
    server = RedisServer()
    coordination = Coordination(RedisSettings(enabled=True, url=server.tcp, timeout_s=20))
    try:
        work = warm(Node(Fleet()), coordination, on_result=lambda step: server.stop() if step.number == 2 else None)
        work.run()
        assert whats(work) == ["computed"] * 3 + ["alone"] * 3
    finally:
        coordination.close()
        server.end()


def test_a_server_hung_midway_delays_no_node_for_long() -> None:
    server = RedisServer()
    coordination = Coordination(RedisSettings(enabled=True, url=server.tcp, timeout_s=3))
    try:
        work = warm(Node(Fleet()), coordination, on_result=lambda step: server.pause() if step.number == 2 else None)
        work.run()
        assert whats(work) == ["computed"] * 3 + ["alone"] * 3
    finally:
        coordination.close()
        server.end()
