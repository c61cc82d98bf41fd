"""What two blocks must agree on to be interchangeable, and its 32-byte id.

The id is SHA-256 over an encoding of every field, specified byte by byte in `docs/spec/key.md`. Each value carries
its type and its length, so that different fields cannot meet in the same bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from hashlib import sha256
from math import isnan
from struct import pack
from typing import Any, NamedTuple

from kvcache.block.layout import KVLayout
from kvcache.errors import NamespaceError

PREFIX = b"kvcache namespace 1\n"
"""Begins what is hashed: another version of the encoding is another prefix, and so another id."""

MAX_DEPTH = 32
_INT_RANGE = range(-(1 << 63), 1 << 64)


@dataclass(frozen=True, eq=False)
class Namespace:
    """Model and revision, layout, adapter, tenant, cache salt and what else an engine knows to matter.

    It describes the whole model, never a rank. `facts` holds engine facts by name: rope and quantisation settings,
    packing, per-tensor KV scales, the origin of digests that are not ours. Values may be None, bool, int, float, str,
    bytes, and lists and maps of these; a copy is kept. A field that cannot be encoded raises NamespaceError here.
    """

    layout: KVLayout
    _: KW_ONLY
    model: str
    revision: str
    adapter: str | None = None
    tenant: str = "default"
    cache_salt: str = field(default="", repr=False)
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("model", "revision", "tenant", "cache_salt"):
            _check_type(name, getattr(self, name), str)
        if self.adapter is not None:
            _check_type("adapter", self.adapter, str)
        _check_type("facts", self.facts, Mapping)
        _ = self.id  # encodes: what has no encoding is refused here
        object.__setattr__(self, "facts", _plain(self.facts))

    @cached_property
    def id(self) -> bytes:
        """32 bytes."""
        return sha256(PREFIX + encode(self._fields())).digest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Namespace) and self.id == other.id

    def __hash__(self) -> int:
        return hash(self.id)

    def describe(self) -> dict[str, Any]:
        """The fields and the id for people. The salt is a secret: only whether there is one is told."""
        salt = "set" if self.cache_salt else "none"
        return {"id": self.id.hex()} | self._fields() | {"cache_salt": salt, "facts": _plain(self.facts)}

    def _fields(self) -> dict[str, Any]:
        return {
            "adapter": self.adapter,
            "cache_salt": self.cache_salt,
            "facts": self.facts,
            "layout": self.layout.describe(),
            "model": self.model,
            "revision": self.revision,
            "tenant": self.tenant,
        }


def encode(value: Any) -> bytes:
    """The canonical encoding of a value; NamespaceError names the part that has none."""
    return b"".join(_parts(value, "", 0))


def _parts(value: Any, where: str, depth: int) -> Iterator[bytes]:
    if depth > MAX_DEPTH and isinstance(value, (list, tuple, Mapping)):
        raise NamespaceError(f"{where}: nested deeper than {MAX_DEPTH}; flatten it")
    if value is None:
        yield b"N"
    elif value is True or value is False:
        yield b"T" if value else b"F"
    elif type(value) is int:
        if value not in _INT_RANGE:
            raise NamespaceError(f"{where}: an integer of more than 64 bits; give it as str or bytes")
        yield _sized(b"i", b"%d" % value)
    elif type(value) is float:
        if isnan(value):
            raise NamespaceError(f"{where} is NaN, which equals nothing; give a number or None")
        yield b"f" + pack("<d", value)
    elif type(value) is str:
        yield _sized(b"s", _utf8(value, where))
    elif type(value) is bytes:
        yield _sized(b"b", value)
    elif isinstance(value, (list, tuple)):
        yield b"l" + pack("<Q", len(value))
        for i, item in enumerate(value):
            yield from _parts(item, f"{where}[{i}]", depth + 1)
    elif isinstance(value, Mapping):
        yield b"m" + pack("<Q", len(value))
        for key, name in sorted((_key(name, where), name) for name in value):
            yield _sized(b"s", key)
            yield from _parts(value[name], f"{where}.{name}" if where else name, depth + 1)
    else:
        raise NamespaceError(
            f"{where or 'the value'} is a {type(value).__name__}: expected None, bool, int, float, str, bytes, "
            "or a list or map of these; convert it"
        )


def _plain(value: Any) -> Any:
    """A copy in dicts and lists of an encodable value."""
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _sized(tag: bytes, body: bytes) -> bytes:
    return tag + pack("<Q", len(body)) + body


def _key(name: Any, where: str) -> bytes:
    if type(name) is not str:
        raise NamespaceError(f"{where or 'map'} has the key {name!r}: expected str")
    return _utf8(name, f"a key of {where or 'the map'}")


def _utf8(text: str, where: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise NamespaceError(
            f"{where} has a lone surrogate at position {error.start}, which UTF-8 cannot hold; remove it"
        ) from None


def _check_type(name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise NamespaceError(f"{name} is a {type(value).__name__}: expected {kind.__name__.lower()}")


# Whose a namespace is, as a tier keeps it beside its records: enough to find what is a tenant's, or of a salt, once
# nobody has it bound any more, and nothing that tells either.

OWNER_BYTES = 64


class Owner(NamedTuple):
    """Digests of the tenant's name and of the cache salt."""

    tenant: bytes
    salt: bytes

    @classmethod
    def of(cls, namespace: Namespace) -> Owner:
        return cls(_digest("tenant", namespace.tenant), _digest("salt", namespace.cache_salt))

    @classmethod
    def read(cls, packed: bytes) -> Owner | None:
        """None for what is none."""
        return cls(packed[:32], packed[32:]) if len(packed) == OWNER_BYTES else None

    def pack(self) -> bytes:
        return self.tenant + self.salt

    def fits(self, tenant: str | None, cache_salt: str | None) -> bool:
        """Whether it is this tenant and this salt, of those that are given."""
        return (tenant is None or self.tenant == _digest("tenant", tenant)) and (
            cache_salt is None or self.salt == _digest("salt", cache_salt)
        )


def _digest(what: str, text: str) -> bytes:
    return hashlib.sha256(f"kvcache owner {what} ".encode() + text.encode()).digest()
