"""Encodes records for the NVMe, Redis and object tiers and decodes them after a read: codec and encryption.

A record names its codec, so a tier may hold records of several codecs. A record of `raw` or `zstd` is readable
whichever of them the settings name now. A lossy codec is different: a caller that stored exact bytes must never read
lossy ones, from any tier, at a later time, or from another process. So a lossy codec is a fact of the namespace, and
another choice of codec gives every block another key.
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
    """Encodes and decodes records by tier.

    Args:
        names: the codec of each tier; `raw` for the others.
        keys: with keys, records are encrypted in every lower tier, and an unencrypted record is incompatible.
        accept_unencrypted: read unencrypted records even with keys.

    Raises:
        ConfigError: a codec does not exist.
    """

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
        """The namespace facts for the codecs that its blocks may pass."""
        lossy = sorted({each.name for each in self._codec_by_tier.values() if each.error_bound})
        return {LOSSY_CODECS_FACT: lossy} if lossy else {}

    @property
    def error_bound(self) -> float:
        """The largest error bound of the codecs that a block may pass."""
        return max((each.error_bound for each in self._codec_by_tier.values()), default=0.0)

    def bind(self, namespace: Namespace) -> None:
        """Register a namespace.

        Raises:
            ConfigError: a tier's codec cannot encode its layout.
        """
        for tier, each in self._codec_by_tier.items():
            try:
                each.check(namespace.layout)
            except ConfigError as error:
                raise ConfigError(f"{tier}.{error}") from None
        self._layouts[namespace.id] = namespace.layout

    def unbind(self, namespace: bytes) -> None:
        """Unregister a namespace. Its records that wait to be written are written without a codec."""
        self._layouts.pop(namespace, None)

    def is_obsolete(self, header: Header) -> bool:
        """Return whether a record predates encryption: it is never read, and anyone could read it."""
        return not self._plain and ENCRYPTION not in header.fields

    def requires_prefix(self, address: Address) -> bool:
        """Return whether a block of this group needs all blocks before it; True where the layout is unknown."""
        layout = self._layouts.get(address.namespace)
        return layout is None or layout.groups[address.group].rule == "all"

    def stored_bytes(self, tier: str, layout: KVLayout, group: int, shard: Shard) -> int:
        """Return the most bytes that a record takes in a tier; where sizes vary, the size without compression."""
        made, whole = self._codec_by_tier.get(tier), layout.block_bytes(shard, group=group)
        if made is None or made.name == "raw" or made.varies:
            return record_bytes(whole)
        stored = made.encode(memoryview(bytes(whole)), layout, group, shard)
        return record_bytes(whole) if stored is None else slot_bytes(header_area(whole) + len(stored), made.varies)

    def codec_of(self, tier: str) -> str:
        return self._codec_by_tier[tier].name if tier in self._codec_by_tier else "raw"

    def encode(self, held: HostRecord, tier: str) -> Segments | None:
        """Return the sealed record as the tier keeps it, in new memory.

        The caller holds a reference.

        Returns:
            None where the record is written as it is in its slot. It is then not encrypted, and the codec is `raw`,
            skips this payload, or saves nothing.
        """
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
        """Encrypt the payload where configured, then write the header: the checksums cover the stored bytes."""
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
        """Decode the payload of a verified record in its slot, in place.

        Returns:
            DONE; or DAMAGED or INCOMPATIBLE, and the slot's content is undefined.
        """
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
        elif not self._plain:  # anyone can write an unencrypted record, or remove the field from an encrypted one
            return Outcome.INCOMPATIBLE
        if header.codec == "raw":
            return Outcome.DONE if header.stored_bytes == payload_bytes else Outcome.DAMAGED
        stored = memoryview(bytes(payload[: header.stored_bytes]))  # decoding overwrites the stored bytes
        layout = self._layouts.get(address.namespace)
        if layout is None:  # the namespace is not registered, so no request waits for the record
            return Outcome.INCOMPATIBLE
        try:
            self._codecs[header.codec].decode(stored, payload, layout, address.group, address.shard)
        except ValueError:
            return Outcome.DAMAGED
        return Outcome.DONE


def slot_bytes(used_bytes: int, varies: bool) -> int:
    """Return the bytes of a record in whole pages.

    Where sizes vary, the result is one of eight sizes between consecutive powers of two. So a tier whose segments have
    one slot size each needs few kinds of segments.
    """
    step = ALIGNMENT
    if varies:
        step = max(step, 1 << max(0, used_bytes.bit_length() - 4))
    return -(-used_bytes // step) * step


def _aligned(size_bytes: int) -> memoryview:
    """Allocate memory on a page boundary, as direct writes need it."""
    memory = np.empty(size_bytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size_bytes].data
