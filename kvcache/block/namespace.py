"""Namespaces: the facts on which two blocks must agree to be interchangeable, and their 32-byte id.

The id is SHA-256 over an encoding of every field; `docs/spec/key.md` specifies the bytes. Each value carries its type
and length, so different fields never have the same encoding.
"""

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
"""The start of the hashed bytes. Another version of the encoding has another prefix, and so other ids."""

MAX_DEPTH = 32
_INT_RANGE = range(-(1 << 63), 1 << 64)


@dataclass(frozen=True, eq=False)
class Namespace:
    """Model, revision, layout, adapter, tenant, cache salt, and further facts that an engine knows to matter.

    A namespace describes the whole model, never a rank. `facts` holds engine facts by name: rope and quantisation
    settings, packing, per-tensor KV scales, the origin of an engine's digests. Values may be None, bool, int, float,
    str, bytes, and lists and maps of these; the namespace keeps a copy.

    Raises:
        NamespaceError: a field cannot be encoded.
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
        _ = self.id  # encoding rejects values that have no encoding
        object.__setattr__(self, "facts", _plain(self.facts))

    @cached_property
    def id(self) -> bytes:
        """The 32-byte id."""
        return sha256(PREFIX + encode(self._fields())).digest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Namespace) and self.id == other.id

    def __hash__(self) -> int:
        return hash(self.id)

    def describe(self) -> dict[str, Any]:
        """Return the fields and the id for display. The salt is a secret, so the result only says whether it is set."""
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
    """Return the canonical encoding of a value; a NamespaceError names the part that has none."""
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
    """Return a copy of an encodable value in dicts and lists."""
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


# The owner of a namespace, which a tier keeps beside its records. It identifies the records of a tenant or a salt after
# the namespace is closed, and reveals neither.

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
        """Decode 64 bytes; None for another length."""
        return cls(packed[:32], packed[32:]) if len(packed) == OWNER_BYTES else None

    def pack(self) -> bytes:
        return self.tenant + self.salt

    def fits(self, tenant: str | None, cache_salt: str | None) -> bool:
        """Return whether the owner has this tenant and this salt; None matches any."""
        return (tenant is None or self.tenant == _digest("tenant", tenant)) and (
            cache_salt is None or self.salt == _digest("salt", cache_salt)
        )


def _digest(what: str, text: str) -> bytes:
    return hashlib.sha256(f"kvcache owner {what} ".encode() + text.encode()).digest()
