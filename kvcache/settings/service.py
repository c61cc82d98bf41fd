"""Settings of the daemon, HTTP, the control socket, traces and the log."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from kvcache.settings.types import Bytes, Count, MiB, Seconds, Section, as_number, computed_default


class DaemonSettings(Section):
    """A cache that serves other processes of this host: `kvcache daemon`."""

    socket: str = Field(
        default="",
        description="Path of the Unix socket that it listens on.",
        json_schema_extra=computed_default("`kvcache.socket` in the user's runtime directory"),
    )
    mode: Annotated[str, Field(pattern="^0?[0-7]{3}$")] = Field(
        default="600",
        description="Who may connect: the socket's mode, in octal. Others than the owner need group or other.",
    )
    listen: str = Field(
        default="",
        description="`HOST:PORT` for clients of other hosts, beside the socket; with TLS, and never without tokens or "
        "client certificates (docs/daemon.md). Nothing: none.",
    )
    tls_cert_file: str = Field(default="", description="The certificate of that port (PEM), with its signers.")
    tls_key_file: str = Field(default="", description="Its key; nothing where the certificate's file holds it.")
    tls_client_ca_file: str = Field(default="", description="Who signs the certificates of clients, if any.")
    tenants_file: str = Field(
        default="",
        description="Who may come in, as whom, and within which limits (docs/daemon.md); read again at SIGHUP. Without "
        "one every client that may connect may name any tenant.",
    )
    connections: Count = Field(default=512, description="Open at a time, at most; an engine's process has up to five.")
    lease_s: Seconds = Field(
        default=10.0, description="How long a client may take to copy what it was lent before it is let go."
    )
    drain_s: Seconds = Field(default=5.0, description="How long transfers under way may take to end at SIGTERM.")


class TraceSettings(Section):
    """What is written down of the requests: times and the names of blocks, nothing of what is in them."""

    path: str = Field(
        default="",
        description="A file to append to, which `kvcache replay` reads. Without one nothing is written.",
    )
    file_bytes: Bytes = Field(
        default=64 * MiB, description="A file of this size becomes `PATH.1`, in the place of the one before."
    )


class ControlSettings(Section):
    """The socket by which `kvcache ps`, `stats`, `check` and `bypass` reach this cache; for its own user only."""

    enabled: bool = Field(default=True, description="Whether the cache listens, in the user's runtime directory.")


class LogSettings(Section):
    """What the package says through Python's `logging`, under the name `kvcache`."""

    format: Literal["none", "text", "json"] = Field(
        default="none", description="`none` leaves it to the program around; `text`, `json`: lines on standard error."
    )
    level: Literal["debug", "info", "warning", "error"] = Field(
        default="warning", description="The least that is said."
    )


# HTTP

MAX_HTTP_CONNECTIONS = 128
"""Most open connections; the server closes further ones at once."""


class HttpSettings(Section):
    """The daemon over HTTP: figures for Prometheus, whether it is well, a page to look at and what that is made of."""

    enabled: bool = Field(default=False, description="Whether the daemon listens; `kvcache daemon --http` as well.")
    host: str = Field(
        default="127.0.0.1",
        description="The address that it listens on. Elsewhere than on loopback `/metrics`, `/healthz` and `/readyz` "
        "are open to everybody, and the rest to clients with a token.",
    )
    port: Annotated[int, BeforeValidator(as_number), Field(ge=0, le=65535)] = Field(
        default=9475, description="The port; 0: a free one, which is said at start."
    )
    tls_cert_file: str = Field(
        default="", description="The certificate to show, with those above it: then it is HTTPS."
    )
    tls_key_file: str = Field(default="", description="The certificate's key, where that is not in the same file.")
