"""One store: copies full blocks from an engine's pages into host slots, publishes them and offers them to lower tiers.

A store never waits for capacity. The first block without a slot ends the store, because later blocks could not be found
without it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from kvcache.block.record import Address
from kvcache.cache.context import BYPASS, CacheContext
from kvcache.cache.operation import BlockTransfer
from kvcache.cache.slot_copy import PeerAbortedError, SlotCopy
from kvcache.cache.tier_manager import TierManager
from kvcache.index.block_run import ChainView, contiguous_ranges, pack_shard_key
from kvcache.log import RequestContext, log_faults, logger, request_context
from kvcache.tier.host.arena import Slot
from kvcache.tier.tier import Outcome

WINDOW_BYTES = 64 << 20

FilledSlots = tuple[list[int], list[Slot]]  # of a group: blocks counted from the first stored, and a slot for each

_log = logger("kvcache.store")


@dataclass(kw_only=True)
class Store:
    context: CacheContext
    tier_manager: TierManager
    work: RequestContext
    namespace: bytes
    slot_copy: SlotCopy
    chains: Sequence[ChainView]  # by group
    rules: Sequence[str]
    first_block: int
    tenant: str
    before: int
    transfer: BlockTransfer
    ttl_s: float | None = None

    def run(self) -> None:
        """Run the store. Never raises: a cache fault never fails a request."""
        with request_context(self.work):
            try:
                with log_faults(_log, "store failed; its blocks are dropped"):
                    try:
                        self._run()
                    except PeerAbortedError as error:
                        _log.debug("store ended: %s", error)
            finally:
                self.transfer.settle_rest(0, Outcome.FAILED)

    def _run(self) -> None:
        count = len(self.transfer.outcomes)
        if count and not self._parents_stored():
            self._drop(0, "orphan")
            return
        step = max(1, WINDOW_BYTES // sum(chain.payload_bytes for chain in self.chains))
        first = 0
        while first < count:
            if self.transfer.cancelled:
                self.transfer.settle_rest(first, Outcome.CANCELLED)
                return
            if self.context.bypass.stores:
                self._drop(first, BYPASS)
                return
            end = min(count, first + step)
            reached = self._window(first, end)
            if reached < end:
                if step == 1 or len(self.chains) == 1:
                    self._drop(reached, "no room")
                    for chain in self.chains if not self.tier_manager.write_back_queues else ():
                        self.context.index.refuse(chain.run(self.first_block + reached, self.first_block + count))
                    return
                step = max(1, (end - first) // 2)  # one group may have used up the capacity that all groups need
            first = reached

    def _parents_stored(self) -> bool:
        """Whether the parents are cached. A block whose parent no tier has could never be found."""
        return all(
            rule != "all" or chain.parent(self.first_block) in (b"", self.namespace) or self._parent_stored(chain)
            for chain, rule in zip(self.chains, self.rules, strict=True)
        )

    def _parent_stored(self, chain: ChainView) -> bool:
        head = Address(self.namespace, chain.parent(self.first_block), b"", chain.group, chain.shard)
        return self.context.index.contains(head)

    def _window(self, first: int, end: int) -> int:
        """Store these blocks; the first one without a slot, else `end`."""
        filled, reached = self._slots(first, end)
        size = records = 0
        try:
            parts = [
                (i, group, slot)
                for group, (blocks, slots) in enumerate(filled)
                for i, slot in zip(blocks, slots, strict=True)
            ]
            if parts:
                self.slot_copy.gather(parts)
            for (blocks, slots), chain in zip(filled, self.chains, strict=True):
                records, size = records + len(blocks), size + len(blocks) * chain.payload_bytes
                self._publish(chain, blocks, slots)
        finally:
            self.context.host.arena.release(*[slot for _, slots in filled for slot in slots])
        if reached > first:
            for chain in self.chains:
                self.tier_manager.write_through(chain, self.first_block + first, self.first_block + reached)
        self.context.counters.add("stored_blocks", records)
        self.context.counters.add("stored_bytes", size)
        self.context.events.add(
            "stored", tier=self.context.host.name, namespace=self.namespace, blocks=records, bytes=size
        )
        self.transfer.settle_run(first, reached, Outcome.DONE)
        return reached

    def _slots(self, first: int, end: int) -> tuple[list[FilledSlots], int]:
        """By group, the blocks that host lacks and a slot for each; and the first block that lacks a slot.

        From that block on, no group gets slots.
        """
        filled: list[FilledSlots] = []
        reached = end
        try:
            for chain in self.chains:
                masks = self.context.index.tier_masks(chain.run(self.first_block + first, self.first_block + reached))
                missing = [first + i for i, mask in enumerate(masks) if not mask & 1]
                slots: list[Slot] = []
                filled.append((missing, slots))
                for worth, alike in groupby(missing, self._uses(chain, missing).__getitem__):
                    wanted = len(list(alike))
                    taken = self.tier_manager.slots(
                        wanted,
                        chain.payload_bytes,
                        self.tenant,
                        before=self.before,
                        worth=worth,
                        shard_key=pack_shard_key(self.namespace, chain.group, chain.shard),
                    )
                    slots += taken
                    if len(taken) < wanted:
                        break
                if len(slots) < len(missing):
                    reached = missing[len(slots)]
            for blocks, slots in filled:
                keep = bisect_left(blocks, reached)
                self.context.host.arena.release(*slots[keep:])
                del blocks[keep:], slots[keep:]
        except BaseException:
            self.context.host.arena.release(*[slot for _, slots in filled for slot in slots])
            raise
        return filled, reached

    def _uses(self, chain: ChainView, missing: Sequence[int]) -> dict[int, int]:
        """By block, its use count, if that decides whether it gets a slot."""
        if self.tier_manager.write_back_queues or not missing:
            return dict.fromkeys(missing, 0)
        first = missing[0]
        uses = self.context.index.uses(chain.run(self.first_block + first, self.first_block + missing[-1] + 1))
        return {i: uses[i - first] for i in missing}

    def _publish(self, chain: ChainView, blocks: list[int], slots: list[Slot]) -> None:
        """Publish these blocks.

        Slots that stay in `slots` are unused: another request stored the same blocks meanwhile.
        """
        numbers = [self.first_block + i for i in blocks]
        addresses, expires_ms = chain.addresses(numbers), self.context.expiry.end_ms(self.ttl_s)
        for slot in slots:
            slot.expires_ms = expires_ms
        published = self.context.host.publish_all(addresses, slots, chain.payload_bytes)
        slots[:] = [slot for slot, new in zip(slots, published, strict=True) if not new]
        for first, end in contiguous_ranges([number for number, new in zip(numbers, published, strict=True) if new]):
            self.context.index.insert_run(chain.run(first, end), chain.parent(first), self.context.host.name)
        self.context.expiry.note([a for a, new in zip(addresses, published, strict=True) if new], expires_ms)

    def _drop(self, first: int, reason: str) -> None:
        host = self.context.host.name
        self.tier_manager.drop(len(self.transfer.outcomes) - first, reason, self.namespace, tier=host)
        if self.chains:
            self.context.miss_explainer.dropped(host, [self.chains[0][self.first_block + first].signature], reason)
        self.transfer.settle_rest(first, Outcome.DROPPED)
