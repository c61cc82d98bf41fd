"""An operator's order that a prefix be kept: bounded, and with an end.

A pin holds the blocks of a prefix that are there when it is made, each in the tiers that have it, as a request would;
all pins together hold at most an eighth of each tier. It ends at its time, by `unpin`, or with the process.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvcache.block.key import SIGNATURE_BYTES
from kvcache.errors import ConfigError
from kvcache.hierarchy.holds import Holds
from kvcache.hierarchy.index import Index
from kvcache.hierarchy.prefix import wanted
from kvcache.hierarchy.run import Run
from kvcache.port import Clock
from kvcache.tier.tier import Tier

if TYPE_CHECKING:
    from kvcache.hierarchy.request import BoundCache

SHARE = 8
PINS = 64
LONGEST_S = 30 * 86_400.0


@dataclass(slots=True)
class Pin:
    """`blocks` of `wanted` blocks are held: the rest was not there, or there was no more room for pins."""

    id: int
    namespace: bytes
    signature: bytes  # of the last block that was asked for
    blocks: int
    wanted: int
    block_tokens: int
    by_tier: Mapping[str, int]
    ends: float  # seconds since 1970
    until: float  # the same by the port's clock
    claim: Holds.Claim = field(default_factory=list)

    def told(self) -> dict[str, Any]:
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
    """Thread-safe. What has ended is let go when a request begins or somebody asks: nothing leaves before then."""

    def __init__(self, index: Index, tiers: Sequence[Tier], clock: Clock) -> None:
        self._index, self._clock = index, clock
        self._holds = Holds(index, tiers, share=SHARE)
        self._pins: dict[int, Pin] = {}
        self._ids = itertools.count(1)
        self._next = float("inf")  # when the first of them ends
        self._lock = threading.Lock()

    def pin(self, bound: BoundCache, packed: bytes, seconds: float) -> Pin:
        """Hold what is there of these blocks. ConfigError where that is nothing, or there are too many pins."""
        if not 0 < seconds <= LONGEST_S:
            raise ConfigError(f"a pin of {seconds:g} s: expected more than 0 and at most {LONGEST_S:.0f} (30 days)")
        self.sweep()
        lookup = self._index.lookup(bound.names, bound.needs)
        lookup.match(packed)
        found = lookup.blocks
        need = wanted(bound.layout, found)
        runs = [
            (Run(place.name, packed).part(need[place.group].start, found), place.payload_bytes)
            for place in bound.everywhere
        ]
        with self._lock:
            if len(self._pins) >= PINS:
                raise ConfigError(f"{PINS} prefixes are pinned, and no more can be: `kvcache unpin` one")
            claim = self._holds.take(runs)
            held = self._whole(claim, runs, found)
            if not held:
                self._holds.give_back(claim)
                raise ConfigError(
                    "nothing of this prefix is there to be kept"
                    if not found
                    else f"no room for it: pins keep at most 1/{SHARE} of each tier; `kvcache unpin` one"
                )
            tokens = bound.layout.block_tokens
            made = Pin(
                next(self._ids),
                bound.id,
                packed[-SIGNATURE_BYTES:],
                held,
                len(packed) // SIGNATURE_BYTES,
                tokens,
                lookup.by_tier if held == found else dict(zip(self._index.tiers, claim[0][1], strict=True)),
                self._clock.wall() + seconds,
                self._clock.now() + seconds,
                claim,
            )
            self._pins[made.id] = made
            self._next = min(self._next, made.until)
        return made

    @staticmethod
    def _whole(claim: Holds.Claim, runs: Sequence[tuple[Run, int]], found: int) -> int:
        """Of so many blocks, those of which every part is held; where there are several parts, all or none."""
        held = [sum(blocks) for _, blocks, _ in claim]
        if held == [run.blocks for run, _ in runs]:
            return found
        return held[0] if len(runs) == 1 and held and runs[0][0].blocks == found else 0

    def unpin(self, id: int) -> bool:
        """False where there is no such pin, any more."""
        with self._lock:
            pin = self._pins.pop(id, None)
            if pin is not None:
                self._holds.give_back(pin.claim)
            return pin is not None

    def sweep(self) -> None:
        """Let go of those whose time is over."""
        now = self._clock.now()
        if now < self._next:
            return
        with self._lock:
            for pin in [pin for pin in self._pins.values() if pin.until <= now]:
                self._holds.give_back(self._pins.pop(pin.id).claim)
            self._next = min((pin.until for pin in self._pins.values()), default=float("inf"))

    def all(self) -> list[Pin]:
        self.sweep()
        with self._lock:
            return list(self._pins.values())

    def held_bytes(self) -> dict[str, int]:
        self.sweep()
        return self._holds.held_bytes()
