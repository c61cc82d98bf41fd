"""A daemon on a thread of the test process, whose cache tests can inspect."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import kvcache
from kvcache.cache.cache import Cache
from kvcache.daemon.server.server import Daemon

PATIENT = {"patience_s": 30.0, "deadline_s": 30.0}
"""How a test's client opens a daemon: no machine is so busy that an answer takes longer."""


@dataclass
class InProcessDaemon:
    """A daemon on a thread of this process, with its cache."""

    cache: Cache
    daemon: Daemon
    path: Path
    cleanup: ExitStack
    port: Any = None

    def open_tcp(self, **more: Any) -> Any:
        """Returns a client that connects by TCP."""
        made = kvcache.open(str(self.port), **{**PATIENT, **more})
        self.cleanup.callback(made.close)
        return made

    def open(self, **more: Any) -> Any:
        made = kvcache.open(f"unix:{self.path}", **{**PATIENT, **more})
        self.cleanup.callback(made.close)
        return made

    @property
    def held_blocks(self) -> int:
        return self.cache.index.held()

    @property
    def leaked_slots(self) -> int:
        """Slots that hold no record and are not free."""
        slots = sum(len(slab.slots) for slab in self.cache.host.arena.slabs())
        return slots - self.cache.host.usage().records


def until(condition: Callable[[], bool]) -> None:
    """Wait until the condition holds."""
    pause = threading.Event()
    for _ in range(6000):
        if condition():
            return
        pause.wait(0.01)
    pytest.fail("it never held")


def start(daemon: Daemon) -> Callable[[], None]:
    """Run the daemon on a thread. Returns the function that stops it."""
    listens = threading.Event()
    daemon.on_started = listens.set

    def run() -> None:
        try:
            daemon.run()
        finally:
            listens.set()  # the daemon may fail before it listens

    thread = threading.Thread(target=run, name="kvcache-daemon", daemon=True)
    thread.start()
    listens.wait()

    def end() -> None:
        daemon.stop()
        thread.join()

    return end
