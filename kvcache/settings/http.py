"""How a daemon is seen over HTTP."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from kvcache.values import Section, as_number

CONNECTIONS = 128
"""Open at a time, at most; more are hung up on."""


class Http(Section):
    """The daemon over HTTP: figures for Prometheus, whether it is well, a page to look at and what that is made of."""

    enabled: bool = Field(default=False, description="Whether the daemon listens; `kvcache daemon --http` as well.")
    host: str = Field(
        default="127.0.0.1",
        description="The address that it listens on. Elsewhere than on loopback `/metrics`, `/healthz` and `/readyz` "
        "are open to everybody, and the rest to whoever has a token.",
    )
    port: Annotated[int, BeforeValidator(as_number), Field(ge=0, le=65535)] = Field(
        default=9475, description="The port; 0: a free one, which is said at start."
    )
    tls_cert_file: str = Field(
        default="", description="The certificate to show, with those above it: then it is HTTPS."
    )
    tls_key_file: str = Field(default="", description="The certificate's key, where that is not in the same file.")
