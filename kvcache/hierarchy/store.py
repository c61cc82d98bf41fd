"""One store: full blocks from an engine's pages into host slots, then visible, then offered to the tiers below.

Never waits for room. The first block that finds none ends the store: what follows it could not be found anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvcache.block.address import Address
from kvcache.hierarchy.bypass import BYPASS
from kvcache.hierarchy.flow import Flow
from kvcache.hierarchy.mover import Mover
from kvcache.hierarchy.run import Chained
from kvcache.hierarchy.transfer import BlockTransfer
from kvcache.observe.request import logger, working_for
from kvcache.tier.arena import Slot
from kvcache.tier.tier import Outcome

WINDOW_BYTES = 64 << 20

Filled = tuple[int, int, Address, Slot]  # block counted from the first stored, group, address, slot

_log = logger("kvcache.store")


@dataclass(kw_only=True)
class Store:
    flow: Flow
    request_id: str
    namespace: bytes
    mover: Mover
    chains: Sequence[Chained]  # by group
    rules: Sequence[str]
    first_block: int
    tenant: str
    before: int
    transfer: BlockTransfer

    def run(self) -> None:
        """Never raises: an engine that stores must not fail for a fault of a cache."""
        with working_for(self.request_id):
            try:
                self._run()
            except Exception:  # noqa: BLE001  law: never in the way
                _log.exception("a store failed; its blocks are not kept")
            finally:
                self.transfer.settle_rest(0, Outcome.FAILED)
                self.flow.end_store()

    def _run(self) -> None:
        count = len(self.transfer.outcomes)
        if count and not self._head_is_there():
            self._drop(0, "orphan")
            return
        a_window = max(1, WINDOW_BYTES // sum(chain.payload_bytes for chain in self.chains))
        for first in range(0, count, a_window):
            if self.transfer.cancelled:
                self.transfer.settle_rest(first, Outcome.CANCELLED)
                return
            if self.flow.bypass.stores:
                self._drop(first, BYPASS)
                return
            end = min(count, first + a_window)
            reached = self._window(first, end)
            if reached < end:
                self._drop(reached, "no room")
                return

    def _head_is_there(self) -> bool:
        """A block whose parent nobody has could never be found: keeping it would be waste."""
        return self.first_block == 0 or all(
            rule != "all" or self.flow.index.contains(chain[self.first_block - 1])
            for chain, rule in zip(self.chains, self.rules, strict=True)
        )

    def _window(self, first: int, end: int) -> int:
        """Store these blocks; the first one that found no room."""
        filled: list[Filled] = []
        reached = end
        for i in range(first, end):
            mine = self._slots(i)
            if mine is None:
                reached = i
                break
            filled += mine
        published = 0
        try:
            if filled:
                self.mover.gather([(i, group, slot) for i, group, _, slot in filled])
            for _, group, address, slot in filled:
                if self.flow.host.publish(address, slot, self.chains[group].payload_bytes):
                    self.flow.index.insert(address, self.flow.host.name)
                else:  # another request stored the same block meanwhile
                    self.flow.host.arena.release(slot)
                published += 1
        finally:
            for _, _, _, slot in filled[published:]:
                self.flow.host.arena.release(slot)
        if reached > first:
            for chain in self.chains:
                self.flow.write_through(chain, self.first_block + first, self.first_block + reached)
        size = sum(self.chains[g].payload_bytes for _, g, _, _ in filled)
        self.flow.counters.add("stored_blocks", len(filled))
        self.flow.counters.add("stored_bytes", size)
        self.flow.events.add(
            "stored", tier=self.flow.host.name, namespace=self.namespace, blocks=len(filled), bytes=size
        )
        for i in range(first, reached):
            self.transfer.settle(i, Outcome.DONE)
        return reached

    def _slots(self, i: int) -> list[Filled] | None:
        """A slot for each part of a block that host lacks, or None where there is no room for all of them."""
        mine: list[Filled] = []
        for group, chain in enumerate(self.chains):
            address = chain[self.first_block + i]
            if self.flow.index.contains(address, self.flow.host.name):
                continue
            slot = self.flow.slot(chain.payload_bytes, self.tenant, before=self.before)
            if slot is None:
                for _, _, _, taken in mine:
                    self.flow.host.arena.release(taken)
                return None
            mine.append((i, group, address, slot))
        return mine

    def _drop(self, first: int, reason: str) -> None:
        self.flow.drop(len(self.transfer.outcomes) - first, reason, self.namespace, tier=self.flow.host.name)
        self.transfer.settle_rest(first, Outcome.DROPPED)
