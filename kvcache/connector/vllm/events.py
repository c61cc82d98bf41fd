"""KV events: reports to routers which tier has which blocks, through vLLM's own publisher.

The cache reports stored and removed blocks by signature. The publisher adds vLLM's hash, its parent, its tokens and a
medium, so that an event needs no other context. Blocks that no request of this engine has named are not reported.
Engines that share a store each report the blocks that they have seen.

The table is bounded: beyond `MAX_NAMED_BLOCKS` the oldest blocks are reported as removed. Where the cache reports lost
changes, all blocks are.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from time import monotonic
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvcache.cache.api import NamespaceHandle, SupportsKVEvents
from kvcache.connector.guard import call_guarded, recover
from kvcache.connector.vllm.kv_layout import ModelIdentity
from kvcache.index.kv_events import KVEvent
from kvcache.log import log_faults

POLL_INTERVAL_S = 0.05
MAX_NAMED_BLOCKS = 1 << 17
LINGER_S = 1.0
"""How long after a store the engine keeps making empty steps. vLLM publishes with a step, and the result of the store
has to be reported even when no request arrives."""

TIER_MEDIA = {"host": ("CPU", "LOCAL"), "nvme": ("STORAGE", "LOCAL")}
REMOTE_MEDIUM = ("STORAGE", "REMOTE")

_log = logging.getLogger("kvcache.connector.vllm")


@dataclass(slots=True)
class EventBlock:
    """A block as a router knows it."""

    hash: bytes
    parent: bytes | None
    tokens: NDArray[np.uint32]
    lora: tuple[int, str] | None
    extra: tuple[Any, ...] | None
    parts_by_tier: dict[str, int] = field(default_factory=dict)  # tier: bit set of the model's parts in it


class EventFactory(Protocol):
    """The functions that depend on vLLM's version; `version.py` implements them."""

    def event(self, kind: str, **fields: Any) -> Any: ...
    def event_hash(self, block_hash: bytes) -> int | bytes: ...
    def event_keys(self, request: Any, first_token: int, end_token: int) -> tuple[Any, ...] | None: ...


class KVEventPublisher:
    """Collects events for vLLM.

    Thread safety: `name_blocks` and `drain` run on the scheduler's thread. A separate thread polls the cache.
    """

    def __init__(
        self, cache: SupportsKVEvents, event_factory: EventFactory, most_blocks: int = MAX_NAMED_BLOCKS
    ) -> None:
        self._cache, self._event_factory, self._most = cache, event_factory, most_blocks
        self._known: OrderedDict[bytes, EventBlock] = OrderedDict()
        self._parts: dict[tuple[int, tuple[int, int, int, int]], int] = {}  # (group, shard): its bit
        self._groups: dict[int, int] = {}  # vLLM's group: all its bits
        self._block_tokens = 0
        self._namespaces: list[NamespaceHandle] = []
        self._ready: deque[Any] = deque()
        self._busy_until = 0.0
        self._lock = threading.Lock()
        self._polling = threading.Lock()
        self._end = threading.Event()
        self._next: int | None = None
        call_guarded(None, self.poll)  # from here on, so that an early store is reported
        self._thread = threading.Thread(target=self._run, name="kvcache-events", daemon=True)
        self._thread.start()

    # The scheduler's thread

    def subscribe(self, model: ModelIdentity, handle: NamespaceHandle) -> None:
        """Report the blocks of this namespace too."""
        with self._lock:
            self._block_tokens = model.layout.block_tokens
            for held in model.shards.values():
                for group, s in enumerate(held):
                    part = (group, (s.first_layer, s.end_layer, s.first_head, s.end_head))
                    bit = self._parts.setdefault(part, 1 << len(self._parts))
                    self._groups[model.vllm_groups[group]] = self._groups.get(model.vllm_groups[group], 0) | bit
            self._namespaces.append(handle)

    def unsubscribe(self, handle: NamespaceHandle) -> None:
        """Stop reporting the blocks of this namespace."""
        with self._lock:
            self._namespaces = [other for other in self._namespaces if other is not handle]

    def name_blocks(
        self, handle: NamespaceHandle, request: Any, digests: Sequence[bytes], first: int, hashes_a_block: int
    ) -> None:
        """Name these blocks of a request, from block `first` on. Never raises: unnamed blocks are not reported, and the
        request continues."""
        with log_faults(_log, "blocks were not published: request=%s", getattr(request, "request_id", "")):
            self._name(handle, request, digests, first, hashes_a_block)

    def _name(
        self, handle: NamespaceHandle, request: Any, digests: Sequence[bytes], first: int, hashes_a_block: int
    ) -> None:
        size, ids = self._block_tokens, request.all_token_ids
        lora = request.lora_request
        adapter = None if lora is None else (lora.adapter_id, lora.lora_name)
        with self._lock:
            for i, digest in enumerate(digests, first):
                signature = handle.event_signature(sha256(handle.id + digest).digest())
                if signature in self._known:
                    self._known.move_to_end(signature)
                    continue
                self._known[signature] = EventBlock(
                    bytes(request.block_hashes[(i + 1) * hashes_a_block - 1]),
                    bytes(request.block_hashes[i * hashes_a_block - 1]) if i else None,
                    np.asarray(ids[i * size : (i + 1) * size], np.uint32),
                    adapter,
                    self._event_factory.event_keys(request, i * size, (i + 1) * size),
                )
            while len(self._known) > self._most:
                self._on_dropped([self._known.popitem(last=False)[1]])
            self._busy_until = monotonic() + LINGER_S

    def drain(self) -> list[Any]:
        with self._lock:
            events = list(self._ready)
            self._ready.clear()
        return events

    @property
    def pending(self) -> bool:
        """Return whether events are ready, or may be soon."""
        return bool(self._ready) or monotonic() < self._busy_until

    def forget(self) -> None:
        """Report all blocks as removed, after a reset: this engine will not find them again."""
        with self._lock:
            self._on_dropped(list(self._known.values()))
            self._known.clear()
            self._namespaces.clear()

    def close(self) -> None:
        self._end.set()
        self._thread.join(POLL_INTERVAL_S * 20)

    # The polling thread

    def _run(self) -> None:
        while True:
            recover(self.poll, lambda error: _log.debug("KV events are not available: cause=%s", error))
            if self._end.wait(POLL_INTERVAL_S):
                return

    def poll(self) -> None:
        """Apply all changes that the cache has recorded."""
        with self._polling:
            while True:
                batch = self._cache.kv_events(self._next, list(self._namespaces))
                self.apply_changes(batch.kv_events, lost=batch.lost)
                before, self._next = self._next, batch.next
                if not batch.kv_events or batch.next == before:
                    return

    def apply_changes(self, kv_events: Iterable[KVEvent], *, lost: bool = False) -> None:
        with self._lock:
            if lost:
                self._on_dropped(list(self._known.values()))
            for change in kv_events:
                bit = self._parts.get((change.group, change.shard))
                blocks = [self._known[s] for s in change.each if s in self._known]
                if bit is None or not blocks:
                    continue
                if change.kind == "stored":
                    self._on_stored(change.tier, blocks, bit)
                else:
                    self._on_removed(change.tier, blocks, bit)
                    for signature in change.each:  # first to be forgotten, though it may be stored again already
                        if signature in self._known and not self._known[signature].parts_by_tier:
                            self._known.move_to_end(signature, last=False)

    def _on_stored(self, tier: str, blocks: Sequence[EventBlock], bit: int) -> None:
        new: dict[int, list[EventBlock]] = {}
        for block in blocks:
            before = block.parts_by_tier.get(tier, 0)
            block.parts_by_tier[tier] = now = before | bit
            for group, whole in self._groups.items():
                if now & whole == whole != before & whole:
                    new.setdefault(group, []).append(block)
        for group, whole_blocks in new.items():
            for run in _chain_runs(whole_blocks):
                self._ready.append(self._stored(tier, group, run))

    def _on_removed(self, tier: str, blocks: Sequence[EventBlock], bit: int) -> None:
        removed: dict[int, list[bytes]] = {}
        for block in blocks:
            before = block.parts_by_tier.get(tier, 0)
            now = before & ~bit
            if now:
                block.parts_by_tier[tier] = now
            else:
                block.parts_by_tier.pop(tier, None)
            for group, whole in self._groups.items():
                if before & whole == whole != now & whole:
                    removed.setdefault(group, []).append(block.hash)
        self._ready.extend(self._removed(tier, group, hashes) for group, hashes in removed.items())

    def _on_dropped(self, blocks: Iterable[EventBlock]) -> None:
        removed: dict[tuple[str, int], list[bytes]] = {}
        for block in blocks:
            for tier, bits in block.parts_by_tier.items():
                for group, whole in self._groups.items():
                    if bits & whole == whole:
                        removed.setdefault((tier, group), []).append(block.hash)
            block.parts_by_tier.clear()
        self._ready.extend(self._removed(tier, group, hashes) for (tier, group), hashes in removed.items())

    def _stored(self, tier: str, group: int, blocks: Sequence[EventBlock]) -> Any:
        medium, locality = TIER_MEDIA.get(tier, REMOTE_MEDIUM)
        first = blocks[0]
        extra = [block.extra for block in blocks]
        return self._event_factory.event(
            "BlockStored",
            block_hashes=[self._event_factory.event_hash(block.hash) for block in blocks],
            parent_block_hash=None if first.parent is None else self._event_factory.event_hash(first.parent),
            token_ids=[int(t) for block in blocks for t in block.tokens],
            block_size=self._block_tokens,
            lora_id=first.lora[0] if first.lora else None,
            lora_name=first.lora[1] if first.lora else None,
            medium=medium,
            extra_keys=extra if any(extra) else None,
            group_idx=group,
            locality=locality,
            ownership=f"kvcache {tier}",
        )

    def _removed(self, tier: str, group: int, hashes: Iterable[bytes]) -> Any:
        medium, locality = TIER_MEDIA.get(tier, REMOTE_MEDIUM)
        return self._event_factory.event(
            "BlockRemoved",
            block_hashes=[self._event_factory.event_hash(h) for h in hashes],
            medium=medium,
            group_idx=group,
            locality=locality,
            ownership=f"kvcache {tier}",
        )


def _chain_runs(blocks: Sequence[EventBlock]) -> Iterator[list[EventBlock]]:
    """Yield runs of blocks of one adapter, each block the parent of the next."""
    run: list[EventBlock] = []
    for block in blocks:
        if run and (block.parent != run[-1].hash or block.lora != run[-1].lora):
            yield run
            run = []
        run.append(block)
    if run:
        yield run
