"""Erasure: removes all records of a tenant, a salt or a namespace from every tier, and overwrites their bytes.

Each tier stores the owner of each namespace beside its records. Records of other processes, or from before a restart,
are therefore found too. Loads in progress still complete, and an engine that goes on storing creates new records. The
erasure therefore looks again afterwards and reports what remains.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

from kvcache.block.chain import SIGNATURE_BYTES
from kvcache.block.namespace import Namespace, Owner
from kvcache.cache.usage import NamespaceUsage
from kvcache.errors import ConfigError, NotFoundError
from kvcache.index.index import Index
from kvcache.log import log_faults, logger
from kvcache.os_env import OsEnv
from kvcache.tier.tier import Outcome, SupportsOwners, SupportsPurge, SupportsScrub, SupportsWipe, Tier, call

# Removal of namespaces from tiers. Loads in progress still complete.

BATCH_RECORDS = 1024
MAX_FLUSH_S = 5.0
"""The longest wait for stores in progress."""


def clear(namespace: bytes, index: Index, tiers: Sequence[Tier]) -> int:
    """Remove all records of a namespace; the count over all tiers.

    Last blocks are removed first, so that no tail ever lacks its head.
    """
    return sum(remove({namespace}, index, tier) for tier in tiers)


def remove(namespaces: Collection[bytes], index: Index, tier: Tier) -> int:
    removed = 0
    records = [address for address in tier.scan() if address.namespace in namespaces][::-1]
    for first in range(0, len(records), BATCH_RECORDS):
        batch = records[first : first + BATCH_RECORDS]
        for address in batch:
            index.discard(address, tier.name)  # before the removal, so that no lookup finds a removed record
        removed += call(tier, "remove", batch).count(Outcome.DONE)
    return removed


_MAX_ROUNDS = 3  # for records stored meanwhile
_PENDING_STORES = "stores"
_UNKNOWN_OWNER = "no tier has its owner: clear it by its id alone"

_log = logger("kvcache.erase")


@dataclass(slots=True)
class EraseResult:
    """The result of an erasure.

    `incomplete` gives reasons, by tier or by the part that was not erased. If it is empty, no tier has a record of
    these namespaces, or bytes of a removed one.
    """

    namespaces: list[bytes]
    records: dict[str, int] = field(default_factory=dict)  # by tier, the number removed
    incomplete: dict[str, str] = field(default_factory=dict)


class Erasure:
    def __init__(
        self,
        index: Index,
        tiers: Sequence[Tier],
        namespace_usage: NamespaceUsage,
        flush: Callable[[float], bool],
        wipe: Callable[[], object],
        os_env: OsEnv,
    ) -> None:
        """Set up the erasure.

        Args:
            flush: waits for writes to lower tiers, which would otherwise arrive after the removal.
            wipe: overwrites the buffers of these writes.
        """
        self._index, self._tiers, self._census, self._flush, self._wipe = index, tiers, namespace_usage, flush, wipe
        self._owners: dict[bytes, Owner] = {}
        self._noted: set[bytes] = set()
        self._tenants: dict[bytes, str] = {}
        self._executor = os_env.executor(1, "owners")
        self.submit = self._executor.submit
        """Runs other background work on this thread."""

    def owned(self) -> dict[bytes, Owner]:
        """The owners of the namespaces that were bound here."""
        return dict(self._owners)

    def restore(self, owners: Mapping[bytes, Owner | None]) -> None:
        """Add the owners that an earlier process handed over."""
        self._owners |= {namespace: owner for namespace, owner in owners.items() if owner is not None}

    def note(self, namespace: Namespace) -> None:
        """Store the owner of this namespace in every tier, in the background."""
        if namespace.id in self._noted:
            return
        owner = self._owners[namespace.id] = Owner.of(namespace)
        self._tenants[namespace.id] = namespace.tenant
        self._noted.add(namespace.id)
        self._executor.submit(lambda: self._note(namespace.id, owner))

    def unbind(self, namespace: bytes) -> None:
        """Forget a namespace that is not bound and has no record in this cache's own tiers."""
        self._noted.discard(namespace)
        self._owners.pop(namespace, None)
        self._tenants.pop(namespace, None)

    def _note(self, namespace: bytes, owner: Owner) -> None:
        for tier in self._tiers:
            if not isinstance(tier, SupportsOwners):
                continue
            with log_faults(_log, "%s: the owner of a namespace was not stored", tier.name):
                try:
                    tier.note_owner(namespace, owner)
                except OSError as error:
                    _log.warning("%s: the owner of a namespace was not stored: %s", tier.name, error)
                    self._noted.discard(namespace)  # the next binding tries again

    def erase(
        self,
        *,
        tenant: str | None = None,
        cache_salt: str | None = None,
        namespace: str | None = None,
        dry_run: bool = False,
    ) -> EraseResult:
        """Remove all matching records from every tier, shared ones included, and overwrite their bytes.

        Waits for stores in progress and for every tier.

        Args:
            tenant, cache_salt, namespace: a namespace must match all that are given; `namespace` is the start of its
                id.
            dry_run: only count.

        Raises:
            ConfigError: no criterion is given.
            NotFoundError: no namespace known here matches.
        """
        if tenant is None and cache_salt is None and namespace is None:
            raise ConfigError("no filter: expected a tenant, a cache salt, or a namespace")
        owners, unknown = dict(self._owners), dict[str, str]()
        for tier in self._tiers:
            try:
                owners |= tier.owners() if isinstance(tier, SupportsOwners) else {}
            except OSError as error:
                unknown[tier.name] = str(error)
        if namespace is None:
            if not unknown:  # otherwise a tier did not list its owners, and they may match
                self._check(owners.values(), tenant, cache_salt)
            selected = [space for space, owner in owners.items() if owner.fits(tenant, cache_salt)]
        else:
            known = {*owners, *self._census.take(anew=True)}
            found = _matching_namespaces(namespace, known)
            by_id_alone = tenant is None and cache_salt is None
            selected = [s for s in found if (owners[s].fits(tenant, cache_salt) if s in owners else by_id_alone)]
            unowned = [] if by_id_alone else [space for space in found if space not in owners]
            unknown |= dict.fromkeys((f"namespace {space.hex()[:16]}" for space in unowned), _UNKNOWN_OWNER)
            if not selected and not unowned:
                why = "no namespace has an id with this prefix" if not found else "it has another tenant or salt"
                ids = [space.hex() for space in known]
                text = f"namespace {namespace!r:.80}: {why}; see `kvcache ls`"
                raise NotFoundError.like(text, namespace, [i[: max(8, len(namespace))] for i in ids])
        if not selected and not unknown:
            raise NotFoundError("no namespace has both this tenant and this cache salt; see `kvcache ls`")
        erased = self._count(selected) if dry_run else self._kept(selected)
        erased.incomplete = unknown | erased.incomplete
        for name, reason in erased.incomplete.items():
            _log.warning("erasure is incomplete: namespaces=%d %s: %s", len(selected), name, reason)
        return erased

    def _check(self, owners: Collection[Owner], tenant: str | None, cache_salt: str | None) -> None:
        """Raise NotFoundError if no namespace has this tenant, or this salt. Salts are secrets and are not named."""
        if tenant is not None and not any(owner.fits(tenant, None) for owner in owners):
            text = f"tenant {tenant!r:.80}: no namespace of it is known here; see `kvcache ls`"
            raise NotFoundError.like(text, tenant, list(self._tenants.values()))
        if cache_salt is not None and not any(owner.fits(None, cache_salt) for owner in owners):
            raise NotFoundError("the cache salt: no namespace of it is known here; `kvcache ls` tells which have one")

    def _count(self, namespaces: list[bytes]) -> EraseResult:
        records: Counter[str] = Counter()
        for tier in self._tiers:
            records[tier.name] = sum(address.namespace in namespaces for address in tier.scan())
        return EraseResult(namespaces, dict(records))

    def _kept(self, namespaces: list[bytes]) -> EraseResult:
        """Erase while tiers keep their emptied files, so that these are overwritten before they are removed."""
        with ExitStack() as stack:
            for tier in self._tiers:
                if isinstance(tier, SupportsScrub):
                    tier.keep_files(True)
                    stack.callback(tier.keep_files, False)
            return self._erase(namespaces)

    def _erase(self, namespaces: list[bytes]) -> EraseResult:
        erased = EraseResult(namespaces)
        if not namespaces:
            return erased
        for _ in range(_MAX_ROUNDS):
            if self._flush(MAX_FLUSH_S):
                erased.incomplete.pop(_PENDING_STORES, None)
            else:
                erased.incomplete[_PENDING_STORES] = (
                    f"some were still being demoted after {MAX_FLUSH_S:g} s: clear again"
                )
            found = 0
            for tier in self._tiers:
                try:
                    removed = remove(namespaces, self._index, tier)
                    if isinstance(tier, SupportsPurge):
                        removed += sum(map(tier.purge, namespaces))
                    erased.incomplete.pop(tier.name, None)
                except OSError as error:
                    erased.incomplete[tier.name] = str(error)
                    continue
                found += removed
                erased.records[tier.name] = erased.records.get(tier.name, 0) + removed
            if not found:
                break
        self._wipe()
        for tier in self._tiers:
            if isinstance(tier, SupportsWipe) and not tier.wipe():
                erased.incomplete[tier.name] = "some freed space was not overwritten"
            elif tier.name not in erased.incomplete and (reason := _reason_for_remaining(namespaces, tier)):
                erased.incomplete[tier.name] = reason
        for namespace in set(namespaces) & self._owners.keys():  # still bound here: new records have the same owner
            self._executor.submit(partial(self._note, namespace, self._owners[namespace]))
        return erased

    def close(self) -> None:
        self._executor.close()


def _reason_for_remaining(namespaces: Collection[bytes], tier: Tier) -> str:
    """Why a tier may still have records, else "". A shared tier may not answer; its state is then unknown."""
    try:
        if isinstance(tier, SupportsOwners):
            tier.owners()
    except OSError as error:
        return str(error)
    remaining = sum(address.namespace in namespaces for address in tier.scan())
    return f"{remaining} records were stored meanwhile" if remaining else ""


def _matching_namespaces(id_prefix: str, known: Collection[bytes]) -> list[bytes]:
    """The namespaces whose id begins with this prefix. A complete id matches even if it is unknown."""
    found = [namespace for namespace in known if namespace.hex().startswith(id_prefix.lower())]
    whole = len(id_prefix) == 2 * SIGNATURE_BYTES and not set(id_prefix.lower()) - set("0123456789abcdef")
    return [bytes.fromhex(id_prefix)] if whole and not found else found
