"""How a client reaches its daemon, and what it shows there, read anew for each connection."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvcache.daemon.wire import Wire
from kvcache.errors import AccessError, ConfigError

TOKEN_VARIABLE = "KVCACHE_TOKEN"  # noqa: S105  the variable's name


@dataclass(frozen=True, slots=True)
class Token:
    """Where a token comes from: a file, else the variable. Never shown."""

    file: str = ""
    environ: Mapping[str, str] | None = None

    def read(self) -> str:
        """Empty where none is given; AccessError where the file cannot be read."""
        if not self.file:
            return (os.environ if self.environ is None else self.environ).get(TOKEN_VARIABLE, "")
        try:
            token = Path(self.file).read_text(encoding="ascii").strip()
        except (OSError, ValueError) as error:
            raise AccessError(f"token_file = {self.file!r}: {getattr(error, 'strerror', None) or 'no token'}") from None
        if not token or token.startswith("sha256:") or len(token.split()) != 1:
            raise ConfigError(f"token_file = {self.file!r}: expected one token and nothing else")
        return token


class Route(Protocol):
    """Shown as text in what is said of it."""

    @property
    def token(self) -> Token: ...
    def connect(self, timeout_s: float) -> Wire:
        """UnreachableError where nobody listens."""


@dataclass(frozen=True, slots=True)
class UnixRoute:
    """To a daemon of this host."""

    path: str
    token: Token = Token()

    def __str__(self) -> str:
        return self.path

    def connect(self, timeout_s: float) -> Wire:
        return Wire.connect(self.path, timeout_s)
