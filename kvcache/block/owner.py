"""Whose a namespace is, as a tier keeps it beside its records: enough to find what is a tenant's, or of a salt, once
nobody has it bound any more, and nothing that tells either."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from kvcache.block.namespace import Namespace

OWNER_BYTES = 64


class Owner(NamedTuple):
    """Digests of the tenant's name and of the cache salt."""

    tenant: bytes
    salt: bytes

    @classmethod
    def of(cls, namespace: Namespace) -> Owner:
        return cls(_digest("tenant", namespace.tenant), _digest("salt", namespace.cache_salt))

    @classmethod
    def read(cls, packed: bytes) -> Owner | None:
        """None for what is none."""
        return cls(packed[:32], packed[32:]) if len(packed) == OWNER_BYTES else None

    def pack(self) -> bytes:
        return self.tenant + self.salt

    def fits(self, tenant: str | None, cache_salt: str | None) -> bool:
        """Whether it is this tenant and this salt, of those that are given."""
        return (tenant is None or self.tenant == _digest("tenant", tenant)) and (
            cache_salt is None or self.salt == _digest("salt", cache_salt)
        )


def _digest(what: str, text: str) -> bytes:
    return hashlib.sha256(f"kvcache owner {what} ".encode() + text.encode()).digest()
