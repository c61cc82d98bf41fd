"""The errors a caller can act on. Inside the data path nothing is raised: a fault there is a miss and a counter."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches


class KVCacheError(Exception):
    """Base of every error of ours. The text is one line: what was found, what was expected, what to do."""


class ConfigError(KVCacheError, ValueError):
    """A setting makes no sense; names the setting, the value given and what would do."""


class NotFoundError(ConfigError):
    """Nothing here has the name that was given; says which names are like it."""

    @classmethod
    def like(cls, found: str, given: str, known: Collection[str]) -> NotFoundError:
        """`found`: what is wrong, in a line. `known`: the names that would do."""
        near = get_close_matches(given, [*dict.fromkeys(known)], cutoff=0.5)
        near += [name for name in dict.fromkeys(known) if given[:4] and name.startswith(given[:4]) and name not in near]
        return cls(found + (f"; near matches: {', '.join(repr(name) for name in near[:3])}" if near else ""))


class LayoutError(KVCacheError, ValueError):
    """A layout, a shard or a description of pages does not fit together."""


class NamespaceError(KVCacheError, ValueError):
    """A field of a namespace cannot be encoded."""


class TokenError(KVCacheError, ValueError):
    """Token ids that are not unsigned 32-bit integers, or extras that do not fit them."""


class RequestError(KVCacheError):
    """A request that was to be joined is not open, or several are of its id."""


class ModelError(KVCacheError):
    """A model's directory or file is not there, is of another kind, or is damaged."""


class StoreError(KVCacheError):
    """A place for records cannot be opened: permission, room, another owner, a damaged or foreign file."""


class UnreachableError(KVCacheError):
    """A running cache was asked and did not answer: there is none, it ended, or it does not speak this protocol."""


class AccessError(KVCacheError):
    """A daemon did not let us in, or not there: no token, no certificate, another tenant's namespace."""


class ClosedError(KVCacheError):
    """Something was used after it was closed."""
