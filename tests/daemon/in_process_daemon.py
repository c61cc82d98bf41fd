"""A daemon within the tests' own process, into whose cache they look."""

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
class Within:
    """A daemon in this process, whose cache tests look into."""

    cache: Cache
    daemon: Daemon
    path: Path
    undo: ExitStack
    port: Any = None

    def reach(self, **more: Any) -> Any:
        """As `open`, by its port."""
        made = kvcache.open(str(self.port), **{**PATIENT, **more})
        self.undo.callback(made.close)
        return made

    def open(self, **more: Any) -> Any:
        made = kvcache.open(f"unix:{self.path}", **{**PATIENT, **more})
        self.undo.callback(made.close)
        return made

    @property
    def held(self) -> int:
        return self.cache.index.held()

    @property
    def lost(self) -> int:
        """Slots that are neither a record's nor free."""
        slots = sum(len(slab.slots) for slab in self.cache.host.arena.slabs())
        return slots - self.cache.host.usage().records


def until(condition: Callable[[], bool]) -> None:
    """Look until it holds."""
    pause = threading.Event()
    for _ in range(6000):
        if condition():
            return
        pause.wait(0.01)
    pytest.fail("it never held")


def start(daemon: Daemon) -> Callable[[], None]:
    """Run it on a thread of this process; the function that ends it."""
    listens = threading.Event()
    daemon.on_started = listens.set

    def run() -> None:
        try:
            daemon.run()
        finally:
            listens.set()  # it may have ended before it began

    thread = threading.Thread(target=run, name="kvcache-daemon", daemon=True)
    thread.start()
    listens.wait()

    def end() -> None:
        daemon.stop()
        thread.join()

    return end
