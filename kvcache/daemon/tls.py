"""TLS contexts for daemon and client, and the identities in a client's certificate."""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Mapping
from hashlib import sha256
from typing import Any

from kvcache.errors import ConfigError


def server_context(cert_file: str, key_file: str, client_ca_file: str, *, required: bool) -> ssl.SSLContext:
    """Return the daemon's context.

    Args:
        cert_file: PEM certificate of the daemon.
        key_file: Its key.
        client_ca_file: Signs clients' certificates, which are then requested; "" for none.
        required: Refuse a client without such a certificate.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    _load_cert_chain(context, "daemon.tls_cert_file", cert_file, key_file)
    if client_ca_file:
        _load_ca(context, "daemon.tls_client_ca_file", client_ca_file)
        context.verify_mode = ssl.CERT_REQUIRED if required else ssl.CERT_OPTIONAL
    return context


def client_context(ca_file: str, cert_file: str, key_file: str) -> ssl.SSLContext:
    """Return the client's context. It checks the daemon's name and certificate against `ca_file`, else system CAs."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if ca_file:
        _load_ca(context, "ca_file", ca_file)
    else:
        context.load_default_certs()
    if cert_file:
        _load_cert_chain(context, "cert_file", cert_file, key_file)
    return context


def certificate_identities(connection: ssl.SSLSocket) -> tuple[str, ...]:
    """Return fingerprint and names of the other side's certificate; () where it sent none."""
    encoded, certificate = connection.getpeercert(binary_form=True), connection.getpeercert()
    if not encoded or not certificate:
        return ()
    return f"sha256:{sha256(encoded).hexdigest()}", *_names(certificate)


def _names(certificate: Mapping[str, Any]) -> Iterator[str]:
    for kind, name in certificate.get("subjectAltName", ()):
        if kind in ("DNS", "URI"):
            yield name
    for part in certificate.get("subject", ()):
        yield from (value for kind, value in part if kind == "commonName")


def _load_cert_chain(context: ssl.SSLContext, setting: str, cert_file: str, key_file: str) -> None:
    try:
        context.load_cert_chain(cert_file, key_file or None, password=_no_password)
    except (OSError, ValueError) as error:  # SSLError is a subclass of OSError
        reason = getattr(error, "strerror", None) or getattr(error, "reason", None) or error
        raise ConfigError(
            f"{setting} = {cert_file!r}: no certificate with its key ({reason}); give both as PEM"
        ) from None


def _load_ca(context: ssl.SSLContext, setting: str, ca_file: str) -> None:
    try:
        context.load_verify_locations(ca_file)
    except OSError as error:
        reason = getattr(error, "strerror", None) or getattr(error, "reason", None) or error
        raise ConfigError(f"{setting} = {ca_file!r}: no certificates ({reason}); give a PEM file") from None


def _no_password() -> str:
    raise ValueError("the key has a password, which the daemon cannot ask for")
