"""What happened in a tier, counted by name since it was opened."""

from __future__ import annotations

import threading


class Counters:
    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._lock = threading.Lock()

    def add(self, name: str, n: int = 1) -> int:
        """The new count."""
        with self._lock:
            count = self._counts[name] = self._counts.get(name, 0) + n
            return count

    def snapshot(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)
