"""Who a token stands for: a file of tenants and of hashes of their tokens, which says nothing about the tokens.

    # tenant       SHA-256 of the token, in hexadecimal
    team-a         9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
    *              60303ae22b998861bce3b28f33eec1be758a213c86c93c076dbe9f558c11c752

Several lines of one tenant are several tokens, all believed, so that a token is changed without a gap: the new line
first, the old one taken out later. The tenant `*` is the operator, who sees all. Tokens are made at random and long
(`made`), so that a plain hash of one cannot be guessed.
"""

from __future__ import annotations

import hmac
import os
import secrets
from collections.abc import Sequence
from hashlib import sha256

from kvcache.errors import ConfigError

OPERATOR = "*"
LONGEST = 512
"""Characters of a token that are looked at."""


def made() -> str:
    """A new token: 43 characters that a header, a shell and an address can carry."""
    return secrets.token_urlsafe(32)


def hashed(token: str) -> str:
    """As it stands in the file."""
    return sha256(token.encode("utf-8", "surrogateescape")).hexdigest()


class Tokens:
    """`rows`: tenant and hash, as in the file."""

    def __init__(self, rows: Sequence[tuple[str, str]]) -> None:
        self._rows = list(rows)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def tenants(self) -> set[str]:
        """Those that have a token."""
        return {tenant for tenant, _ in self._rows}

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Tokens:
        """ConfigError where the file cannot be read, names nobody, or has a line that is none; a token that stands
        there in place of its hash is not repeated."""
        name = os.fspath(path)
        try:
            with open(name, encoding="utf-8") as file:
                lines = file.read().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not UTF-8"
            raise ConfigError(f"tokens file {name!r}: {reason}; expected lines of a tenant and a SHA-256") from None
        rows = []
        for number, line in enumerate(lines, 1):
            words = line.partition("#")[0].split()
            if not words:
                continue
            if len(words) != 2 or len(words[1]) != 64 or not set(words[1].lower()) <= set("0123456789abcdef"):
                raise ConfigError(
                    f"tokens file {name!r}, line {number}: expected a tenant and the SHA-256 of its token in 64 "
                    "hexadecimal digits, as `printf %s TOKEN | sha256sum` prints it"
                )
            rows.append((words[0], words[1].lower()))
        if not rows:
            raise ConfigError(f"tokens file {name!r}: names no tenant, so that nobody could come in")
        return cls(rows)

    def tenant(self, token: str) -> str | None:
        """Whose it is, `OPERATOR` among them; None for a token of nobody. Takes as long for one as for another."""
        given = hashed(token[:LONGEST])
        found = None
        for tenant, known in self._rows:
            if hmac.compare_digest(given, known):
                found = tenant
        return found
