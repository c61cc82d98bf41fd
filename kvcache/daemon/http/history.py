"""The figures of the last hour, a sample every few seconds, so that a page that is opened now shows what was before."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from typing import Any

EVERY_S = 5.0
SAMPLES = 720

_SUMMED = ("requests", "asked_tokens", "stored_bytes")
_BY_LABEL = ("hit_tokens", "loaded_bytes", "misses")


def sample(stats: Mapping[str, Any], time: float) -> dict[str, Any]:
    """What of the statistics changes by the second; counters as they are, for whoever takes differences."""
    counters = stats.get("counters", {})
    return {
        "time": time,
        **{name: counters.get(name, 0) for name in _SUMMED},
        **{name: dict(counters.get(name, {})) for name in _BY_LABEL},
        "used_bytes": {tier: found["used_bytes"] for tier, found in stats["tiers"].items()},
    }


class History:
    """Thread-safe; the oldest leave."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self._samples: deque[dict[str, Any]] = deque(maxlen=samples)
        self._lock = threading.Lock()

    def add(self, stats: Mapping[str, Any], time: float) -> None:
        with self._lock:
            self._samples.append(sample(stats, time))

    def all(self) -> list[dict[str, Any]]:
        """The oldest first."""
        with self._lock:
            return list(self._samples)
