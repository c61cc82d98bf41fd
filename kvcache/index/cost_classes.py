"""Cost classes of blocks: the worth of a byte of each class, and which tenant may evict which records.

A cost class (`kind` in the index) is a tenant, a model and the size of a record in each tier. A byte is worth the cost
to recompute its block, as the tenant's engines reported it, per byte that the block takes in all. The worth is relative
to the geometric mean of that tenant's models, so that no tenant's report changes another tenant's worth. It is rounded
to a quarter octave, so that noise does not rank classes. A model without a report counts as the mean. Reports outside a
plausible range are ignored.

Class 0 has no tenant and is worth the mean. It contains records without a bound namespace: those of an earlier run,
before their engine connects. A new class beyond the limit uses an existing one with the same tenant and sizes, else
class 0.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import inf, log2
from typing import Any

from kvcache.block.record import Address
from kvcache.evict.quotas import UNLIMITED, Quotas
from kvcache.index.block_run import SHARD_KEY_BYTES, shard_key_of
from kvcache.index.index import Index, Victim
from kvcache.log import logger

MAX_CLASSES = 1 << 12
"""As in the compiled index."""
MAX_RESTORED_SIZE = 1 << 48
"""The most bytes or tokens of one block that a saved state may state."""
HALF_LIFE_TOKENS = 1 << 20
"""After this many tokens an earlier report weighs half."""
STEPS_PER_OCTAVE = 4
MIN_TOKEN_S, MAX_TOKEN_S = 1e-9, 1e3
"""The range of plausible seconds per token."""
MAX_STEP_TOKENS = 1 << 31
"""The most plausible tokens of one step."""
MAX_OCTAVES = 8.0
"""The largest distance from the mean. Compute costs of two models on one machine do not differ by more."""

_log = logger("kvcache.kinds")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Blocks with the same compute cost: a name, and the bytes of a block in each tier, all its records together."""

    name: tuple[str, ...]
    block_tokens: int
    block_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CostClass:
    tenant: str
    model: ModelShape
    record_bytes: tuple[int, ...]  # by tier


class TokenCost:
    """Seconds per token, as an engine reported."""

    def __init__(self) -> None:
        self.tokens, self.seconds = 0.0, 0.0

    def learn(self, tokens: int, seconds: float) -> None:
        if self.tokens > HALF_LIFE_TOKENS:
            self.tokens, self.seconds = self.tokens / 2, self.seconds / 2
        self.tokens, self.seconds = self.tokens + tokens, self.seconds + seconds


class CostClasses:
    """Classes, weights and quotas. `tiers`: the tiers of the index, fastest first.

    Thread safety: any thread.
    """

    def __init__(self, index: Index, tiers: Sequence[str], quotas: Quotas) -> None:
        self._index, self.quotas = index, quotas
        self._number = {tier: t for t, tier in enumerate(tiers)}
        self._classes: list[CostClass | None] = [None]
        self._of: dict[CostClass, int] = {}
        self._class_of_shard: dict[bytes, int] = {}
        self._costs: dict[str, dict[ModelShape, TokenCost]] = {}  # by tenant
        self._weights: list[list[float]] = [[1.0] for _ in tiers]
        self._stale = self._full = False
        self._lock = threading.RLock()

    # classes

    def bind(self, cost_class: CostClass, shard_key: bytes) -> None:
        """Assign this shard, with current and future records, to the class."""
        with self._lock:
            number = self._of.get(cost_class)
            if number is None:
                if len(self._classes) == MAX_CLASSES:
                    number = self._alike(cost_class)
                    if number is None:
                        return
                else:
                    number = self._of[cost_class] = len(self._classes)
                    self._classes.append(cost_class)
                    self._stale = True
            if self._class_of_shard.get(shard_key) != number:
                self._class_of_shard[shard_key] = number
                self._index.assign([shard_key], number)

    def unbind(self, shard_keys: Collection[bytes]) -> None:
        """Remove these shards. They have no records, and get none before the next `bind`."""
        with self._lock:
            unbound = [shard_key for shard_key in shard_keys if self._class_of_shard.pop(shard_key, None) is not None]
            self._index.assign(unbound, 0)

    def _alike(self, cost_class: CostClass) -> int | None:
        """An existing class with the same tenant and sizes, so that quotas still hold beyond the limit on classes."""
        if not self._full:
            self._full = True
            _log.warning(
                "there are %d kinds of blocks (tenants, models, layouts): of another one, only what is as large as"
                " something of the same tenant's counts for its quota and its least share, until a restart",
                MAX_CLASSES - 1,
            )
        for other, number in self._of.items():
            if other.tenant == cost_class.tenant and other.record_bytes == cost_class.record_bytes:
                return number
        return None

    def export(self, max_bytes: int) -> list[list[Any]]:
        """Classes to save: shard key, tenant, model and bytes of each, as many rows as fit into `max_bytes`."""
        rows: list[list[Any]] = []
        with self._lock:
            for shard_key, number in reversed(self._class_of_shard.items()):
                cost_class = self._classes[number]
                if cost_class is None:
                    continue
                model = cost_class.model
                row = [
                    shard_key.hex(),
                    [cost_class.tenant, model.name, model.block_tokens],
                    model.block_bytes,
                    cost_class.record_bytes,
                ]
                max_bytes -= len(json.dumps(row)) + 1
                if max_bytes < 0:
                    break
                rows.append(row)
        return rows

    def restore(self, rows: Sequence[Sequence[Any]]) -> None:
        """Restore saved classes that have the same number of tiers. Raises before any change."""
        accepted = []
        for shard_key_hex, (tenant, name, block_tokens), block_bytes, record_bytes in rows:
            sizes, shard_key = (block_tokens, *block_bytes, *record_bytes), bytes.fromhex(shard_key_hex)
            if (
                not all(type(size) is int and 0 < size <= MAX_RESTORED_SIZE for size in sizes)
                or len(shard_key) != SHARD_KEY_BYTES
            ):
                raise ValueError(f"{sizes} of a shard key of {len(shard_key)} bytes")
            if not all(type(text) is str for text in (tenant, *name)):
                raise ValueError("a name that is no text")
            if len(block_bytes) == len(record_bytes) == len(self._number):
                model = ModelShape(tuple(name), block_tokens, tuple(block_bytes))
                accepted.append((CostClass(tenant, model, tuple(record_bytes)), shard_key))
        for cost_class, shard_key in accepted:
            self.bind(cost_class, shard_key)

    def computed(self, tenant: str, model: ModelShape, tokens: int, seconds: float) -> None:
        """Report that an engine of this tenant computed this many tokens in one step."""
        if not 0 < tokens <= MAX_STEP_TOKENS or not tokens * MIN_TOKEN_S <= seconds <= tokens * MAX_TOKEN_S:
            return
        with self._lock:
            self._costs.setdefault(tenant, {}).setdefault(model, TokenCost()).learn(tokens, seconds)
            self._stale = True

    def weights(self, tier: str) -> list[float]:
        """Weights by class."""
        with self._lock:
            if self._stale:
                self._weights = [self._weigh(t) for t in range(len(self._number))]
                self._stale = False
            return self._weights[self._number[tier]]

    def _weigh(self, t: int) -> list[float]:
        # relative to the mean of its tenant's models, in octaves
        relative_octaves: dict[tuple[str, ModelShape], float] = {}
        for tenant, costs in self._costs.items():
            worth = {
                model: log2(cost.seconds / cost.tokens * model.block_tokens / model.block_bytes[t])
                for model, cost in costs.items()
            }
            mean = sum(worth.values()) / len(worth)
            relative_octaves.update({(tenant, model): value - mean for model, value in worth.items()})
        return [
            1.0 if cost_class is None else _weight(relative_octaves.get((cost_class.tenant, cost_class.model), 0.0))
            for cost_class in self._classes
        ]

    # usage

    def used_bytes(self, tier: str) -> dict[str, int]:
        """The most bytes that the records of each tenant's classes can take; class 0 is left out."""
        used: dict[str, int] = {}
        t = self._number[tier]
        for cost_class, count in zip(list(self._classes), self._index.resident_by_class(tier), strict=False):
            if cost_class is not None:
                used[cost_class.tenant] = used.get(cost_class.tenant, 0) + count * cost_class.record_bytes[t]
        return used

    def spare_bytes(self, tier: str, tenant: str) -> int:
        """The bytes that the tenant's quota has left."""
        quota = self.quotas.of(tenant, tier).quota_bytes
        return UNLIMITED if quota == UNLIMITED else quota - self.used_bytes(tier).get(tenant, 0)

    # eviction

    def evict(
        self,
        tier: str,
        count: int,
        *,
        tenant: str,
        shard_key: bytes = b"",
        own: bool = False,
        before: int | None = None,
        stored_below: bool = False,
        worth: int | None = None,
    ) -> list[Victim]:
        """Evict for a tenant, as `Index.evict`.

        Returns fewer victims as a tenant nears its guaranteed share: call again.

        Args:
            shard_key: that of the new records that `worth` describes.
            own: evict only the tenant's own records.
        """
        with self._lock:
            weights = self.weights(tier)
            weight = weights[self._class_of_shard.get(shard_key, 0)]
        if not own and not self.quotas.all(tier):
            return self._index.evict(
                tier, count, before=before, stored_below=stored_below, worth=worth, weight=weight, weights=weights
            )
        with self._lock:  # held, so that no other thread evicts the counted records
            weights, used = self.weights(tier), self.used_bytes(tier)
            below_guarantee = used.get(tenant, 0) < self.quotas.of(tenant, tier).guaranteed_bytes
            keeps, most = self._kept(tier, used, tenant)
            kept = [
                inf if keep or (own and (cost_class is None or cost_class.tenant != tenant)) else value
                for keep, cost_class, value in zip(keeps, self._classes, weights, strict=True)
            ]
            victims: list[Victim] = []
            for others in (True, False) if below_guarantee and not own else (False,):
                given = [
                    inf if others and cost_class is not None and cost_class.tenant == tenant else value
                    for cost_class, value in zip(self._classes, kept, strict=True)
                ]
                victims = victims or self._index.evict(
                    tier,
                    min(count, most),
                    before=before,
                    stored_below=stored_below,
                    worth=None if below_guarantee else worth,
                    weight=weight,
                    weights=given,
                )
            return victims

    def _kept(self, tier: str, used: dict[str, int], tenant: str) -> tuple[list[bool], int]:
        """By class, whether a tenant may evict none of it; and the most records to evict at a time."""
        t, most, kept = self._number[tier], UNLIMITED, []
        for cost_class in self._classes:
            remaining = UNLIMITED
            if cost_class is not None:
                bytes_ = self.quotas.evictable(cost_class.tenant, tier, used.get(cost_class.tenant, 0), to=tenant)
                remaining = bytes_ if bytes_ == UNLIMITED else bytes_ // cost_class.record_bytes[t]
            kept.append(remaining == 0)
            most = min(most, remaining or most)
        return kept, most

    def worth(self, tier: str, addresses: Sequence[Address]) -> float:
        """As `Index.worth`, with this tier's weights."""
        return self._index.worth(tier, addresses, self.weights(tier))

    def evictable_bytes(self, tier: str, owner: str, tenant: str) -> int:
        """The bytes of `owner` that `tenant` may evict without touching the owner's guaranteed share."""
        if not self.quotas.all(tier):
            return UNLIMITED
        return self.quotas.evictable(owner, tier, self.used_bytes(tier).get(owner, 0), to=tenant)

    def evictable(self, tier: str, addresses: Sequence[Address], tenant: str) -> list[Address]:
        """Those of these records, in order, that a tenant may evict without touching any tenant's guaranteed share."""
        if not self.quotas.all(tier):
            return list(addresses)
        used, t = self.used_bytes(tier), self._number[tier]
        accepted = []
        for address in addresses:
            cost_class = self._classes[self._class_of_shard.get(shard_key_of(address), 0)]
            if cost_class is not None:
                size, has = cost_class.record_bytes[t], used.get(cost_class.tenant, 0)
                if self.quotas.evictable(cost_class.tenant, tier, has, to=tenant) < size:
                    continue
                used[cost_class.tenant] = has - size
            accepted.append(address)
        return accepted


def _weight(octaves: float) -> float:
    return float(2.0 ** (round(STEPS_PER_OCTAVE * max(-MAX_OCTAVES, min(MAX_OCTAVES, octaves))) / STEPS_PER_OCTAVE))
