"""Pins: an operator's claims on prefixes, bounded and with an end.

A pin holds the blocks of a prefix that are cached when it is made, in the tiers that have them, as a request does. All
pins together hold at most an eighth of each tier. A pin ends at its time, by `unpin`, or with the process. In a
handover the next process continues it for the blocks that it has.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvcache.block.chain import SIGNATURE_BYTES
from kvcache.block.layout import KVLayout
from kvcache.block.record import record_bytes
from kvcache.cache.holds import Holds
from kvcache.errors import ConfigError
from kvcache.index.block_run import BlockRun, ShardRef, wanted
from kvcache.index.index import Index
from kvcache.log import logger
from kvcache.os_env import Clock
from kvcache.tier.tier import Tier

PIN_DIVISOR = 8
MAX_PINS = 64
MAX_PIN_S = 30 * 86_400.0

_log = logger("kvcache.pins")


class PinnedNamespace(Protocol):
    """The part of a bound namespace that a pin reads."""

    @property
    def id(self) -> bytes: ...
    @property
    def layout(self) -> KVLayout: ...
    @property
    def shard_keys(self) -> Sequence[bytes]: ...
    @property
    def needs(self) -> Sequence[int]: ...
    @property
    def all_shards(self) -> Sequence[ShardRef]: ...


@dataclass(slots=True)
class Pin:
    """One pin. It holds `blocks` of `wanted` blocks: the rest was not cached, or exceeded the limit on pins."""

    id: int
    namespace: bytes
    signature: bytes  # of the last requested block
    blocks: int
    wanted: int
    block_tokens: int
    runs: Sequence[tuple[BlockRun, int]]  # each with the bytes of a payload
    by_tier: Mapping[str, int]
    ends: float  # seconds since 1970
    until: float  # the same on the clock of `OsEnv`
    claim: Holds.Claim = field(default_factory=list)

    def describe(self) -> dict[str, Any]:
        return {
            "pin": self.id,
            "namespace": self.namespace.hex(),
            "prefix": self.signature[:8].hex(),
            "tokens": self.blocks * self.block_tokens,
            "wanted_tokens": self.wanted * self.block_tokens,
            "by_tier": {tier: blocks * self.block_tokens for tier, blocks in self.by_tier.items()},
            "ends": self.ends,
        }


class Pins:
    """The pins of a cache. Expired pins are released when a request begins or a call reads the pins, not before.

    Thread safety: any thread.
    """

    def __init__(self, index: Index, tiers: Sequence[Tier], clock: Clock) -> None:
        self._index, self._clock = index, clock
        self._holds = Holds(index, tiers, share=PIN_DIVISOR)
        self._pins: dict[int, Pin] = {}
        self.last = 0
        """The last pin number. Numbers are never reused, not even by later processes."""
        self._next = float("inf")  # when the first pin ends
        self._lock = threading.Lock()

    def check(self, seconds: float) -> None:
        """Raise ConfigError if the duration is invalid or there are too many pins."""
        if not 0 < seconds <= MAX_PIN_S:
            raise ConfigError(f"a pin of {seconds:g} s: expected more than 0 and at most {MAX_PIN_S:.0f} (30 days)")
        self.sweep()
        self._check_number()

    def _check_number(self) -> None:
        if len(self._pins) >= MAX_PINS:
            raise ConfigError(f"{MAX_PINS} prefixes are pinned, the limit: `kvcache unpin` one")

    def pinnable_blocks(self, handle: PinnedNamespace, blocks: int) -> int:
        """Of this many leading blocks, those whose records pins can all hold in host memory."""
        sizes = [(ref.group, record_bytes(ref.payload_bytes)) for ref in handle.all_shards]

        def size(blocks: int) -> int:
            need = wanted(handle.layout, blocks)
            return sum(len(need[group]) * size for group, size in sizes)

        self.sweep()
        return bisect_right(range(1, blocks + 1), self._holds.holdable_bytes()[self._index.tiers[0]], key=size)

    def pin(self, handle: PinnedNamespace, packed: bytes, seconds: float) -> Pin:
        """Hold the cached blocks of this prefix.

        Raises:
            ConfigError: none is cached, none fits, or as `check`.
        """
        self.check(seconds)
        lookup = self._index.lookup(handle.shard_keys, handle.needs)
        lookup.match(packed)
        found = lookup.blocks
        need = wanted(handle.layout, found)
        runs = [
            (BlockRun(ref.key, packed).part(need[ref.group].start, found), ref.payload_bytes)
            for ref in handle.all_shards
        ]
        with self._lock:
            self._check_number()
            made = Pin(
                self.last + 1,
                handle.id,
                packed[-SIGNATURE_BYTES:],
                found,
                len(packed) // SIGNATURE_BYTES,
                handle.layout.block_tokens,
                runs,
                lookup.by_tier,
                self._clock.wall() + seconds,
                self._clock.now() + seconds,
            )
            if not self._keep(made):
                raise ConfigError(
                    "no block of this prefix is cached"
                    if not found
                    else f"no capacity: pins hold at most 1/{PIN_DIVISOR} of each tier; `kvcache unpin` one"
                )
        return made

    def _keep(self, pin: Pin) -> bool:
        """Hold the blocks that fit. False if none does."""
        pin.claim = self._holds.take(pin.runs)
        held = self._whole(pin.claim, pin.runs, pin.blocks)
        if not held:
            self._holds.release(pin.claim)
            return False
        if held < pin.blocks or not pin.by_tier:
            pin.by_tier = {tier: count for tier, count in zip(self._index.tiers, pin.claim[0][1], strict=True) if count}
        pin.blocks = held
        self._pins[pin.id], self.last = pin, max(self.last, pin.id)
        self._next = min(self._next, pin.until)
        return True

    @staticmethod
    def _whole(claim: Holds.Claim, runs: Sequence[tuple[BlockRun, int]], found: int) -> int:
        """Of the found blocks, those held with every part; with several parts, all or none."""
        held = [sum(blocks) for _, blocks, _ in claim]
        if held == [run.blocks for run, _ in runs]:
            return found
        return held[0] if len(runs) == 1 and held and runs[0][0].blocks == found else 0

    def unpin(self, id: int) -> bool:
        """Remove a pin. False if there is none with this id."""
        with self._lock:
            pin = self._pins.pop(id, None)
            if pin is not None:
                self._holds.release(pin.claim)
            return pin is not None

    def sweep(self) -> None:
        """Release expired pins."""
        now = self._clock.now()
        if now < self._next:
            return
        with self._lock:
            for pin in [pin for pin in self._pins.values() if pin.until <= now]:
                self._holds.release(self._pins.pop(pin.id).claim)
            self._next = min((pin.until for pin in self._pins.values()), default=float("inf"))

    def all(self) -> list[Pin]:
        self.sweep()
        with self._lock:
            return list(self._pins.values())

    def held(self) -> set[BlockRun]:
        """Runs of one block each, for all pinned blocks."""
        with self._lock:
            runs = [run for pin in self._pins.values() for run, _, _ in pin.claim]
        return {
            BlockRun(run.shard_key, bytes(run.part(i, i + 1).signatures)) for run in runs for i in range(run.blocks)
        }

    def export(self) -> list[dict[str, Any]]:
        """The pins, for the next process."""
        self.sweep()
        with self._lock:
            return [
                {
                    "pin": pin.id,
                    "namespace": pin.namespace,
                    "signature": pin.signature,
                    "blocks": pin.blocks,
                    "wanted": pin.wanted,
                    "block_tokens": pin.block_tokens,
                    "ends": pin.ends,
                    "runs": [
                        [run.shard_key, bytes(run.signatures), payload_bytes]
                        for (run, _, _), (_, payload_bytes) in zip(pin.claim, pin.runs, strict=True)
                    ],
                }
                for pin in self._pins.values()
            ]

    def resume_after(self, last: int) -> None:
        """Continue numbering after this number."""
        with self._lock:
            self.last = max(self.last, last)

    def restore(self, exported: Mapping[str, Any]) -> None:
        """Continue a pin of the previous process with the blocks that are cached, unless it has ended.

        Blocks that are missing are logged.

        Raises:
            Exception: of any type, if the data is invalid.
        """
        numbers = [exported[name] for name in ("pin", "blocks", "wanted", "block_tokens")]
        runs = [
            (BlockRun(shard_key, signatures), payload_bytes)
            for shard_key, signatures, payload_bytes in exported["runs"]
        ]
        sizes = [payload_bytes for _, payload_bytes in runs]
        if any(type(number) is not int or number < 1 for number in (*numbers, *sizes)) or not runs:
            raise ValueError(f"a pin of {numbers}, payloads of {sizes}")
        number, blocks, requested, tokens = numbers
        namespace_id, signature = bytes(exported["namespace"]), bytes(exported["signature"])
        seconds = float(exported["ends"]) - self._clock.wall()
        with self._lock:
            self.last = max(self.last, number)
            if not 0 < seconds <= MAX_PIN_S:
                return
            until = self._clock.now() + seconds
            pin = Pin(
                number, namespace_id, signature, blocks, requested, tokens, runs, {}, float(exported["ends"]), until
            )
            fits = number not in self._pins and len(self._pins) < MAX_PINS
            held_blocks = pin.blocks if fits and self._keep(pin) else 0
        if held_blocks < blocks:
            continued, pinned = held_blocks * tokens, blocks * tokens
            _log.warning("pin %d: previous process held %d tokens, %d continue", number, pinned, continued)

    def held_bytes(self) -> dict[str, int]:
        self.sweep()
        return self._holds.held_bytes()
