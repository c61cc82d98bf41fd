"""Settings of the daemon, HTTP, the control socket, traces and the log."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from kvcache.settings.types import Bytes, Count, MiB, Seconds, Section, as_number, computed_default


class DaemonSettings(Section):
    """A cache that serves other processes of this host: `kvcache daemon`."""

    socket: str = Field(
        default="",
        description="Path of the daemon's Unix socket.",
        json_schema_extra=computed_default("`kvcache.socket` in the user's runtime directory"),
    )
    mode: Annotated[str, Field(pattern="^0?[0-7]{3}$")] = Field(
        default="600",
        description="Mode of the socket, in octal. Users other than the owner need group or other permissions.",
    )
    listen: str = Field(
        default="",
        description="`HOST:PORT` for clients of other hosts. Requires TLS, and tokens or client certificates "
        "(docs/daemon.md). Empty: no port.",
    )
    tls_cert_file: str = Field(default="", description="Certificate chain of that port (PEM).")
    tls_key_file: str = Field(default="", description="Key of the certificate. Empty: in the certificate's file.")
    tls_client_ca_file: str = Field(
        default="", description="CA certificates for client certificates. Empty: clients need none."
    )
    tenants_file: str = Field(
        default="",
        description="Tenants, their credentials and limits (docs/daemon.md). SIGHUP reloads it. Without it, any "
        "client can name any tenant.",
    )
    connections: Count = Field(default=512, description="Most open connections. An engine process has up to five.")
    lease_s: Seconds = Field(default=10.0, description="Longest lease of a slot. The daemon then closes the client.")
    drain_s: Seconds = Field(
        default=5.0, description="Time for running transfers to end at SIGTERM. Less than the supervisor's own limit."
    )


class TraceSettings(Section):
    """The trace of requests: times and block ids, without contents."""

    path: str = Field(
        default="",
        description="A file to append to, which `kvcache replay` reads. Without one nothing is written.",
    )
    file_bytes: Bytes = Field(
        default=64 * MiB, description="A file of this size becomes `PATH.1` and replaces the previous one."
    )


class ControlSettings(Section):
    """The socket by which `kvcache ps`, `stats`, `check` and `bypass` reach this cache; for its own user only."""

    enabled: bool = Field(
        default=True, description="Whether the cache opens a control socket in the user's runtime directory."
    )


class LogSettings(Section):
    """Logging through Python's `logging`, under the name `kvcache`."""

    format: Literal["none", "text", "json"] = Field(
        default="none",
        description="`none`: the application configures logging. `text`, `json`: lines on standard error.",
    )
    level: Literal["debug", "info", "warning", "error"] = Field(
        default="warning", description="Lowest level that is logged."
    )


# HTTP

MAX_HTTP_CONNECTIONS = 128
"""Most open connections; the server closes further ones at once."""


class HttpSettings(Section):
    """The daemon's HTTP server: metrics for Prometheus, health, a status page and its data."""

    enabled: bool = Field(
        default=False, description="Whether the daemon serves HTTP. `kvcache daemon --http` enables it too."
    )
    host: str = Field(
        default="127.0.0.1",
        description="Address of the HTTP server. Outside loopback, `/metrics`, `/healthz` and `/readyz` need no "
        "token, and all other paths do.",
    )
    port: Annotated[int, BeforeValidator(as_number), Field(ge=0, le=65535)] = Field(
        default=9475, description="Port of the HTTP server. 0 picks a free one and logs it."
    )
    tls_cert_file: str = Field(default="", description="Certificate chain (PEM). Enables HTTPS.")
    tls_key_file: str = Field(default="", description="Key of the certificate, if it is in another file.")
