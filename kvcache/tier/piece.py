"""Bytes in several pieces, cut without copying; a record as it goes out, in such pieces."""

from __future__ import annotations

from collections.abc import Sequence

from kvcache.block.cipher import Signer
from kvcache.block.record import KEYED_DIGEST, Address, Header, RecordError, read_header, with_field
from kvcache.tier.tier import Segments, same_record


def flat(segments: Segments, size: int) -> list[memoryview]:
    """The first `size` bytes, as plain bytes."""
    return cut([segment.cast("B") for segment in segments], 0, size)


def outgoing(address: Address, segments: Segments, signer: Signer | None) -> tuple[Header, bytes, list[memoryview]]:
    """A record for a server: its header, the header's bytes, signed where there is somebody to, and the payload.
    RecordError where it is not that of the address."""
    header = read_header(segments[0])
    if header.address.name != address.name or not same_record(header.address, address):
        raise RecordError("address", "the header names another record than the call")
    payload = flat(segments[1:], header.stored_bytes)
    if sum(map(len, payload)) < header.stored_bytes:
        raise RecordError("length", f"{header.stored_bytes} stored bytes: fewer are there")
    head = bytes(segments[0][: header.header_bytes])
    if signer is not None:
        head = with_field(head, header, KEYED_DIGEST, signer.sign(head, header, payload))
    return header, head, payload


def cut(pieces: Sequence[memoryview], start: int, size: int) -> list[memoryview]:
    """Bytes `start` to `start + size` of pieces that follow each other, or as many as are there."""
    found = []
    for piece in pieces:
        if start < len(piece) and size > 0:
            found.append(piece[start : start + size])
            size -= len(found[-1])
        start = max(0, start - len(piece))
    return found
