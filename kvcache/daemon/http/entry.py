"""Who may ask what over HTTP.

`/metrics`, `/healthz` and `/readyz` are open. The rest is for whoever shows a token, if the daemon knows any; if it
does not, for whoever is on this host, where the daemon listens on loopback alone, and for nobody otherwise.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable

from starlette.exceptions import HTTPException
from starlette.requests import Request

from kvcache.daemon.tcp import is_loopback

OPERATOR = "*"
"""The owner of a token who sees all."""
OPEN = frozenset({"/metrics", "/healthz", "/readyz"})

Owner = Callable[[str], "str | None"]
"""Whose a token is: a tenant, `OPERATOR`, or nobody's."""

_CHALLENGE = {"WWW-Authenticate": 'Basic realm="kvcache: any name, the token as password", charset="UTF-8"'}


class Entry:
    """`owner`: None where the daemon knows no tokens. `local`: it listens on loopback alone."""

    def __init__(self, owner: Owner | None, *, local: bool) -> None:
        self._owner, self._local = owner, local

    def tenant(self, request: Request) -> str | None:
        """Whose figures are asked for; None: all. HTTPException where nobody's may be told."""
        if self._local and not is_loopback(request.url.hostname or ""):
            # A page of elsewhere that gave its own name this address would otherwise read what is here.
            raise HTTPException(421, "this is a host of another name; ask for 127.0.0.1 or localhost")
        if self._owner is None:
            if self._local:
                return None
            raise HTTPException(
                403, f"no tenant has a token here (daemon.tenants_file), so only {', '.join(sorted(OPEN))} are open"
            )
        token = shown(request.headers.get("authorization", ""))
        owner = None if token is None else self._owner(token)
        if owner is None:
            raise HTTPException(401, "show a token: `Authorization: Bearer TOKEN`, or as a password", _CHALLENGE)
        return None if owner == OPERATOR else owner


def shown(header: str) -> str | None:
    """The token in an `Authorization` header: a bearer's, or the password of a browser that asked its user."""
    scheme, _, value = header.partition(" ")
    value = value.strip()
    if scheme.lower() == "bearer":
        return value or None
    if scheme.lower() != "basic":
        return None
    try:
        return base64.b64decode(value, validate=True).decode("utf-8").partition(":")[2] or None
    except (binascii.Error, UnicodeDecodeError):
        return None
