"""Leaves secrets out of what is handed to others: by the name of a field, by the form of a text, and by value."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

HIDDEN = "***"
LEAST = 6
"""Characters of a known secret that is looked for in all texts: a shorter one would be found everywhere."""

_ANYWHERE = {"password", "passwd", "pwd", "passphrase", "secret", "secrets", "credential", "credentials", "apikey"}
_LAST = {"token", "key", "keys", "auth", "authorization", "cookie", "salt", "dsn"}
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")

_FORMS = (
    # a URL: who, before the @; and all that is asked, after the ?
    (re.compile(r"(\b[a-zA-Z][\w+.-]*://)[^\s\"'<>]*@"), rf"\1{HIDDEN}@"),
    (re.compile(r"(\b[a-zA-Z][\w+.-]*://[^\s\"'<>?]*\?)[^\s\"'<>]+"), rf"\1{HIDDEN}"),
    # password = "...", api_key: ..., --token ...
    (
        re.compile(
            r"(?i)((?:password|passwd|pwd|passphrase|secret|credentials?|token|api[_-]?key|access[_-]?key|[\w.-]*_key"
            r"|[\w.-]*_token|salt|authorization)[\"']?\s*(?:[=:]|\s(?=[\"']))\s*)"
            r"(?:\"[^\"\n]*\"|'[^'\n]*'|(?:(?:bearer|basic)\s+)?[^\s,;)\]}]+)"
        ),
        rf"\1{HIDDEN}",
    ),
    (re.compile(r"(?i)(--[\w-]*(?:password|secret|token|key)\s+)\S+"), rf"\1{HIDDEN}"),
    (re.compile(r"(?i)\b(bearer|basic)\s+[\w.~+/=-]{6,}"), rf"\1 {HIDDEN}"),
    # what some services' keys look like
    (re.compile(r"\b(?:hf_|sk-|pk-|ghp_|gho_|ghs_|github_pat_|glpat-|xox[abprs]-|AKIA|ASIA)[\w-]{8,}"), HIDDEN),
    (re.compile(r"\beyJ[\w-]{8,}\.[\w-]+\.[\w-]*"), HIDDEN),
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL), HIDDEN),
)


def is_secret(name: str) -> bool:
    """Whether a field of that name holds one: `redis.password`, `HF_TOKEN`, `api-key`; but not `block_tokens`."""
    words = [word.lower() for word in _WORD.findall(name)]
    return bool(words) and (words[-1] in _LAST or not _ANYWHERE.isdisjoint(words))


def known(environ: Mapping[str, str]) -> list[str]:
    """Values of variables with such names: never to be seen in any text either."""
    return [value for name, value in environ.items() if is_secret(name) and len(value) >= LEAST]


def without_secrets(value: Any, known: Iterable[str] = ()) -> Any:
    """A copy of a tree of maps, lists and scalars, with every secret hidden."""
    return _hide(value, sorted(set(known), key=len, reverse=True))


def _hide(value: Any, known: list[str]) -> Any:
    if isinstance(value, Mapping):
        return {
            _hide(name, known) if isinstance(name, str) else name: (
                HIDDEN if is_secret(str(name)) and inner not in (None, "") else _hide(inner, known)
            )
            for name, inner in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_hide(inner, known) for inner in value]
    return _text(value, known) if isinstance(value, str) else value


def _text(text: str, known: list[str]) -> str:
    for secret in known:
        text = text.replace(secret, HIDDEN)
    for form, instead in _FORMS:
        text = form.sub(instead, text)
    return text
