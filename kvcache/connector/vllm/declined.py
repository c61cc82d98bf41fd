"""Requests that go on without a cache: counted once each by why, and said once a kind, so that no caller can fill the
log."""

from __future__ import annotations

import logging

from kvcache.connector.vllm.tracked import Tracked
from kvcache.errors import AccessError, ConfigError, UnreachableError
from kvcache.observe.metrics import Counters

MOST_SAID = 256
"""Different lines."""

_log = logging.getLogger("kvcache.connector.vllm")


class Declined:
    def __init__(self) -> None:
        self.counters = Counters()  # the row `declined`
        self._requests: set[str] = set()  # that were counted and are not over
        self._said: set[str] = set()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def because(self, request_id: str, reason: str, why: str = "") -> None:
        """`reason`: the metric's label. `why`: the log's text, said where it was not said before."""
        if request_id not in self._requests:
            self._requests.add(request_id)
            self.counters.add("declined", reason=reason)
        if why:
            self.say(f"a request is not cached: {why}; others that end so are counted only")

    def failed(self, tracked: Tracked, error: Exception) -> None:
        """Law: an error of ours is a miss, and never the engine's to bear. From here on it is not cached; it counts
        where nothing of it was before."""
        kind = type(error).__name__
        what = "the rest of a request" if tracked.cached else "a request"
        if not tracked.cached:
            self.because(tracked.request.request_id, _reason(error))
        tracked.decline()
        self.say(f"{what} is not cached: {kind}: {error}; others that end so are not said", once=kind)

    def over(self, request_id: str) -> None:
        self._requests.discard(request_id)

    def say(self, text: str, *, once: str = "") -> None:
        key = once or text
        if key not in self._said and len(self._said) < MOST_SAID:
            self._said.add(key)
            _log.warning("%s", text)


def _reason(error: Exception) -> str:
    if isinstance(error, (AccessError, ConfigError)):
        return "refused"
    return "unreachable" if isinstance(error, UnreachableError) else "failed"
