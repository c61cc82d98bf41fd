"""The daemon's door: as which tenant a connection comes in, and what that tenant may ask for in a second."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvcache.daemon.meter import Meter
from kvcache.daemon.tenant import ANYBODY, Tenant, Tenants
from kvcache.errors import AccessError
from kvcache.os_env import Clock


@dataclass(frozen=True, slots=True)
class Shown:
    """What somebody showed, as it may be kept and compared again: no token is in it."""

    user: int | None = None
    token_hash: str = ""
    certificates: Sequence[str] = ()
    remote: bool = False
    """Not of this host: it can map nothing, and there is no user."""


class Door:
    """Of the loop's thread, but for what says otherwise."""

    def __init__(self, path: str, clock: Clock) -> None:
        """`path` of the tenants file, if there is one; ConfigError as `Tenants.read`."""
        self.path, self._clock = path, clock
        self.tenants = self.look()
        self._meters: dict[str, Meter] = {}

    @property
    def apart(self) -> bool:
        """Whether tenants are kept apart."""
        return self.tenants is not None

    @property
    def count(self) -> int:
        """How many tenants there are; one where they are not kept apart."""
        return 1 if self.tenants is None else len(self.tenants.by_name)

    def look(self) -> Tenants | None:
        """The file as it is now; ConfigError where it makes no sense."""
        return Tenants.read(self.path) if self.path else None

    def use(self, tenants: Tenants | None) -> None:
        """From now on."""
        self.tenants = tenants
        for name, meter in self.meters.items():
            meter.change((tenants.by_name if tenants is not None else {}).get(name, Tenant(name=name)))

    def tenant(self, shown: Shown) -> Tenant:
        """AccessError for whoever is in no table. A token that nobody has is no reason to look at the rest."""
        if self.tenants is None:
            return ANYBODY
        found = None
        if shown.token_hash:
            found = self.tenants.by_hash(shown.token_hash)
        elif shown.certificates:
            found = self.tenants.by_certificate(shown.certificates)
        elif shown.user is not None:
            found = self.tenants.by_user(shown.user)
        if found is None:
            what = "token" if shown.token_hash else "certificate" if shown.certificates or shown.remote else "user"
            raise AccessError(
                f"no tenant has this {what}: give token_file or KVCACHE_TOKEN, or be entered in the tenants file of "
                f"the daemon (process {os.getpid()})"
            )
        return found

    def meter(self, tenant: Tenant) -> Meter:
        """From any thread."""
        found = self._meters.get(tenant.name)
        return found or self._meters.setdefault(tenant.name, Meter(tenant, self._clock))

    @property
    def meters(self) -> dict[str, Meter]:
        """By name, of tenants that came in."""
        return dict(self._meters)

    @property
    def rates(self) -> dict[str, dict[str, Any]]:
        """By tenant, what it may ask for in a second (None: no limit), and what it did. From any thread."""
        meters, tenants = self.meters, {} if self.tenants is None else self.tenants.by_name
        return {
            name: {
                "bandwidth": tenant.bandwidth,
                "operations": tenant.operations,
                "moved_bytes": meters[name].moved_bytes if name in meters else 0,
                "refused": meters[name].refused if name in meters else 0,
            }
            for name, tenant in tenants.items()
        }
