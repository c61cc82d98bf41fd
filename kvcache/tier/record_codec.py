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

from kvcache.block.cipher import CipherKeys, associated_data
from kvcache.block.layout import KVLayout, Shard
from kvcache.block.namespace import Namespace
from kvcache.block.record import (
    ALIGNMENT,
    ENCRYPTION,
    FIXED_BYTES,
    PARENT,
    Address,
    Header,
    expires_ms,
    expiry_field,
    fixed_part,
    header_area,
    new_write_id,
    read_header,
    record_bytes,
    seal,
)
from kvcache.codec.codec import Codec, codec, codecs
from kvcache.errors import ConfigError
from kvcache.observe.metrics import Counters
from kvcache.tier.host.arena import Slot
from kvcache.tier.host.tier import HostRecord, segments
from kvcache.tier.tier import Outcome, Segments

LOSSY_CODECS_FACT = "lossy_codecs"


class RecordCodec:
    """`names`: the codec by tier, `raw` for those that are not named. ConfigError for one that is not there. `keys`:
    what goes down is encrypted, in each tier, and an unencrypted record is foreign unless `accept_unencrypted`."""

    def __init__(
        self,
        names: Mapping[str, str],
        counters: Counters,
        *,
        keys: CipherKeys | None = None,
        accept_unencrypted: bool = False,
    ) -> None:
        self._counters, self._keys, self._plain = counters, keys, keys is None or accept_unencrypted
        self._codecs = codecs()
        self._codec_by_tier: dict[str, Codec] = {}
        for tier, name in names.items():
            try:
                self._codec_by_tier[tier] = codec(name)
            except ConfigError as error:
                raise ConfigError(f"{tier}.{error}") from None
        self._layouts: dict[bytes, KVLayout] = {}

    @property
    def facts(self) -> dict[str, Any]:
        """What a namespace must say of the codecs that its blocks may pass."""
        lossy = sorted({each.name for each in self._codec_by_tier.values() if each.error_bound})
        return {LOSSY_CODECS_FACT: lossy} if lossy else {}

    @property
    def error_bound(self) -> float:
        """The largest error bound of the codecs that a block may pass."""
        return max((each.error_bound for each in self._codec_by_tier.values()), default=0.0)

    def bind(self, namespace: Namespace) -> None:
        """Records of this namespace will come; ConfigError where a tier's codec cannot serve its layout."""
        for tier, each in self._codec_by_tier.items():
            try:
                each.check(namespace.layout)
            except ConfigError as error:
                raise ConfigError(f"{tier}.{error}") from None
        self._layouts[namespace.id] = namespace.layout

    def unbind(self, namespace: bytes) -> None:
        """No more will come. What is on its way down is written as it is."""
        self._layouts.pop(namespace, None)

    def is_obsolete(self, header: Header) -> bool:
        """A record from before there were keys, which nobody reads any more and anybody can."""
        return not self._plain and ENCRYPTION not in header.fields

    def requires_prefix(self, address: Address) -> bool:
        """Whether a block of this group is of use only with all blocks before it, as far as that is known."""
        layout = self._layouts.get(address.namespace)
        return layout is None or layout.groups[address.group].rule == "all"

    def stored_bytes(self, tier: str, layout: KVLayout, group: int, shard: Shard) -> int:
        """What a record takes in a tier, at most: where sizes vary, as if nothing were saved."""
        made, whole = self._codec_by_tier.get(tier), layout.block_bytes(shard, group=group)
        if made is None or made.name == "raw" or made.varies:
            return record_bytes(whole)
        stored = made.encode(memoryview(bytes(whole)), layout, group, shard)
        return record_bytes(whole) if stored is None else slot_bytes(header_area(whole) + len(stored), made.varies)

    def codec_of(self, tier: str) -> str:
        return self._codec_by_tier[tier].name if tier in self._codec_by_tier else "raw"

    def encode(self, held: HostRecord, tier: str) -> Segments | None:
        """The record as the tier keeps it, sealed, in memory of its own. None: as it stands in its slot, since nothing
        is encrypted and the codec is `raw`, leaves this payload alone, or saves nothing. The caller has a reference."""
        made, address, whole = self._codec_by_tier.get(tier), held.address, held.payload_bytes
        payload = segments(held)[1][:whole]
        codec, stored, size = "raw", None, record_bytes(whole)
        layout = self._layouts.get(address.namespace)
        if made is not None and made.name != "raw" and layout is not None:
            stored = made.encode(payload, layout, address.group, address.shard)
            smaller = slot_bytes(header_area(whole) + len(stored), made.varies) if stored is not None else size
            if smaller >= size:
                stored = None
            self._counters.add("encoded_bytes", whole, tier=tier, codec="raw" if stored is None else made.name)
            if stored is not None:
                self._counters.add("encoded_stored_bytes", len(stored), tier=tier, codec=made.name)
                codec, size = made.name, smaller
        if stored is None and self._keys is None:
            return None
        record, area = _aligned(size), header_area(whole)
        end = area + (whole if stored is None else len(stored))
        record[area:end] = payload if stored is None else stored
        record[end:] = bytes(len(record) - end)
        self._seal(record[:area], record[area:end], held, codec)
        return record[:area], record[area:]

    def _seal(self, header: memoryview, body: memoryview, held: HostRecord, codec: str) -> None:
        """Encrypt a payload where that is asked for, and write the header: checksums are of what is stored."""
        address, whole, write_id = held.address, held.payload_bytes, new_write_id()
        fields = expiry_field(held.slot.expires_ms)
        if self._keys is not None:
            known = {**fields, PARENT: address.parent} if address.parent else fields
            bound = associated_data(fixed_part(address, codec, len(body), whole, write_id), known)
            fields[ENCRYPTION] = self._keys.encrypt(body, bound)
        seal(
            header,
            body,
            address,
            stored_bytes=len(body),
            decoded_bytes=whole,
            codec=codec,
            write_id=write_id,
            fields=fields,
        )

    def decode(self, address: Address, slot: Slot, payload_bytes: int) -> Outcome:
        """Make the payload of a record that a tier read into a slot, and verified, in place. DONE, or DAMAGED or
        FOREIGN, which leave the slot undefined."""
        area = header_area(payload_bytes)
        header = read_header(slot.view[:area])
        if header.codec not in self._codecs:
            return Outcome.INCOMPATIBLE
        if header.decoded_bytes != payload_bytes or header.stored_bytes > payload_bytes:
            return Outcome.DAMAGED
        payload = slot.view[area : area + payload_bytes]
        slot.sealed, slot.expires_ms = header.codec == "raw", expires_ms(header.fields)
        if ENCRYPTION in header.fields:
            slot.sealed = False
            if self._keys is None or not self._keys.can_decrypt(header):
                return Outcome.INCOMPATIBLE
            bound = associated_data(bytes(slot.view[:FIXED_BYTES]), header.fields)
            if not self._keys.decrypt(payload[: header.stored_bytes], header, bound):
                return Outcome.DAMAGED
        elif not self._plain:  # anybody can write one, or take the field from one that was encrypted
            return Outcome.INCOMPATIBLE
        if header.codec == "raw":
            return Outcome.DONE if header.stored_bytes == payload_bytes else Outcome.DAMAGED
        stored = memoryview(bytes(payload[: header.stored_bytes]))  # decoding writes where it lies
        layout = self._layouts.get(address.namespace)
        if layout is None:  # nobody has it bound, and so nobody waits for it
            return Outcome.INCOMPATIBLE
        try:
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
