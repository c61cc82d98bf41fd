"""One file for a bug report: what the doctor found, settings, versions, and what running caches say; no secrets."""

from __future__ import annotations

import io
import json
import os
import tarfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvcache.cli.doctor.finding import Finding
from kvcache.cli.doctor.secrets import known, without_secrets
from kvcache.cli.doctor.software import versions
from kvcache.errors import KVCacheError
from kvcache.settings import PREFIX, TABLE, Settings

EVENTS = 200


def write_bundle(
    file: Path, findings: Sequence[Finding], settings: Settings | None, environ: Mapping[str, str] = os.environ
) -> None:
    """A tar.gz of JSON files, for its owner alone to read until it is sent."""
    parts = {
        "doctor.json": [asdict(finding) for finding in findings],
        "settings.json": {} if settings is None else _settings(settings),
        "environment.json": {name: value for name, value in environ.items() if name.startswith(PREFIX)},
        "versions.json": versions(),
        "running.json": running(),
    }
    hidden = known(environ)
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as whole, tarfile.open(fileobj=whole, mode="w:gz") as archive:
        for name, part in parts.items():
            text = json.dumps(without_secrets(part, hidden), indent=2).encode()
            entry = tarfile.TarInfo(f"kvcache-bundle/{name}")
            entry.size, entry.mode, entry.mtime = len(text), 0o600, int(time.time())
            archive.addfile(entry, io.BytesIO(text))


def _settings(settings: Settings) -> dict[str, Any]:
    return {name: {"value": _plain(settings.value(name)), "origin": settings.origin(name)} for name in TABLE}


def _plain(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float)) or value is None else str(value)


def running() -> list[dict[str, Any]]:
    """What each running cache says of itself; of one that does not answer, why."""
    from kvcache.daemon.client.control import ask, find

    told = []
    for found in find():
        cache: dict[str, Any] = {"address": found.address, "info": dict(found.info)}
        try:
            cache["stats"] = ask(found.path, "stats")
            cache.update(ask(found.path, "events", count=EVENTS))
        except KVCacheError as error:
            cache["fault"] = str(error)
        told.append(cache)
    return told
