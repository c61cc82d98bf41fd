"""What each tenant may take of a tier: a quota, and a least share that nobody else takes from it.

Knows no blocks: who asks says how much everybody has. Numbers can be changed while they are in use.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

UNLIMITED = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Quota:
    quota_bytes: int = UNLIMITED
    """At most."""
    guaranteed_bytes: int = 0
    """What it has up to here, others cannot take."""

    def __post_init__(self) -> None:
        if not 0 <= self.guaranteed_bytes <= self.quota_bytes:
            raise ValueError(
                f"a least share of {self.guaranteed_bytes} bytes with a quota of {self.quota_bytes}: "
                f"expected 0 at least, "
                f"and the quota at most"
            )


class Quotas:
    """By tenant and tier. Thread-safe."""

    def __init__(self) -> None:
        self._limits: dict[str, dict[str, Quota]] = {}  # by tier and tenant; copied where it changes
        self._lock = threading.Lock()

    def set(self, tenant: str, tier: str, limit: Quota) -> None:
        with self._lock:
            limits = {**self._limits.get(tier, {}), tenant: limit}
            self._limits = {**self._limits, tier: {name: one for name, one in limits.items() if one != Quota()}}

    def of(self, tenant: str, tier: str) -> Quota:
        return self._limits.get(tier, {}).get(tenant, Quota())

    def all(self, tier: str) -> Mapping[str, Quota]:
        """Of the tenants that have one."""
        return self._limits.get(tier, {})

    def evictable(self, tenant: str, tier: str, used_bytes: int, *, to: str) -> int:
        """How many of its bytes others may take, where it has so many."""
        if tenant == to:
            return UNLIMITED
        guaranteed = self.of(tenant, tier).guaranteed_bytes
        return max(0, used_bytes - guaranteed) if guaranteed else UNLIMITED
