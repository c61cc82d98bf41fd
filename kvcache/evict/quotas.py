"""Memory limits of tenants in a tier: a quota, and a guaranteed share that other tenants cannot evict.

This module knows no blocks: callers pass each tenant's usage. Limits can be changed while they are in use.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

UNLIMITED = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Quota:
    quota_bytes: int = UNLIMITED
    """The most bytes."""
    guaranteed_bytes: int = 0
    """Bytes that other tenants cannot evict."""

    def __post_init__(self) -> None:
        if not 0 <= self.guaranteed_bytes <= self.quota_bytes:
            raise ValueError(
                f"guaranteed share of {self.guaranteed_bytes} bytes with a quota of {self.quota_bytes}: "
                "expected 0 to the quota"
            )


class Quotas:
    """Limits by tenant and tier.

    Thread safety: any thread.
    """

    def __init__(self) -> None:
        self._limits: dict[str, dict[str, Quota]] = {}  # by tier and tenant; replaced by a copy at each change
        self._lock = threading.Lock()

    def set(self, tenant: str, tier: str, limit: Quota) -> None:
        with self._lock:
            limits = {**self._limits.get(tier, {}), tenant: limit}
            self._limits = {**self._limits, tier: {name: one for name, one in limits.items() if one != Quota()}}

    def of(self, tenant: str, tier: str) -> Quota:
        return self._limits.get(tier, {}).get(tenant, Quota())

    def all(self, tier: str) -> Mapping[str, Quota]:
        """Quotas of the tenants that have one."""
        return self._limits.get(tier, {})

    def evictable(self, tenant: str, tier: str, used_bytes: int, *, to: str) -> int:
        """The bytes that `to` may evict from a tenant with this usage."""
        if tenant == to:
            return UNLIMITED
        guaranteed = self.of(tenant, tier).guaranteed_bytes
        return max(0, used_bytes - guaranteed) if guaranteed else UNLIMITED
