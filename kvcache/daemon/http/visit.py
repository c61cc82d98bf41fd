"""Asks a daemon's page for figures, as a program."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urljoin, urlsplit
from urllib.request import Request, urlopen

from kvcache.errors import AccessError, ConfigError, UnreachableError

TIMEOUT_S = 30.0


def visit(
    url: str, path: str, token_file: Path | None = None, environ: Mapping[str, str] = os.environ
) -> dict[str, Any]:
    """The answer. AccessError where the token will not do, UnreachableError where no page of ours answers."""
    if urlsplit(url).scheme not in {"http", "https"}:
        raise ConfigError(f"url = {url!r:.80}: expected http://HOST:PORT/ or https://HOST:PORT/")
    token = environ.get("KVCACHE_TOKEN", "") if token_file is None else token_file.read_text(encoding="utf-8").strip()
    headers = {"Accept": "application/json", **({"Authorization": f"Bearer {token}"} if token else {})}
    request = Request(urljoin(url if url.endswith("/") else url + "/", path), headers=headers)  # noqa: S310  checked
    try:
        with urlopen(request, timeout=TIMEOUT_S) as answer:  # noqa: S310  the same
            told = json.load(answer)
    except HTTPError as error:
        with error:
            said = error.read(4096).decode("utf-8", "replace")
        if error.code in {401, 403}:
            raise AccessError(f"{url}: {_why(said)}") from None
        raise UnreachableError(f"{url}: {error.code}, {_why(said)}") from None
    except (URLError, OSError, ValueError) as error:
        raise UnreachableError(f"{url}: {getattr(error, 'reason', error)}; is it a daemon's page?") from None
    if not isinstance(told, dict) or "time" not in told:
        raise UnreachableError(f"{url}: an answer that is none of ours; is it a daemon's page?")
    return told


def _why(said: str) -> str:
    try:
        return str(json.loads(said)["error"])
    except (ValueError, TypeError, KeyError):
        return "no reason was given"
