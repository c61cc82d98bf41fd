"""The wire protocol of a daemon and of the control socket: frames, the table of messages, errors.

`docs/spec/protocol.md` specifies it. A frame is the length of its body (4 bytes, little-endian) and a msgpack map. A
client sends hello first, then requests; a reply has `ok`, or `error` and `text`. Every field that is read is checked.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import msgpack
import numpy as np

from kvcache.block.layout import Group, KVLayout, Shard
from kvcache.cache.api import FlushReport, NamespaceSpec, TierFlush
from kvcache.errors import (
    INVALID_DATA,
    AccessError,
    ClosedError,
    ConfigError,
    KVCacheError,
    LayoutError,
    NamespaceError,
    RequestError,
    StoreError,
    TokenError,
    UnreachableError,
)

PROTOCOL_VERSION = 1
HEADER_BYTES = 4
MAX_FRAME_BYTES = 8 << 20
"""Most bytes of a body: the signatures of 262,144 blocks."""
MAX_GROUPS = 256
"""Most groups of a layout."""
MAX_CLIENT_NAMESPACES = 1024
"""Most namespaces that a client has bound at a time; it ends the least recently used ones as it binds others."""
MAX_FRAME_DESCRIPTORS = 64
"""Most descriptors in one frame."""

LEASE_DTYPE = np.dtype(
    [("block", "<u4"), ("group", "<u2"), ("unused", "<u2"), ("extent", "<u4"), ("slot", "<u4"), ("generation", "<u8")]
)
"""One leased slot; `block` counts from the first block of the transfer."""

PAYLOAD_DTYPE = np.dtype([("block", "<u4"), ("group", "<u2"), ("unused", "<u2"), ("bytes", "<u8"), ("sum", "<u8")])
"""One payload sent over the socket, and its XXH3-64 (0 where that is not known yet)."""
MAX_BATCH_BYTES = 8 << 20
"""Most bytes of padded records behind one message; a larger record is sent alone."""


class ProtocolError(KVCacheError):
    """A message that this protocol does not allow; the connection ends."""


ERRORS: Mapping[str, type[KVCacheError]] = {
    "protocol": ProtocolError,
    "unreachable": UnreachableError,
    "closed": ClosedError,
    "config": ConfigError,
    "layout": LayoutError,
    "namespace": NamespaceError,
    "request": RequestError,
    "store": StoreError,
    "token": TokenError,
    "access": AccessError,
    "failed": KVCacheError,
}


@dataclass(frozen=True, slots=True)
class Op:
    """One kind of message: its connection's role, and the types of its fields."""

    role: str
    required: Mapping[str, type | tuple[type, ...]]
    optional: Mapping[str, type | tuple[type, ...]] = field(default_factory=dict)
    has_reply: bool = True


_NUMBER = (int, float)
MAX_FLUSH_S = 60.0
"""Longest time that a daemon waits for a flush in one reply; a client that waits longer sends another."""
STORE_TIMEOUT_S = 30.0
"""For the daemon to find room. No request waits for a store, so that this only ends one that hangs."""

OPS: Mapping[str, Op] = {
    "hello": Op("any", {"version": int, "role": str}, {"session": bytes, "engine": str, "token": str}),
    "namespace": Op(
        "control",
        {"layout": dict, "model": str, "revision": str, "tenant": str, "cache_salt": str, "facts": dict},
        {"adapter": str, "shards": list, "ranks": list, "ends": list},
    ),
    "open": Op(
        "control",
        {"request": int, "namespace": int, "id": str},
        {"deadline_s": _NUMBER, "ttl_s": _NUMBER, "agent": str, "session": str},
        has_reply=False,
    ),
    "computed": Op("control", {"namespace": int, "tokens": int, "seconds": _NUMBER}, has_reply=False),
    "match": Op("control", {"request": int}, {"signatures": bytes, "head": bytes}),
    "extend": Op("control", {"request": int, "signatures": bytes}),
    "join": Op("control", {"request": int, "namespace": int, "id": str}),
    "signatures": Op("control", {"request": int}),
    "admit": Op("control", {"request": int}, {"ids": bytes}),
    "close": Op("control", {"request": int}, has_reply=False),
    "storing": Op("control", {"store": int}, has_reply=False),
    "stored": Op("control", {"store": int}, has_reply=False),
    "stats": Op("control", {}),
    "load": Op("mover", {"request": int, "first": int, "end": int}),
    "store": Op("mover", {"request": int, "first": int, "end": int}),
    "flush": Op("mover", {}, {"timeout_s": _NUMBER}),
    "check": Op("mover", {}),
    "changes": Op("mover", {"namespaces": list}, {"after": int}),
    "clear": Op("mover", {"namespace": int}),
}


def pack(message: Mapping[str, Any]) -> bytes:
    """Return a frame; ProtocolError where the message is too long for one."""
    return b"".join(frame_parts(message))


def frame_parts(message: Mapping[str, Any]) -> tuple[bytes, bytes]:
    """Return a frame's header and body, for a sender that does not join them."""
    body: bytes = msgpack.packb(message)
    if len(body) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a message of {len(body)} bytes: expected at most {MAX_FRAME_BYTES}")
    return len(body).to_bytes(HEADER_BYTES, "little"), body


def body_length(head: bytes | bytearray | memoryview) -> int:
    """Return the body's length from a header; ProtocolError beyond `MAX_FRAME_BYTES`."""
    size = int.from_bytes(head, "little")
    if size > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {size} bytes: expected at most {MAX_FRAME_BYTES}")
    return size


def unpack(body: bytes | bytearray | memoryview) -> dict[str, Any]:
    try:
        message = msgpack.unpackb(body)
    except INVALID_DATA as error:
        raise ProtocolError(f"{len(body)} bytes that are not msgpack: {error!r:.120}") from None
    if not isinstance(message, dict) or not all(isinstance(name, str) for name in message):
        raise ProtocolError(f"the message is {type(message).__name__}: expected a map of names")
    return message


def parse_request(message: Mapping[str, Any], role: str) -> tuple[str, Op]:
    """Return a message's name and `Op`, after a check of every field's presence and type.

    Unknown fields are ignored, so that a newer client is served.
    """
    name = message.get("op")
    op = OPS.get(name) if isinstance(name, str) else None
    if op is None or name is None:
        raise ProtocolError(f"op = {name!r:.40}: this version knows {', '.join(OPS)}")
    if op.role not in ("any", role):
        raise ProtocolError(f"op {name!r} on a {role} connection: expected one of role {op.role!r}")
    for field_name, kind in op.required.items():
        if field_name not in message:
            raise ProtocolError(f"{name} without {field_name!r}")
        _check_type(name, field_name, message[field_name], kind)
    for field_name, kind in op.optional.items():
        if message.get(field_name) is not None:
            _check_type(name, field_name, message[field_name], kind)
    return name, op


def _check_type(op: str, name: str, value: Any, kind: type | tuple[type, ...]) -> None:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ProtocolError(f"{op}: {name} is {type(value).__name__}")


def error_reply(error: KVCacheError) -> dict[str, Any]:
    """Return the reply for an error."""
    kind = next((name for name, made in ERRORS.items() if type(error) is made), "failed")
    return {"error": kind, "text": str(error)}


def parse_reply(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a reply; raise the error that it contains."""
    if isinstance(message.get("ok"), dict):
        return dict(message["ok"])
    kind, text = message.get("error"), message.get("text")
    if not isinstance(kind, str) or not isinstance(text, str):
        raise ProtocolError("the reply has neither `ok` nor `error`")
    raise ERRORS.get(kind, KVCacheError)(text)


def describe_report(report: FlushReport) -> dict[str, Any]:
    return {"tiers": {name: asdict(tier) for name, tier in report.tiers.items()}, "fault": report.fault}


def read_report(encoded: Mapping[str, Any]) -> FlushReport:
    """Return a flush's reply as a report. A daemon of an earlier version replies only with `done`."""
    report = encoded.get("report")
    if report is None:
        return FlushReport(fault="" if encoded["done"] else "the daemon has an earlier version, which gives no reason")
    try:
        names = [each.name for each in fields(TierFlush)]
        tiers = {name: TierFlush(**{n: tier[n] for n in names if n in tier}) for name, tier in report["tiers"].items()}
        return FlushReport(tiers, str(report["fault"]))
    except (TypeError, KeyError, AttributeError) as error:
        raise ProtocolError(f"the flush report is invalid: {error!r:.120}") from None


def describe_shards(shards: Any) -> list[list[int]]:
    return [[s.first_layer, s.end_layer, s.first_head, s.end_head] for s in shards]


def parse_shards(encoded: Any) -> list[Shard]:
    try:
        numbers = [tuple(four) for four in encoded]
        if not all(type(number) is int for four in numbers for number in four):
            raise TypeError("not integers")
        return [Shard(*four) for four in numbers]
    except LayoutError:
        raise
    except (TypeError, ValueError) as error:
        raise LayoutError(f"shards {encoded!r:.80}: expected four integers each ({error})") from None


def encode_spec(spec: NamespaceSpec) -> dict[str, Any]:
    """Return the fields of a `namespace` message. `ttl_s` is not sent: each request sends its own."""
    return {
        "layout": spec.layout.describe(),
        "model": spec.model,
        "revision": spec.revision,
        "adapter": spec.adapter,
        "tenant": spec.tenant,
        "cache_salt": spec.cache_salt,
        "facts": dict(spec.facts or {}),
        "shards": None if spec.shards is None else describe_shards(spec.shards),
        "ranks": None if spec.ranks is None else [describe_shards(shards) for shards in spec.ranks],
    }


def parse_spec(message: Mapping[str, Any]) -> NamespaceSpec:
    """Return what `encode_spec` encoded. Raises LayoutError for a layout or shards that cannot be read."""
    shards, ranks = message.get("shards"), message.get("ranks")
    return NamespaceSpec(
        parse_layout(message["layout"]),
        model=message["model"],
        revision=message["revision"],
        adapter=message.get("adapter"),
        tenant=message["tenant"],
        cache_salt=message["cache_salt"],
        facts=message["facts"],
        shards=None if shards is None else parse_shards(shards),
        ranks=None if ranks is None else [parse_shards(of_rank) for of_rank in ranks],
    )


def parse_layout(encoded: Mapping[str, Any]) -> KVLayout:
    """Return the layout that `KVLayout.describe` encoded."""
    try:
        if len(encoded["groups"]) > MAX_GROUPS:
            raise LayoutError(f"{len(encoded['groups'])} groups: expected at most {MAX_GROUPS}")
        groups = [Group(**{**group, "order": tuple(group["order"])}) for group in encoded["groups"]]
        return KVLayout(tuple(groups), encoded["block_tokens"])
    except LayoutError:
        raise
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise LayoutError(f"the layout is invalid: {error!r:.120}") from None


# Messages on the control socket: the body's length (4 bytes, little-endian), then a msgpack map.

MAX_REQUEST_BYTES = 1 << 20
MAX_REPLY_BYTES = 16 << 20
NOT_FOUND = "not_found"
"""The `kind` of an error about a name that does not exist."""
_CONTROL_HEADER_BYTES = 4


class FrameError(Exception):
    """The other side sent no valid message, or sent it too late; the text has the details."""


def send_message(
    connection: socket.socket, message: dict[str, Any], *, max_bytes: int, timeout_s: float | None
) -> None:
    try:
        body = msgpack.packb(message)
    except (TypeError, ValueError, OverflowError) as error:
        raise FrameError(f"msgpack cannot encode the message: {error}") from error
    if len(body) > max_bytes:
        raise FrameError(f"a message of {len(body)} bytes: expected at most {max_bytes}")
    connection.settimeout(timeout_s)
    try:
        connection.sendall(len(body).to_bytes(_CONTROL_HEADER_BYTES, "little") + body)
    except OSError as error:
        raise FrameError(f"{error}") from error


def receive_message(connection: socket.socket, *, max_bytes: int, timeout_s: float | None) -> dict[str, Any]:
    """Return the next message. `timeout_s` covers all of it."""
    end = None if timeout_s is None else time.monotonic() + timeout_s
    size = int.from_bytes(_receive_exactly(connection, _CONTROL_HEADER_BYTES, end), "little")
    if size > max_bytes:
        raise FrameError(f"a message of {size} bytes: expected at most {max_bytes}")
    body = _receive_exactly(connection, size, end)
    try:
        message = msgpack.unpackb(body)
    except INVALID_DATA as error:
        raise FrameError(f"{size} bytes that are not msgpack: {error!r}") from error
    if not isinstance(message, dict):
        raise FrameError(f"a message that is {type(message).__name__}: expected a map")
    return message


def _receive_exactly(connection: socket.socket, size: int, end: float | None) -> bytes:
    got = bytearray()
    while len(got) < size:
        remaining_s = None if end is None else end - time.monotonic()
        if remaining_s is not None and remaining_s <= 0:
            raise FrameError("no message within the deadline")
        connection.settimeout(remaining_s)
        try:
            piece = connection.recv(min(size - len(got), 64 << 10))
        except TimeoutError:
            raise FrameError("no message within the deadline") from None
        except OSError as error:
            raise FrameError(f"{error}") from error
        if not piece:
            raise FrameError("the connection ended within a message" if got else "the connection ended")
        got += piece
    return bytes(got)
