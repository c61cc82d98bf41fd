"""Requests that go on without a cache: counted by why, and said once each, so that no caller can fill the log."""

from __future__ import annotations

import logging

MOST_SAID = 256
"""Different lines."""

_log = logging.getLogger("kvcache.connector.vllm")


class Declined:
    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self._said: set[str] = set()

    def because(self, why: str) -> None:
        self._count(why)
        self.say(f"requests with {why} are not cached")

    def failed(self, error: Exception) -> None:
        """Law: an error of ours is a miss, and never the engine's to bear."""
        kind = type(error).__name__
        self._count(kind)
        self.say(f"a request is not cached: {kind}: {error}; others that end so are counted only", once=kind)

    def say(self, text: str, *, once: str = "") -> None:
        key = once or text
        if key not in self._said and len(self._said) < MOST_SAID:
            self._said.add(key)
            _log.warning("%s", text)

    def _count(self, why: str) -> None:
        if why in self.counts or len(self.counts) < MOST_SAID:
            self.counts[why] = self.counts.get(why, 0) + 1
