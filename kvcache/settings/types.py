"""Types of settings: sizes, counts, seconds, directories."""

from __future__ import annotations

import json
import re
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from kvcache.errors import ConfigError

# Sizes and times in text: "2GiB", "512 MB", 4096; "7d", "90 s"

_FORM = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(?:([kmgtp]?)(i?)b|([kmgtp]?))\s*", re.IGNORECASE)
_POWER = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def parse_bytes(value: int | str) -> int:
    """Return the bytes of a size. K and KiB to P and PiB are powers of 1,024, kB to PB of 1,000.

    Raises ValueError for text that is no size.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    form = _FORM.fullmatch(value) if isinstance(value, str) else None
    if form is None or (form[3] and not form[2]):
        raise ValueError(f"{value!r} is not a size; write bytes as a number, or 512MiB, 2GiB, 1.5TB")
    unit = (form[2] or form[4] or "").lower()
    base = 1000 if form[2] and not form[3] else 1024
    return int(Decimal(form[1]) * base ** _POWER[unit])


def show_bytes(count: float) -> str:
    """Return a size in the largest binary unit with a value of at least 1: "320 KiB", "2.5 GiB"."""
    size, power = float(count), 0
    while abs(size) >= 1024 and power < len(_BINARY) - 1:
        size, power = size / 1024, power + 1
    return f"{size:.4g} {_BINARY[power]}"


_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86_400, "w": 604_800}
_TIME = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(s|min|h|d|w)\s*")


def parse_seconds(text: str) -> float:
    """Return the seconds of a time with a unit. Raises ValueError for other text."""
    form = _TIME.fullmatch(text)
    if form is None:
        raise ValueError(f"{text!r} is not a time; write a number and its unit: 90s, 30min, 12h, 7d, 2w")
    return float(form[1]) * _SECONDS[form[2]]


def show_seconds(seconds: float) -> str:
    """Return a time in the largest unit with a value of at least 2: "95 s", "37 min", "5 d"."""
    for unit in ("d", "h", "min"):
        if seconds >= 2 * _SECONDS[unit]:
            return f"{seconds / _SECONDS[unit]:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


KiB, MiB, GiB = 1 << 10, 1 << 20, 1 << 30
PAGE_BYTES = 4096


def as_size(value: Any) -> Any:
    return parse_bytes(value) if isinstance(value, (str, bool)) else value


def as_directory(value: Any) -> Any:
    if not isinstance(value, (str, Path)) or not str(value).strip():
        raise ValueError("expected a directory")
    return Path(value).expanduser().absolute()


def as_directories(value: Any) -> Any:
    """Accept a list of directories, or text with colons between them, as in variables and PATH."""
    parts = [part for part in value.split(":") if part] if isinstance(value, str) else value
    if not isinstance(parts, (list, tuple)) or len(set(map(str, parts))) != len(parts):
        raise ValueError("expected a list of directories, each once")
    return tuple(map(as_directory, parts))


def as_table(value: Any) -> Any:
    """Accept a table, or JSON text, as in variables."""
    return json.loads(value) if isinstance(value, str) else value


def as_number(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("expected a number")
    return value


Bytes = Annotated[int, BeforeValidator(as_size), Field(ge=0, le=1 << 60)]
Pages = Annotated[int, BeforeValidator(as_size), Field(ge=PAGE_BYTES, le=1 << 60, multiple_of=PAGE_BYTES)]
Count = Annotated[int, BeforeValidator(as_number), Field(ge=1, le=1 << 30)]
Seconds = Annotated[float, BeforeValidator(as_number), Field(gt=0, allow_inf_nan=False)]


def computed_default(how: str) -> dict[str, Any]:
    """Mark a default that depends on the machine. The settings page and the setting's origin show `how`."""
    return {"made": how}


def check_at_most(name: str, value: int, limit_name: str, limit: int) -> None:
    if value > limit:
        raise ConfigError(
            f"{name} = {show_bytes(value)}: more than {limit_name} = {show_bytes(limit)}; give less, or more there"
        )


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)  # a value may be a secret
