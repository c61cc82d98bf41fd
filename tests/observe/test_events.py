"""The ring of events: runs, bounds, and whose request they are."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from kvcache.log import RequestContext, current_request, logger, request_context
from kvcache.observe.events import EVENT_KINDS, Event, EventKind, EventLog
from kvcache.os_env import SystemClock

ONE, OTHER = bytes(32), b"\x01" * 32


class Clock(SystemClock):
    """A wall clock that stands still until it is turned."""

    def __init__(self) -> None:
        self.time = 1000.0

    def wall(self) -> float:
        return self.time


def test_blocks_with_one_outcome_share_an_event() -> None:
    clock = Clock()
    events = EventLog(clock)
    for _ in range(3):
        events.add("evicted", tier="host", namespace=ONE, bytes=10, reason="kept: no")
        clock.time += 0.25
    events.add("evicted", tier="host", namespace=OTHER, blocks=2, reason="kept: no")
    events.add("evicted", tier="host", namespace=ONE, bytes=10, reason="kept: no")
    assert events.last() == [
        Event(1000.0, "evicted", "host", "00000000", "", 3, 30, "kept: no"),
        Event(1000.75, "evicted", "host", "01010101", "", 2, 0, "kept: no"),
        Event(1000.75, "evicted", "host", "00000000", "", 1, 10, "kept: no"),
    ]


def test_a_run_ends_in_time() -> None:
    clock = Clock()
    events = EventLog(clock)
    events.add("loaded", tier="nvme", namespace=ONE)
    clock.time += 0.5
    events.add("loaded", tier="nvme", namespace=ONE)
    clock.time += 0.5
    events.add("loaded", tier="nvme", namespace=ONE)
    clock.time -= 100  # somebody set the clock
    events.add("loaded", tier="nvme", namespace=ONE)
    assert [event.blocks for event in events.last()] == [2, 1, 1]


def test_an_empty_run_records_no_event() -> None:
    events = EventLog(Clock())
    events.add("dropped", tier="host", namespace=ONE, blocks=0, reason="no room")
    assert events.last() == []


@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(EVENT_KINDS)), st.sampled_from(["host", "nvme"]), st.integers(1, 9)),
        max_size=60,
    ),
    st.integers(1, 8),
)
def test_the_ring_holds_the_newest_runs(calls: list[tuple[EventKind, str, int]], capacity: int) -> None:
    events = EventLog(Clock(), capacity)
    expected: list[Event] = []
    for kind, tier, blocks in calls:
        events.add(kind, tier=tier, namespace=ONE, blocks=blocks)
        if expected and (expected[-1].kind, expected[-1].tier) == (kind, tier):
            expected[-1] = replace(expected[-1], blocks=expected[-1].blocks + blocks)
        else:
            expected.append(Event(1000.0, kind, tier, "00000000", "", blocks, 0, ""))
    assert events.last() == expected[-capacity:]
    assert events.last(2) == expected[-capacity:][-2:]
    assert events.last(0) == []


def test_an_event_names_the_request_of_its_thread() -> None:
    events = EventLog(Clock())

    def work(name: str) -> None:
        with request_context(RequestContext(name)):
            events.add("stored", tier="host", namespace=ONE)

    with request_context(RequestContext("here")):
        thread = threading.Thread(target=work, args=("there",))
        thread.start()
        thread.join()
        work("within")
        events.add("stored", tier="host", namespace=ONE)
    events.add("stored", tier="host", namespace=ONE)
    assert [event.request for event in events.last()] == ["there", "within", "here", ""]
    assert current_request() == RequestContext()


def test_every_record_of_a_log_has_the_request() -> None:
    seen: list[logging.LogRecord] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(record)

    plain, handler = logging.getLogger("kvcache.test"), Keep()
    plain.addHandler(handler)
    try:
        log = logger("kvcache.test")
        with request_context(RequestContext("42")):
            log.warning("late by %d ms", 3, extra={"tier": "nvme"})
        log.warning("on its own")
    finally:
        plain.removeHandler(handler)
    assert [(r.getMessage(), r.__dict__["request_id"]) for r in seen] == [("late by 3 ms", "42"), ("on its own", "")]
    assert seen[0].__dict__["tier"] == "nvme"
