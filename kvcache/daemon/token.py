"""Bearer tokens: 256 random bits that a client says and of which only the SHA-256 is kept.

A token is no password that somebody thought of, so a plain hash keeps it: nobody can try 2^256 of them.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable
from hashlib import sha256
from hmac import compare_digest

BEGIN = "kvcache_"
"""Of every token, so that a scanner finds one that was committed by mistake."""
_HASH = re.compile("sha256:[0-9a-f]{64}")


def new_token() -> str:
    return BEGIN + secrets.token_urlsafe(32)


def token_hash(token: str) -> str:
    """What a file may hold of a token: `sha256:` and 64 hexadecimal digits."""
    return f"sha256:{sha256(token.encode('utf-8', 'surrogatepass')).hexdigest()}"


def is_hash(text: str) -> bool:
    return _HASH.fullmatch(text) is not None


class Tokens:
    """Whose a token is, by its `token_hash`. All that are known are compared, each whole: the time says nothing."""

    def __init__(self, owners: Iterable[tuple[str, str]]) -> None:
        """(hash, owner) of each token."""
        self._owners = list(owners)

    def __len__(self) -> int:
        return len(self._owners)

    def owner(self, hash_: str) -> str | None:
        found = None
        for known, owner in self._owners:
            if compare_digest(known, hash_):
                found = owner
        return found
