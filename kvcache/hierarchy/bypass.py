"""An operator's switch that takes a cache out of an engine's way at once, without ending either.

Loads bypassed: a match finds nothing, a load is a miss, and one under way ends with the blocks it has. Stores
bypassed: what is offered is dropped and counted. What was stored before stays, and goes on down.
"""

from __future__ import annotations

from typing import Literal, get_args

from kvcache.errors import ConfigError

Mode = Literal["off", "on", "loads", "stores"]

BYPASS = "bypass"
"""The reason that is said of what was not done."""


class Bypass:
    """Two flags, read on every path without a lock: setting one never waits for anything."""

    def __init__(self) -> None:
        self.loads = False
        self.stores = False

    def set(self, mode: Mode) -> None:
        if mode not in get_args(Mode):
            raise ConfigError(f"bypass = {mode!r}: expected one of {', '.join(get_args(Mode))}")
        self.loads, self.stores = mode in {"on", "loads"}, mode in {"on", "stores"}

    @property
    def mode(self) -> Mode:
        if self.loads:
            return "on" if self.stores else "loads"
        return "stores" if self.stores else "off"
