"""So many of one thing for all tenants together, of which each can always have its share.

Half of them are shares, equal ones, and nobody else has a tenant's; the other half is for whoever comes first. So one
tenant alone has more than half of all, and however many it wants, the next one finds its own share free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable


class Allotment:
    """Of one thread. Without tenants apart from each other there is one, who has all."""

    def __init__(self, most: int, tenants: Callable[[], int]) -> None:
        """`tenants`: how many there are now; where that changes, so does everybody's share from then on."""
        self.most, self._tenants = most, tenants
        self._used: Counter[str] = Counter()

    @property
    def share(self) -> int:
        """0 where there are more tenants than half as many things: then whoever comes first has them."""
        return self.most // (2 * max(1, self._tenants()))

    def used(self, tenant: str) -> int:
        return self._used[tenant]

    def has_room(self, tenant: str) -> bool:
        share = self.share
        if self._used.total() >= self.most:
            return False
        if self._used[tenant] < share:
            return True
        beyond = sum(max(0, used - share) for used in self._used.values())
        return beyond < self.most - share * max(1, self._tenants())

    def take(self, tenant: str) -> bool:
        """One; False where nothing is left for it."""
        if not self.has_room(tenant):
            return False
        self.exchange(tenant)
        return True

    def exchange(self, tenant: str) -> None:
        """One, in the place of another that it gave back."""
        self._used[tenant] += 1

    def give_back(self, tenant: str) -> None:
        self._used[tenant] -= 1
        if not self._used[tenant]:
            del self._used[tenant]
