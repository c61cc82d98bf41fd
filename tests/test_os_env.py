"""Threads of a pool, where no test of what uses them looks."""

from __future__ import annotations

import threading

from kvcache.os_env import ThreadExecutor


def named(prefix: str) -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith(prefix)}


def test_a_pool_starts_all_threads_before_the_first_call() -> None:
    pool = ThreadExecutor(3, "test-port")
    try:
        hired = named("kvcache-test-port")
        assert len(hired) == 3
        used = [pool.submit(threading.current_thread) for _ in range(50)]
        assert {future.result(60) for future in used} <= hired
        assert named("kvcache-test-port") == hired
    finally:
        pool.close()
    assert not named("kvcache-test-port")
