"""Object names in a store. See `docs/spec/object.md`.

PREFIX/o1r1/NAMESPACE/SHARD/FIRST              a pack: records from the block of this signature on
PREFIX/o1r1/NAMESPACE/SHARD/FIRST.WRITE        another pack that begins with the same block
PREFIX/o1r1/NAMESPACE/catalogue                the manifest copy: tables of many packs
PREFIX/o1r1/NAMESPACE/owner                    the owner of the namespace
"""

from __future__ import annotations

import re
import secrets
from typing import NamedTuple

from kvcache.block.layout import Shard
from kvcache.block.record import VERSION, Address
from kvcache.errors import ConfigError
from kvcache.tier.object.pack import VERSION as PACK_VERSION

KEY_FORMAT = f"o{PACK_VERSION}r{VERSION}"
MANIFEST, OWNER = "catalogue", "owner"
_PREFIX = re.compile(r"([A-Za-z0-9._-]{1,64}/?)*")


class PackLocation(NamedTuple):
    """Namespace, group and shard, which the name of a pack holds."""

    namespace: bytes
    group: int
    shard: Shard

    @classmethod
    def of(cls, address: Address) -> PackLocation:
        return cls(address.namespace, address.group, address.shard)


class ObjectNames:
    def __init__(self, prefix: str) -> None:
        if not _PREFIX.fullmatch(prefix) or ".." in prefix:
            raise ConfigError(f"object.prefix = {prefix!r}: expected letters, digits and ._- with / between")
        self.root = "/".join(part for part in (*prefix.split("/"), KEY_FORMAT) if part)

    def namespace(self, namespace: bytes) -> str:
        return f"{self.root}/{namespace.hex()}"

    def owner(self, namespace: bytes) -> str:
        return f"{self.namespace(namespace)}/{OWNER}"

    def manifest(self, namespace: bytes) -> str:
        return f"{self.namespace(namespace)}/{MANIFEST}"

    def pack(self, location: PackLocation, first: bytes, *, other: bool = False) -> str:
        """Return the name of the pack that begins with this block; `other` adds a random suffix."""
        shard = location.shard
        part = f"{location.group}-{shard.first_layer}-{shard.end_layer}-{shard.first_head}-{shard.end_head}"
        end = f".{secrets.token_hex(8)}" if other else ""
        return f"{self.namespace(location.namespace)}/{part}/{first.hex()}{end}"

    def is_path_of(self, path: str, location: PackLocation, first: bytes) -> bool:
        """Return whether this is a valid path for a pack of this location that begins with this block."""
        name = self.pack(location, first)
        return path == name or path.startswith(f"{name}.")

    def namespace_of(self, path: str) -> bytes | None:
        """Return the namespace of an object; None for a path outside this tier's names."""
        parts = path[len(self.root) + 1 :].split("/") if path.startswith(self.root + "/") else []
        if len(parts) < 2 or len(parts[0]) != 64:
            return None
        try:
            return bytes.fromhex(parts[0])
        except ValueError:
            return None

    def is_pack(self, path: str) -> bool:
        return self.namespace_of(path) is not None and path.count("/", len(self.root) + 1) == 2
