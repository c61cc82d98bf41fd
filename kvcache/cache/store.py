"""One store: full blocks from an engine's pages into host slots, then visible, then offered to the tiers below.

Never waits for room. The first block that finds none ends the store: what follows it could not be found anyway.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from kvcache.block.record import Address
from kvcache.cache.operation import BlockTransfer
from kvcache.cache.slot_copy import Mover, NotMovedError
from kvcache.cache.tier_manager import BYPASS, Flow
from kvcache.index.block_run import Chained, place_of, runs
from kvcache.log import Work, logger, working_for
from kvcache.tier.host.arena import Slot
from kvcache.tier.tier import Outcome

WINDOW_BYTES = 64 << 20

Filled = tuple[list[int], list[Slot]]  # of a group: blocks counted from the first stored, and a slot for each

_log = logger("kvcache.store")


@dataclass(kw_only=True)
class Store:
    flow: Flow
    work: Work
    namespace: bytes
    mover: Mover
    chains: Sequence[Chained]  # by group
    rules: Sequence[str]
    first_block: int
    tenant: str
    before: int
    transfer: BlockTransfer
    ttl_s: float | None = None

    def run(self) -> None:
        """Never raises: an engine that stores must not fail for a fault of a cache."""
        with working_for(self.work):
            try:
                self._run()
            except NotMovedError as error:
                _log.debug("a store ended: %s", error)
            except Exception:  # noqa: BLE001  law: never in the way
                _log.exception("a store failed; its blocks are not kept")
            finally:
                self.transfer.settle_rest(0, Outcome.FAILED)

    def _run(self) -> None:
        count = len(self.transfer.outcomes)
        if count and not self._head_is_there():
            self._drop(0, "orphan")
            return
        step = max(1, WINDOW_BYTES // sum(chain.payload_bytes for chain in self.chains))
        first = 0
        while first < count:
            if self.transfer.cancelled:
                self.transfer.settle_rest(first, Outcome.CANCELLED)
                return
            if self.flow.bypass.stores:
                self._drop(first, BYPASS)
                return
            end = min(count, first + step)
            reached = self._window(first, end)
            if reached < end:
                if step == 1 or len(self.chains) == 1:
                    self._drop(reached, "no room")
                    for chain in self.chains if not self.flow.lanes else ():
                        self.flow.index.refuse(chain.run(self.first_block + reached, self.first_block + count))
                    return
                step = max(1, (end - first) // 2)  # one group may have taken what all of them need
            first = reached

    def _head_is_there(self) -> bool:
        """A block whose parent nobody has could never be found: keeping it would be waste."""
        return all(
            rule != "all" or chain.parent(self.first_block) in (b"", self.namespace) or self._holds_head(chain)
            for chain, rule in zip(self.chains, self.rules, strict=True)
        )

    def _holds_head(self, chain: Chained) -> bool:
        head = Address(self.namespace, chain.parent(self.first_block), b"", chain.group, chain.shard)
        return self.flow.index.contains(head)

    def _window(self, first: int, end: int) -> int:
        """Store these blocks; the first one that found no room."""
        filled, reached = self._slots(first, end)
        size = records = 0
        try:
            moved = [
                (i, group, slot)
                for group, (blocks, slots) in enumerate(filled)
                for i, slot in zip(blocks, slots, strict=True)
            ]
            if moved:
                self.mover.gather(moved)
            for (blocks, slots), chain in zip(filled, self.chains, strict=True):
                records, size = records + len(blocks), size + len(blocks) * chain.payload_bytes
                self._publish(chain, blocks, slots)
        finally:
            self.flow.host.arena.release(*[slot for _, slots in filled for slot in slots])
        if reached > first:
            for chain in self.chains:
                self.flow.write_through(chain, self.first_block + first, self.first_block + reached)
        self.flow.counters.add("stored_blocks", records)
        self.flow.counters.add("stored_bytes", size)
        self.flow.events.add("stored", tier=self.flow.host.name, namespace=self.namespace, blocks=records, bytes=size)
        self.transfer.settle_run(first, reached, Outcome.DONE)
        return reached

    def _slots(self, first: int, end: int) -> tuple[list[Filled], int]:
        """By group, the blocks that host lacks and a slot for each; and the first block for which there is not one for
        every group that needs one: from there on there are none."""
        filled: list[Filled] = []
        reached = end
        try:
            for chain in self.chains:
                masks = self.flow.index.where(chain.run(self.first_block + first, self.first_block + reached))
                lacking = [first + i for i, mask in enumerate(masks) if not mask & 1]
                slots: list[Slot] = []
                filled.append((lacking, slots))
                for worth, alike in groupby(lacking, self._uses(chain, lacking).__getitem__):
                    wanted = len(list(alike))
                    found = self.flow.slots(
                        wanted,
                        chain.payload_bytes,
                        self.tenant,
                        before=self.before,
                        worth=worth,
                        place=place_of(self.namespace, chain.group, chain.shard),
                    )
                    slots += found
                    if len(found) < wanted:
                        break
                if len(slots) < len(lacking):
                    reached = lacking[len(slots)]
            for blocks, slots in filled:
                kept = bisect_left(blocks, reached)
                self.flow.host.arena.release(*slots[kept:])
                del blocks[kept:], slots[kept:]
        except BaseException:
            self.flow.host.arena.release(*[slot for _, slots in filled for slot in slots])
            raise
        return filled, reached

    def _uses(self, chain: Chained, lacking: Sequence[int]) -> dict[int, int]:
        """By block, how often it was used, where that decides whether there is room for it."""
        if self.flow.lanes or not lacking:
            return dict.fromkeys(lacking, 0)
        first = lacking[0]
        uses = self.flow.index.uses(chain.run(self.first_block + first, self.first_block + lacking[-1] + 1))
        return {i: uses[i - first] for i in lacking}

    def _publish(self, chain: Chained, blocks: list[int], slots: list[Slot]) -> None:
        """Make these visible. What stays in `slots` is not needed: another request stored the same block meanwhile."""
        numbers = [self.first_block + i for i in blocks]
        addresses, expires_ms = chain.addresses(numbers), self.flow.expiry.end_ms(self.ttl_s)
        for slot in slots:
            slot.expires_ms = expires_ms
        made = self.flow.host.publish_all(addresses, slots, chain.payload_bytes)
        slots[:] = [slot for slot, new in zip(slots, made, strict=True) if not new]
        for first, end in runs([number for number, new in zip(numbers, made, strict=True) if new]):
            self.flow.index.insert_run(chain.run(first, end), chain.parent(first), self.flow.host.name)
        self.flow.expiry.note([a for a, new in zip(addresses, made, strict=True) if new], expires_ms)

    def _drop(self, first: int, reason: str) -> None:
        host = self.flow.host.name
        self.flow.drop(len(self.transfer.outcomes) - first, reason, self.namespace, tier=host)
        if self.chains:
            self.flow.why.dropped(host, [self.chains[0][self.first_block + first].signature], reason)
        self.transfer.settle_rest(first, Outcome.DROPPED)
