"""Inspection of a whole store: usage, faults, pruning, owners and purges."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from kvcache.block.namespace import OWNER_BYTES, Owner
from kvcache.block.record import Address
from kvcache.tier.object.bucket import Bucket, ListedObject, ObjectExistsError, RefusedError
from kvcache.tier.object.keys import OWNER, ObjectNames
from kvcache.tier.object.manifest import Manifest, Pack
from kvcache.tier.tier import Usage, parents_first

_PURGE_ROUNDS = 3  # rounds of deletion, since other processes may store during a purge


@dataclass(slots=True)
class NamespaceUsage:
    """The packs of one namespace; ages are in seconds."""

    namespace: bytes
    packs: int = 0
    size_bytes: int = 0
    oldest_s: float = 0.0
    newest_s: float = float("inf")


class StoreInspector:
    def __init__(self, bucket: Bucket, manifest: Manifest, names: ObjectNames) -> None:
        self._bucket, self._manifest, self._names = bucket, manifest, names

    def listed(self, namespace: bytes | None = None) -> Iterator[ListedObject]:
        """Yield every object with a name of this tier, page by page."""
        under = self._names.root if namespace is None else self._names.namespace(namespace)
        for page in self._bucket.pages(under + "/"):
            yield from (each for each in page if self._names.namespace_of(each.path) is not None)

    def namespaces(self) -> list[bytes]:
        found = (self._names.namespace_of(each.path) for each in self.listed() if self._names.is_pack(each.path))
        return list(dict.fromkeys(namespace for namespace in found if namespace is not None))

    def spaces(self) -> list[NamespaceUsage]:
        """Return the usage of each namespace, from the listing alone."""
        spaces: dict[bytes, NamespaceUsage] = {}
        for each in self.listed():
            namespace = self._names.namespace_of(each.path)
            if namespace is not None and self._names.is_pack(each.path):
                usage = spaces.setdefault(namespace, NamespaceUsage(namespace))
                usage.packs, usage.size_bytes = usage.packs + 1, usage.size_bytes + each.size
                usage.oldest_s, usage.newest_s = max(usage.oldest_s, each.age_s), min(usage.newest_s, each.age_s)
        return list(spaces.values())

    def packs(self) -> Iterator[Pack]:
        for namespace in self.namespaces():
            yield from self._manifest.iterate_packs(namespace)

    def addresses(self, namespace: bytes | None = None) -> list[Address]:
        """Return each record once, parents first."""
        found: list[Address] = []
        for each in self.namespaces() if namespace is None else [namespace]:
            seen: dict[bytes, Address] = {}
            for pack in self._manifest.iterate_packs(each):
                addresses = map(pack.table.address, pack.table.rows)
                seen.update((address.name, address) for address in addresses)
            found += parents_first(list(seen.values()))
        return found

    def usage(self) -> Usage:
        size = sum(each.size for each in self.listed() if self._names.is_pack(each.path))
        return Usage(len(self.addresses()), size, 0)

    def check(self) -> list[str]:
        faults = []
        sizes = {each.path: each.size for each in self.listed() if self._names.is_pack(each.path)}
        known = {pack.path: pack for pack in self.packs()}
        for path, size in sizes.items():
            pack = known.get(path)
            if pack is None:
                faults.append(f"object: {path} is not a pack of this version")
            elif pack.table.size_bytes != size:
                faults.append(f"object: {path} has {size} bytes, its table says {pack.table.size_bytes}")
        return faults

    def prune(
        self, *, older_s: float | None, max_bytes: int | None, expired: bool = False, dry_run: bool = False
    ) -> NamespaceUsage:
        """Delete packs and return what was deleted; a namespace without packs loses its other objects too.

        Args:
            older_s: Delete packs older than this.
            max_bytes: Delete the oldest packs beyond this total size.
            expired: Delete packs of which every record has expired.
            dry_run: Delete nothing; only return what would be deleted.
        """
        over = {pack.path for pack in self.packs() if self._manifest.expired(pack)} if expired else set()
        packs = sorted((each for each in self.listed() if self._names.is_pack(each.path)), key=lambda each: each.age_s)
        deleted: list[ListedObject] = []
        kept_bytes = 0
        for each in packs:  # the youngest first
            old = older_s is not None and each.age_s > older_s
            many = max_bytes is not None and kept_bytes + each.size > max_bytes
            if old or many or each.path in over:
                deleted.append(each)
            else:
                kept_bytes += each.size
        if not dry_run:
            self._bucket.delete([each.path for each in reversed(deleted)], None)
            self._drop_empty()
        oldest_s = max((each.age_s for each in deleted), default=0.0)
        return NamespaceUsage(b"", len(deleted), sum(each.size for each in deleted), oldest_s)

    def purge(self, namespace: bytes) -> int:
        """Delete every object of a namespace and return its count of records.

        Raises:
            RefusedError: Other processes go on storing.
        """
        records = len(self.addresses(namespace))
        for _ in range(_PURGE_ROUNDS):
            paths = [each.path for each in self.listed(namespace)]
            if not paths:
                return records
            self._bucket.delete(paths, None)
            for path in paths:
                self._manifest.forget(path)
        if any(True for _ in self.listed(namespace)):
            raise RefusedError("objects were stored meanwhile")
        return records

    def note_owner(self, namespace: bytes, owner: Owner) -> None:
        with suppress(ObjectExistsError):
            self._bucket.put(self._names.owner(namespace), [memoryview(owner.pack())], None, create=True)

    def owners(self) -> dict[bytes, Owner]:
        paths = [each.path for each in self.listed() if each.path.endswith(f"/{OWNER}")]
        found = {}
        for path, data in zip(paths, self._bucket.heads(paths, OWNER_BYTES, None) if paths else (), strict=True):
            namespace, owner = self._names.namespace_of(path), Owner.read(data or b"")
            if namespace is not None and owner is not None:
                found[namespace] = owner
        return found

    def _drop_empty(self) -> None:
        """Delete the other objects of namespaces without a pack."""
        listed = list(self.listed())
        full = {self._names.namespace_of(each.path) for each in listed if self._names.is_pack(each.path)}
        self._bucket.delete([each.path for each in listed if self._names.namespace_of(each.path) not in full], None)
