"""Handover of host memory from one cache process to the next.

The memory is passed as file descriptors of slabs, the rest as a table (`docs/spec/protocol.md`, Handing over): which
slot has which record, and when it was last used. Clients can write to slots, but only the old process could write the
table. The table is therefore trusted, and the header in the slot must agree with it. Data that does not fit, is of
another version or is invalid is not adopted. Such records are then only on the drive, or lost.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import msgpack
import numpy as np
from xxhash import xxh3_64_digest

from kvcache.block.chain import SIGNATURE_BYTES
from kvcache.block.layout import Shard
from kvcache.block.namespace import Owner
from kvcache.block.record import Address
from kvcache.cache.cache import Cache
from kvcache.errors import INVALID_DATA, KVCacheError, LayoutError
from kvcache.evict.policy import AGE_EDGES, Policy
from kvcache.index.block_run import SHARD_KEY_BYTES, BlockRun
from kvcache.index.index import Index
from kvcache.log import logger
from kvcache.settings.types import show_bytes
from kvcache.tier.host.arena import PAGE_BYTES, Region, Slab
from kvcache.tier.host.tier import HostRecord

VERSION = 1
MAX_RESTORED_REQUESTS = 1 << 20
"""The most requests that the next process counts as its past: older uses count as this old."""
RECORD_ROW = np.dtype(
    [
        ("place", "<u4"),
        ("slot", "<u4"),
        ("bytes", "<u8"),
        ("expires_ms", "<u8"),
        ("age", "<u8"),
        ("uses", "<u2"),
        ("parent_known", "<u2"),
        ("unused", "<u4"),
        ("signature", f"V{SIGNATURE_BYTES}"),
        ("parent", f"V{SIGNATURE_BYTES}"),
    ]
)
"""One record of the table."""
_CHECKSUM_BYTES = 8

_log = logger("kvcache.legacy")


def export_state(cache: Cache, within_s: float, most: int | None = None) -> tuple[bytes, list[int]]:
    """The table, and the slabs' descriptors in its order, at most `most`.

    Slabs with pinned records are first; among these and among the others, the most recently used. The cache keeps
    ownership of the descriptors. Call it on a cache in which no record moves and that gets no more requests.
    """
    index, shard_keys, pins = cache.index, dict[bytes, int](), cache.pins
    pinned = pins.held()
    exported: list[tuple[tuple[bool, int], dict[str, Any], Region]] = []
    for slab, records in cache.host.detach_slabs(within_s).items():
        if not records:
            continue
        rows = np.zeros(len(records), RECORD_ROW)
        for i, held in enumerate(records):
            rows[i] = _row(held, index, shard_keys)
        generations = array("Q", slab.region.generations[: slab.count])
        slab_info = {
            "slot_bytes": slab.slot_bytes,
            "tenant": slab.tenant,
            "bytes": slab.region.bytes,
            "generations": generations.tobytes(),
            "rows": rows.tobytes(),
        }
        unpinned = not pinned or pinned.isdisjoint(BlockRun.of(held.address) for held in records)
        exported.append(((unpinned, int(rows["age"].min())), slab_info, slab.region))
    exported = sorted(exported, key=lambda each: each[0])[:most]
    table = {
        "legacy": VERSION,
        "capacity_bytes": cache.host.arena.capacity_bytes,
        "clock": index.clock,
        "policy": _policy_shape(index.policy),
        "places": list(shard_keys),
        "extents": [slab_info for _, slab_info, _ in exported],
        "owners": {space: owner.pack() for space, owner in cache.erasure.owned().items()},
        "learnt": cache.policy_state.export(waiting=False),  # the waiting blocks are part of the table itself
        "pins": pins.export(),
        "last_pin": pins.last,
        "life": cache.life if cache.flush(0) else "",
    }
    packed: bytes = msgpack.packb(table)
    descriptors = [region.descriptor for _, _, region in exported if region.descriptor is not None]
    return xxh3_64_digest(packed) + packed, descriptors


def _row(held: HostRecord, index: Index, shard_keys: dict[bytes, int]) -> tuple[Any, ...]:
    address, run = held.address, BlockRun.of(held.address)
    return (
        shard_keys.setdefault(run.shard_key, len(shard_keys)),
        held.slot.i,
        held.payload_bytes,
        held.slot.expires_ms,
        index.clock - index.stamp(address),
        index.uses(run)[0],
        bool(address.parent),
        0,
        address.signature,
        address.parent or bytes(SIGNATURE_BYTES),
    )


def _policy_shape(policy: Policy) -> list[Any]:
    """Use counts are compatible if these are equal."""
    return [policy.name, list(policy.bounds), list(policy.gaps), list(AGE_EDGES)]


class WarmRestart:
    """The state of an earlier process. `take_in` or `close` closes its descriptors."""

    def __init__(self, table: bytes, descriptors: Sequence[int]) -> None:
        """Read the table. A table that is invalid or of another version is logged and leaves this object empty."""
        self._descriptors = list(descriptors)
        self._exported: dict[str, Any] = {}
        self.capacity_bytes = 0
        """Of the earlier process's arena; 0 if unknown."""
        try:
            packed = memoryview(table)[_CHECKSUM_BYTES:]
            if xxh3_64_digest(packed) != table[:_CHECKSUM_BYTES]:
                raise ValueError("the table is damaged")
            exported = msgpack.unpackb(packed)
            if exported["legacy"] != VERSION:
                raise ValueError(f"version {exported['legacy']!r:.20}: this one reads {VERSION}")
            if len(exported["extents"]) != len(self._descriptors):
                raise ValueError(f"{len(exported['extents'])} extents, {len(self._descriptors)} came")
            self.capacity_bytes = int(exported["capacity_bytes"])
            self._exported = exported
        except INVALID_DATA as error:  # the drive still has its records
            _log.warning("host memory is not taken over: cause=%s", str(error))
            self.close()

    def close(self) -> None:
        """Idempotent."""
        remaining, self._descriptors = self._descriptors, []
        for descriptor in remaining:
            os.close(descriptor)

    def take_in(self, cache: Cache) -> int:
        """Adopt the slabs; the number of records now in host memory. Call it before the cache's first request."""
        if not self._exported:
            return 0
        exported, self._exported = self._exported, {}
        descriptors, self._descriptors = self._descriptors, []
        records = 0
        try:
            alike = exported["policy"] == _policy_shape(cache.index.policy)
            cache.index.advance_clock(min(int(exported["clock"]), MAX_RESTORED_REQUESTS))
            cache.erasure.restore({space: Owner.read(owner) for space, owner in exported["owners"].items()})
            cache.policy_state.restore(exported["learnt"])
            while descriptors:
                slab_info = exported["extents"][-len(descriptors)]
                try:  # a fault in one slab does not affect the others
                    records += _adopt_slab(cache, slab_info, exported["places"], descriptors.pop(0), alike=alike)
                except (*INVALID_DATA, KVCacheError, OSError) as error:
                    _log.warning("an extent of host memory is not taken over: cause=%s", str(error))
            for pin in exported.get("pins", ()):
                try:
                    cache.pins.restore(pin)
                except (*INVALID_DATA, KVCacheError) as error:
                    _log.warning("a pin is not taken over: cause=%s", str(error))
            cache.pins.resume_after(int(exported.get("last_pin", 0)))
            cache.continue_life(str(exported.get("life") or cache.life))
        except (*INVALID_DATA, KVCacheError) as error:
            _log.warning("a part of host memory is not taken over: cause=%s", str(error))
        for descriptor in descriptors:
            os.close(descriptor)
        used = cache.host.usage().used_bytes
        _log.info("taken over from the previous process: records=%d size=%s", records, show_bytes(used))
        return records


def _adopt_slab(
    cache: Cache, slab_info: dict[str, Any], shard_keys: Sequence[bytes], descriptor: int, *, alike: bool
) -> int:
    """Adopt one slab and take ownership of the descriptor; the number of records adopted."""
    with ExitStack() as on_fault:
        on_fault.callback(os.close, descriptor)
        size = int(slab_info["bytes"])
        on_fault.pop_all()
    region = Region(size, inherited=descriptor)
    slot_bytes, generations = slab_info["slot_bytes"], array("Q", slab_info["generations"])
    if type(slot_bytes) is not int or slot_bytes < PAGE_BYTES or len(generations) != region.bytes // slot_bytes:
        raise ValueError(f"slots of {slot_bytes!r:.20} bytes, {len(generations)} generations")
    region.restore_generations(generations)
    rows = np.frombuffer(slab_info["rows"], RECORD_ROW)
    if len(np.unique(rows["slot"])) < len(rows) or rows["slot"].max(initial=0) >= len(generations):
        raise ValueError("a slot is missing or listed twice")
    rows = rows[np.argsort(-rows["age"].astype(np.int64), kind="stable")]
    addresses = [
        _row_address(row, shard_keys) for row in rows[["place", "signature", "parent", "parent_known"]].tolist()
    ]
    numbers, sizes, ends = (rows[name].tolist() for name in ("slot", "bytes", "expires_ms"))
    slab = Slab(region, slot_bytes, str(slab_info["tenant"]), inherited=True)
    admitted = cache.host.adopt(slab, list(zip(numbers, addresses, sizes, ends, strict=True)))
    adopted = {address.name for address in admitted}
    index, tier, now = cache.index, cache.host.name, cache.index.clock
    for address, end, age, uses in zip(addresses, ends, rows["age"].tolist(), rows["uses"].tolist(), strict=True):
        if address.name in adopted:
            index.insert(address, tier)
            index.restore_use(BlockRun.of(address), max(0, now - age), uses if alike else 0)
            cache.expiry.note([address], end)
    return len(adopted)


def _row_address(row: tuple[Any, ...], shard_keys: Sequence[bytes]) -> Address:
    number, signature, parent, known = row
    shard_key = shard_keys[number]
    if len(shard_key) != SHARD_KEY_BYTES:
        raise ValueError(f"a shard key of {len(shard_key)} bytes")
    try:
        shard = Shard.unpack(shard_key[SIGNATURE_BYTES + 2 :])
    except LayoutError as error:
        raise ValueError(str(error)) from None
    group = int.from_bytes(shard_key[SIGNATURE_BYTES : SIGNATURE_BYTES + 2], "little")
    return Address(shard_key[:SIGNATURE_BYTES], signature, parent if known else b"", group, shard)
