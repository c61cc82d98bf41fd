"""One file for a bug report: the doctor's findings, settings, versions and the state of running caches, without
secrets."""

from __future__ import annotations

import io
import json
import os
import re
import tarfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvcache.cli.doctor.machine import Finding, versions
from kvcache.errors import KVCacheError
from kvcache.settings import PREFIX, TABLE, Settings

# Redacts secrets in what is sent to others: by the name of a field, by the form of a text, and by value.

REDACTED = "***"
MIN_SECRET_CHARS = 6
"""Least length of a known secret that is searched in all texts: a shorter one would match everywhere."""

_SECRET_WORDS = {"password", "passwd", "pwd", "passphrase", "secret", "secrets", "credential", "credentials", "apikey"}
_SECRET_LAST_WORDS = {"token", "key", "keys", "auth", "authorization", "cookie", "salt", "dsn"}
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")

_SECRET_PATTERNS = (
    # a URL: the user before the @, and the query after the ?
    (re.compile(r"(\b[a-zA-Z][\w+.-]*://)[^\s\"'<>]*@"), rf"\1{REDACTED}@"),
    (re.compile(r"(\b[a-zA-Z][\w+.-]*://[^\s\"'<>?]*\?)[^\s\"'<>]+"), rf"\1{REDACTED}"),
    # password = "...", api_key: ..., --token ...
    (
        re.compile(
            r"(?i)((?:password|passwd|pwd|passphrase|secret|credentials?|token|api[_-]?key|access[_-]?key|[\w.-]*_key"
            r"|[\w.-]*_token|salt|authorization)[\"']?\s*(?:[=:]|\s(?=[\"']))\s*)"
            r"(?:\"[^\"\n]*\"|'[^'\n]*'|(?:(?:bearer|basic)\s+)?[^\s,;)\]}]+)"
        ),
        rf"\1{REDACTED}",
    ),
    (re.compile(r"(?i)(--[\w-]*(?:password|secret|token|key)\s+)\S+"), rf"\1{REDACTED}"),
    (re.compile(r"(?i)\b(bearer|basic)\s+[\w.~+/=-]{6,}"), rf"\1 {REDACTED}"),
    # the form of some services' keys
    (re.compile(r"\b(?:hf_|sk-|pk-|ghp_|gho_|ghs_|github_pat_|glpat-|xox[abprs]-|AKIA|ASIA)[\w-]{8,}"), REDACTED),
    (re.compile(r"\beyJ[\w-]{8,}\.[\w-]+\.[\w-]*"), REDACTED),
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL), REDACTED),
)


def is_secret(name: str) -> bool:
    """Return whether a field of that name holds a secret: `redis.password`, `HF_TOKEN`, `api-key`; but not
    `block_tokens`."""
    words = [word.lower() for word in _WORD.findall(name)]
    return bool(words) and (words[-1] in _SECRET_LAST_WORDS or not _SECRET_WORDS.isdisjoint(words))


def known_secrets(environ: Mapping[str, str]) -> list[str]:
    """Return the values of variables with such names, which are redacted in any text."""
    return [value for name, value in environ.items() if is_secret(name) and len(value) >= MIN_SECRET_CHARS]


def redact(value: Any, known_secrets: Iterable[str] = ()) -> Any:
    """Return a copy of a tree of maps, lists and scalars, with every secret hidden."""
    return _redact(value, sorted(set(known_secrets), key=len, reverse=True))


def _redact(value: Any, known_secrets: list[str]) -> Any:
    if isinstance(value, Mapping):
        return {
            _redact(name, known_secrets) if isinstance(name, str) else name: (
                REDACTED if is_secret(str(name)) and inner not in (None, "") else _redact(inner, known_secrets)
            )
            for name, inner in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_redact(inner, known_secrets) for inner in value]
    return _text(value, known_secrets) if isinstance(value, str) else value


def _text(text: str, known_secrets: list[str]) -> str:
    for secret in known_secrets:
        text = text.replace(secret, REDACTED)
    for form, instead in _SECRET_PATTERNS:
        text = form.sub(instead, text)
    return text


MAX_EVENTS = 200


def write_bundle(
    file: Path, findings: Sequence[Finding], settings: Settings | None, environ: Mapping[str, str] = os.environ
) -> None:
    """Write a tar.gz of JSON files that only its owner can read."""
    parts = {
        "doctor.json": [asdict(finding) for finding in findings],
        "settings.json": {} if settings is None else _settings(settings),
        "environment.json": {name: value for name, value in environ.items() if name.startswith(PREFIX)},
        "versions.json": versions(),
        "running.json": describe_running_caches(),
    }
    hidden = known_secrets(environ)
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as whole, tarfile.open(fileobj=whole, mode="w:gz") as archive:
        for name, part in parts.items():
            text = json.dumps(redact(part, hidden), indent=2).encode()
            entry = tarfile.TarInfo(f"kvcache-bundle/{name}")
            entry.size, entry.mode, entry.mtime = len(text), 0o600, int(time.time())
            archive.addfile(entry, io.BytesIO(text))


def _settings(settings: Settings) -> dict[str, Any]:
    return {name: {"value": _plain(settings.value(name)), "origin": settings.origin(name)} for name in TABLE}


def _plain(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float)) or value is None else str(value)


def describe_running_caches() -> list[dict[str, Any]]:
    """Return the state of each running cache, or the reason where one does not answer."""
    from kvcache.daemon.client.control import find_caches, send_command

    descriptions = []
    for found in find_caches():
        cache: dict[str, Any] = {"address": found.address, "info": dict(found.info)}
        try:
            cache["stats"] = send_command(found.path, "stats")
            cache.update(send_command(found.path, "events", count=MAX_EVENTS))
        except KVCacheError as error:
            cache["fault"] = str(error)
        descriptions.append(cache)
    return descriptions
