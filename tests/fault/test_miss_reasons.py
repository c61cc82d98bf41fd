"""Why a prompt missed, where a drive is at fault: the reason is the fault, told in full and counted once a request."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

from kvcache.cache.cache import Cache
from kvcache.cli.explain import ADVICE, describe_story
from kvcache.observe.reasons import REASONS
from kvcache.os_env import OsEnv
from kvcache.settings.sources import load
from tests.cache.test_miss_explainer import LAYOUT, misses, pages, story, turn
from tests.fault.simulated_disk import SimDisk


class Drive(SimDisk):
    """One whose reads can be made to wait for ever."""

    def __init__(self) -> None:
        super().__init__(1)
        self._goes = threading.Event()
        self._goes.set()

    def ask(self, kind: str, grows: int = 0) -> None:
        if kind == "read":
            self._goes.wait()
        super().ask(kind, grows)

    @contextmanager
    def hung(self) -> Iterator[None]:
        self._goes.clear()
        try:
            yield
        finally:
            self._goes.set()


def opened(drive: Drive, *, host: str = "1MiB", **more: Any) -> Cache:
    settings = load(
        host={"capacity_bytes": host, "slab_bytes": "24KiB"},
        nvme={"path": "store", "capacity_bytes": "8MiB", "segment_bytes": "96KiB", "min_free_bytes": 0},
        plan__enabled=False,
        **more,
    )
    return Cache(settings, OsEnv(disk=drive))


@pytest.fixture
def stored() -> Drive:
    """A drive with a prompt of 40 tokens, which no memory has."""
    drive = Drive()
    with closing(opened(drive)) as cache:
        assert turn(cache, range(40), "one") == "cold"
        assert cache.flush(30)
    return drive


def ask(cache: Cache, name: str, *, deadline_s: float | None = None, before: Callable[[], object] = int) -> None:
    """A request of all that the drive has; `before` it is admitted something happens."""
    with cache.namespace(LAYOUT, model="m", revision="r").request(id=name, deadline_s=deadline_s) as r:
        hit = r.match(range(40))
        before()
        r.admit()
        for first in (0, 5):  # in two parts, both of which fail
            r.load(first + 5, pages(), [list(range(5))], first_block=first).wait(30)
        assert hit.blocks == 10


def told(cache: Cache, name: str) -> str:
    return "\n".join(describe_story(story(cache, name), None))


def test_a_hung_drive_is_a_timed_out_miss(stored: Drive) -> None:
    with closing(opened(stored)) as cache:
        with stored.hung():
            ask(cache, "waits", deadline_s=0.05)
        assert misses(cache) == {"late": 1}
        assert cache.counters.get("missed_tokens", reason="late") == 40
        assert story(cache, "waits")["outcome"] == "late"
        assert ADVICE["late"] in told(cache, "waits")
        assert turn(cache, range(40), "later") == ""
        assert misses(cache) == {"late": 1}, "what came after all is there for the next one"


def test_a_failed_read_is_a_failed_miss(stored: Drive) -> None:
    with closing(opened(stored)) as cache:
        ask(cache, "unlucky", before=lambda: stored.fails.update(read=(1.0, errno.EIO)))
        stored.fails.clear()
        assert misses(cache) == {"failed": 1}
        assert cache.counters.get("missed_tokens", reason="failed") == 40
        assert story(cache, "unlucky")["outcome"] == "failed"
        assert ADVICE["failed"] in told(cache, "unlucky")


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_failed_write_is_a_store_failed_miss(number: int) -> None:
    drive = Drive()
    with closing(opened(drive, host="240KiB")) as cache:
        drive.fails["write"] = 1.0, number
        assert turn(cache, range(40), "one") == "cold"
        cache.flush(30)
        for chain in range(1, 4):  # it leaves host, and no drive has it
            turn(cache, range(1000 * chain, 1000 * chain + 40), f"filler {chain}")
            cache.flush(30)
        drive.fails.clear()
        assert turn(cache, range(40), "again") == "store_failed"
        assert misses(cache) == {"cold": 4, "store_failed": 1}
        assert cache.counters.get("missed_tokens", reason="store_failed") == 40
        found = story(cache, "again")
        assert found["tier"] == "nvme"
        assert found["why"] in REASONS["write_failures", "outcome"]
        assert ADVICE["store_failed"] in told(cache, "again")


def test_every_reason_has_advice() -> None:
    assert set(ADVICE) == set(REASONS["misses", "reason"])
