"""What work costs, whatever the machine and its load: the calls of functions, Python's and C's."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any


def calls(work: Callable[[], object]) -> Counter[str]:
    """How often each function was called, by name. What others left to be collected is not collected meanwhile: it
    would be counted, and when that happens is chance."""
    counts: Counter[str] = Counter()

    def count(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            counts[frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name] += 1
        elif event == "c_call":
            counts[argument.__qualname__] += 1

    gc.collect()
    gc.disable()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return counts
