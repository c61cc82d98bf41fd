"""The errors that a caller can act on. The data path raises none: a fault there is a miss and a counter."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Collection
from difflib import get_close_matches


class KVCacheError(Exception):
    """Base of every error of this package. Its text is one line: what was found, what was expected, what to do."""


class ConfigError(KVCacheError, ValueError):
    """A setting is invalid. The text names the setting, its value and the expected one."""


class NotFoundError(ConfigError):
    """No object has the given name. The text lists similar names."""

    @classmethod
    def like(cls, found: str, given: str, known: Collection[str]) -> NotFoundError:
        """Return an error with the text `found` and the `known` names that resemble `given`."""
        matches = get_close_matches(given, [*dict.fromkeys(known)], cutoff=0.5)
        matches += [
            name for name in dict.fromkeys(known) if given[:4] and name.startswith(given[:4]) and name not in matches
        ]
        return cls(found + (f"; near matches: {', '.join(repr(name) for name in matches[:3])}" if matches else ""))


class LayoutError(KVCacheError, ValueError):
    """A layout, a shard or a description of pages is inconsistent."""


class NamespaceError(KVCacheError, ValueError):
    """A field of a namespace cannot be encoded."""


class TokenError(KVCacheError, ValueError):
    """Token ids that are not unsigned 32-bit integers, or extras that do not fit them."""


class RequestError(KVCacheError):
    """A request to join is not open, or several open requests have its id."""


class ModelError(KVCacheError):
    """A model's directory or file is missing, of another kind, or damaged."""


class StoreError(KVCacheError):
    """A tier's storage cannot be opened: permission, space, another owner, a damaged or foreign file."""


class UnreachableError(KVCacheError):
    """A running cache did not answer: it does not exist, it ended, or it does not speak this protocol."""


class AccessError(KVCacheError):
    """A daemon refused access: no token, no certificate, or another tenant's namespace."""


class ClosedError(KVCacheError):
    """An object was used after it was closed."""


INVALID_DATA = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    MemoryError,  # a length that no data has
    RecursionError,
    struct.error,
    zlib.error,
)
"""The errors of code that parses data of another version, writer or peer.

msgpack, json, struct, zlib and numpy raise these, and so do wrong types and missing keys.
"""
