"""`kvcache ps`: the caches that run here."""

from __future__ import annotations

from collections.abc import Mapping
from time import time
from typing import Any

import typer

from kvcache.cli.output import Format, Json, Output, print_json, print_table
from kvcache.settings.types import show_bytes, show_seconds

COLUMNS = ("address", "program", "up", "models", "host", "nvme", "bypass")


def ps(output: Output = Format.table, as_json: Json = False) -> None:
    """Find the running caches of this user; each listens on a socket in the user's runtime directory."""
    from kvcache.daemon.client.control import find

    running = list(find())
    if as_json or output is Format.json:
        print_json([{"address": f.address, "socket": str(f.path), **f.info, "fault": f.fault} for f in running])
        return
    print_table(COLUMNS, [_row(f.address, f.info, f.fault) for f in running])


def _row(address: str, info: Mapping[str, Any], fault: str) -> tuple[str, ...]:
    if fault:
        return address, f"does not answer: {fault}"
    return (
        address,
        info["program"],
        show_seconds(time() - info["started"]),
        ", ".join(info["models"]),
        *(_used(info["tiers"].get(tier)) for tier in ("host", "nvme")),
        info["bypass"],
    )


def _used(tier: Mapping[str, int] | None) -> str:
    return f"{show_bytes(tier['used_bytes'])} of {show_bytes(tier['capacity_bytes'])}" if tier else ""


def register(app: typer.Typer) -> None:
    app.command("ps")(ps)
