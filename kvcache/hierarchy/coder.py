"""Records as the tiers below host keep them: encoded on the way down, decoded on the way up.

A record names the codec that made it, so a tier may hold records of several: what `raw` and `zstd` made is read
whichever of them the settings name now. What passed a lossy codec is another matter: a caller who asked for the bytes
that he stored must not meet it, in any tier, later, or from another process. So a lossy codec is a fact of the
namespace, and with another choice of codec everything has other keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kvcache.block.address import Address
from kvcache.block.layout import KVLayout, Shard
from kvcache.block.namespace import Namespace
from kvcache.block.record import ALIGNMENT, header_area, read_header, record_bytes, seal
from kvcache.codec.codec import Codec, codec, codecs
from kvcache.errors import ConfigError
from kvcache.observe.metrics import Counters
from kvcache.tier.arena import Slot
from kvcache.tier.host import Held, segments
from kvcache.tier.tier import Outcome, Segments

FACT = "lossy_codecs"


class Coder:
    """`names`: the codec by tier, `raw` for those that are not named. ConfigError for one that is not there."""

    def __init__(self, names: Mapping[str, str], counters: Counters) -> None:
        self._counters = counters
        self._codecs = codecs()
        self._of_tier: dict[str, Codec] = {}
        for tier, name in names.items():
            try:
                self._of_tier[tier] = codec(name)
            except ConfigError as error:
                raise ConfigError(f"{tier}.{error}") from None
        self._layouts: dict[bytes, KVLayout] = {}

    @property
    def facts(self) -> dict[str, Any]:
        """What a namespace must say of the codecs that its blocks may pass."""
        lossy = sorted({each.name for each in self._of_tier.values() if each.error_bound})
        return {FACT: lossy} if lossy else {}

    @property
    def loss(self) -> float:
        """The largest error bound of the codecs that a block may pass."""
        return max((each.error_bound for each in self._of_tier.values()), default=0.0)

    def bind(self, namespace: Namespace) -> None:
        """Records of this namespace will come; ConfigError where a tier's codec cannot serve its layout."""
        for tier, each in self._of_tier.items():
            try:
                each.check(namespace.layout)
            except ConfigError as error:
                raise ConfigError(f"{tier}.{error}") from None
        self._layouts[namespace.id] = namespace.layout

    def needs_heads(self, address: Address) -> bool:
        """Whether a block of this group is of use only with all blocks before it."""
        return self._layouts[address.namespace].groups[address.group].rule == "all"

    def stored_bytes(self, tier: str, layout: KVLayout, group: int, shard: Shard) -> int:
        """What a record takes in a tier, at most: where sizes vary, as if nothing were saved."""
        made, whole = self._of_tier.get(tier), layout.block_bytes(shard, group=group)
        if made is None or made.name == "raw" or made.varies:
            return record_bytes(whole)
        stored = made.encode(memoryview(bytes(whole)), layout, group, shard)
        return record_bytes(whole) if stored is None else slot_bytes(header_area(whole) + len(stored), made.varies)

    def codec_of(self, tier: str) -> str:
        return self._of_tier[tier].name if tier in self._of_tier else "raw"

    def encoded(self, held: Held, tier: str) -> Segments | None:
        """The record as the tier keeps it, sealed, in memory of its own. None: as it stands in its slot, since the
        codec is `raw`, leaves this payload alone, or saves nothing. The caller has a reference."""
        made, address, whole = self._of_tier.get(tier), held.address, held.payload_bytes
        if made is None or made.name == "raw":
            return None
        area = header_area(whole)
        payload = segments(held)[1][:whole]
        stored = made.encode(payload, self._layouts[address.namespace], address.group, address.shard)
        if stored is not None and slot_bytes(area + len(stored), made.varies) >= record_bytes(whole):
            stored = None
        self._counters.add("encoded_bytes", whole, tier=tier, codec="raw" if stored is None else made.name)
        if stored is None:
            return None
        self._counters.add("encoded_stored_bytes", len(stored), tier=tier, codec=made.name)
        record = _aligned(slot_bytes(area + len(stored), made.varies))
        end = area + len(stored)
        record[area:end] = stored
        record[end:] = bytes(len(record) - end)
        header, body = record[:area], record[area:]
        seal(header, body, address, stored_bytes=len(stored), decoded_bytes=whole, codec=made.name)
        return header, body

    def decode(self, address: Address, slot: Slot, payload_bytes: int) -> Outcome:
        """Make the payload of a record that a tier read into a slot, and verified, in place. DONE, or DAMAGED or
        FOREIGN, which leave the slot undefined."""
        area = header_area(payload_bytes)
        header = read_header(slot.view[:area])
        if header.codec not in self._codecs:
            return Outcome.FOREIGN
        if header.decoded_bytes != payload_bytes:
            return Outcome.DAMAGED
        payload = slot.view[area : area + payload_bytes]
        slot.sealed = header.codec == "raw"
        if slot.sealed:
            return Outcome.DONE if header.stored_bytes == payload_bytes else Outcome.DAMAGED
        stored = memoryview(bytes(payload[: header.stored_bytes]))  # decoding writes where it lies
        try:
            layout = self._layouts[address.namespace]
            self._codecs[header.codec].decode(stored, payload, layout, address.group, address.shard)
        except ValueError:
            return Outcome.DAMAGED
        return Outcome.DONE


def slot_bytes(used_bytes: int, varies: bool) -> int:
    """Bytes of a record in whole pages; where sizes vary, in one of eight sizes from a power of two to the next, so
    that a tier with slots of one size a segment needs few kinds of segments."""
    step = ALIGNMENT
    if varies:
        step = max(step, 1 << max(0, used_bytes.bit_length() - 4))
    return -(-used_bytes // step) * step


def _aligned(size_bytes: int) -> memoryview:
    """Memory on a page boundary, as direct writes want it."""
    memory = np.empty(size_bytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size_bytes].data
