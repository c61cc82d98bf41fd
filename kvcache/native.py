"""Whether the compiled core is there.

    if native.available():
        native.core.digest_chain(...)
    else: the plain twin, beside the caller

Without a C++ compiler the package installs all the same and each native function has its twin: the same results,
slower. That is said once a process.
"""

from __future__ import annotations

import warnings
from functools import cache

try:
    from kvcache import _native as core  # named only where it was built: ask `available` first
except ImportError:
    built = False
else:
    built = True

__all__ = ["available", "built", "core"]


def available() -> bool:
    """Whether `core` can be called; the first False of a process warns."""
    if not built:
        _warn_once()
    return built


@cache
def _warn_once() -> None:
    warnings.warn(
        "kvcache._native is not there: expected it to be built when kvcache was installed. All works, slower; "
        "to have it, install a C++17 compiler and then kvcache again",
        RuntimeWarning,
        stacklevel=3,
    )
