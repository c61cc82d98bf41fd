"""What each tenant may take of a tier: a quota, and a least share that nobody else takes from it.

Knows no blocks: who asks says how much everybody has. Numbers can be changed while they are in use.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

UNLIMITED = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Limit:
    quota_bytes: int = UNLIMITED
    """At most."""
    least_bytes: int = 0
    """What it has up to here, others cannot take."""

    def __post_init__(self) -> None:
        if not 0 <= self.least_bytes <= self.quota_bytes:
            raise ValueError(
                f"a least share of {self.least_bytes} bytes with a quota of {self.quota_bytes}: expected 0 at least, "
                f"and the quota at most"
            )


class Shares:
    """By tenant and tier. Thread-safe."""

    def __init__(self) -> None:
        self._limits: dict[str, dict[str, Limit]] = {}  # by tier and tenant; copied where it changes
        self._lock = threading.Lock()

    def set(self, tenant: str, tier: str, limit: Limit) -> None:
        with self._lock:
            there = {**self._limits.get(tier, {}), tenant: limit}
            self._limits = {**self._limits, tier: {name: one for name, one in there.items() if one != Limit()}}

    def of(self, tenant: str, tier: str) -> Limit:
        return self._limits.get(tier, {}).get(tenant, Limit())

    def all(self, tier: str) -> Mapping[str, Limit]:
        """Of the tenants that have one."""
        return self._limits.get(tier, {})

    def losable(self, tenant: str, tier: str, used_bytes: int, *, to: str) -> int:
        """How many of its bytes others may take, where it has so many."""
        if tenant == to:
            return UNLIMITED
        least = self.of(tenant, tier).least_bytes
        return max(0, used_bytes - least) if least else UNLIMITED
