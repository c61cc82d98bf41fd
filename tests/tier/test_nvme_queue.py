"""The NVMe tier's queue: who goes first, who is dropped, who is late."""

from __future__ import annotations

from collections.abc import Callable

from kvcache.os_env import OsEnv
from kvcache.testing.tier import Clock
from kvcache.tier.tier import BACKGROUND, DEMAND, PREFETCH, Outcome
from tests.tier.blocks import RECORD_BYTES, buffer, chain, record
from tests.tier.tier_files import DONE, NOT_FOUND, DeferredExecutor, Open, read, write


def test_the_highest_priority_runs_first(store: Open) -> None:
    executor = DeferredExecutor()
    tier = store(os_env=OsEnv(executor=lambda threads, name: executor))
    order: list[str] = []
    here, new = chain(3), chain(3, seed=1)
    seeding = tier.submit("write", here, [record(a) for a in here])
    executor.release()
    assert seeding.done

    def say(name: str) -> Callable[[int, Outcome], None]:
        return lambda i, outcome: order.append(name)

    for i, (priority, name) in enumerate(((BACKGROUND, "background"), (PREFETCH, "ahead"), (DEMAND, "waiting"))):
        tier.submit("write", [new[i]], [record(new[i])], priority=priority, on_outcome=say(f"write {name}"))
        tier.submit("read", [here[i]], [buffer()], priority=priority, on_outcome=say(f"read {name}"))
    executor.release()
    assert order == [f"{op} {name}" for name in ("waiting", "ahead", "background") for op in ("read", "write")]


def test_a_full_queue_drops_writes_and_accepts_reads(store: Open) -> None:
    executor = DeferredExecutor()
    tier = store(queue_bytes=3 * RECORD_BYTES, os_env=OsEnv(executor=lambda threads, name: executor))
    blocks = chain(5)
    ticket = tier.submit("write", blocks, [record(a) for a in blocks])
    assert ticket.outcomes == (Outcome.PENDING,) * 3 + (Outcome.DROPPED,) * 2
    reading = tier.submit("read", blocks[:1], [buffer()])
    assert reading.outcomes == (Outcome.PENDING,)
    executor.release()
    assert ticket.outcomes == (DONE,) * 3 + (Outcome.DROPPED,) * 2
    assert tier.counters["write_dropped"] == 2
    again = tier.submit("write", blocks[3:], [record(a) for a in blocks[3:]])
    executor.release()
    assert again.outcomes == (DONE, DONE)


def test_a_write_larger_than_the_queue_runs_alone(store: Open) -> None:
    tier = store(queue_bytes=1)
    assert write(tier, chain(1)) == (DONE,)


def test_a_request_past_its_deadline_times_out(store: Open) -> None:
    """Even where no thread comes to it: the next call finds it."""
    executor, clock = DeferredExecutor(), Clock()
    tier = store(os_env=OsEnv(clock=clock, executor=lambda threads, name: executor))
    blocks = chain(3)
    ticket = tier.submit("write", blocks[:2], [record(a) for a in blocks[:2]], deadline=clock.now() + 5.0)
    clock.seconds += 6.0
    tier.submit("write", blocks[2:], [record(blocks[2])], deadline=clock.now() + 4.0)
    assert ticket.outcomes == (Outcome.TIMED_OUT, Outcome.TIMED_OUT)
    executor.release()
    assert tier.contains(blocks) == (NOT_FOUND, NOT_FOUND, DONE)


def test_a_cancelled_request_never_starts(store: Open) -> None:
    executor = DeferredExecutor()
    tier = store(os_env=OsEnv(executor=lambda threads, name: executor))
    ticket = tier.submit("write", chain(2), [record(a) for a in chain(2)])
    ticket.cancel()
    executor.release()
    assert ticket.outcomes == (Outcome.CANCELLED,) * 2
    assert tier.usage().records == 0


def test_close_runs_submitted_requests(store: Open) -> None:
    tier = store(os_env=OsEnv())
    ticket = tier.submit("write", chain(3), [record(a) for a in chain(3)], priority=BACKGROUND)
    tier.close()
    assert ticket.outcomes == (DONE,) * 3
    assert read(store(), chain(1)[0]) is DONE
