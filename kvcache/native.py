"""The compiled core, where it was built.

    if native.available():
        native.core.digest_chain(...)
    else: call the Python twin

The package also installs without a C++ compiler. Each native function has a Python twin with the same results, which is
slower. A warning reports this once a process.
"""

from __future__ import annotations

import warnings
from functools import cache

try:
    from kvcache import _native as core  # undefined where it was not built: check `available` first
except ImportError:
    built = False
else:
    built = True

__all__ = ["available", "built", "core"]


def available() -> bool:
    """Return whether `core` can be called. The first False of a process warns."""
    if not built:
        _warn_once()
    return built


@cache
def _warn_once() -> None:
    warnings.warn(
        "kvcache._native is missing: kvcache was installed without a C++17 compiler. Plain Python code runs "
        "instead, slower. Install a compiler, then kvcache again",
        RuntimeWarning,
        stacklevel=3,
    )
