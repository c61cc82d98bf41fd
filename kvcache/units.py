"""Sizes in bytes as people write and read them: "2GiB", "512 MB", 4096."""

from __future__ import annotations

import re
from decimal import Decimal

_FORM = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(?:([kmgtp]?)(i?)b|([kmgtp]?))\s*", re.IGNORECASE)
_POWER = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def parse_bytes(value: int | str) -> int:
    """Bytes of a size. K and KiB to P and PiB count in 1,024, kB to PB in 1,000; ValueError for what is no size."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    form = _FORM.fullmatch(value) if isinstance(value, str) else None
    if form is None or (form[3] and not form[2]):
        raise ValueError(f"{value!r} is no size; write bytes as a number, or 512MiB, 2GiB, 1.5TB")
    unit = (form[2] or form[4] or "").lower()
    base = 1000 if form[2] and not form[3] else 1024
    return int(Decimal(form[1]) * base ** _POWER[unit])


def show_bytes(count: float) -> str:
    """In the largest binary unit that leaves at least 1: "320 KiB", "2.5 GiB"."""
    size, power = float(count), 0
    while abs(size) >= 1024 and power < len(_BINARY) - 1:
        size, power = size / 1024, power + 1
    return f"{size:.4g} {_BINARY[power]}"
