"""What a setting can be: sizes, counts, seconds, directories, as people write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from kvcache.errors import ConfigError
from kvcache.units import parse_bytes, show_bytes

KiB, MiB, GiB = 1 << 10, 1 << 20, 1 << 30
PAGE_BYTES = 4096


def as_size(value: Any) -> Any:
    return parse_bytes(value) if isinstance(value, (str, bool)) else value


def as_directory(value: Any) -> Any:
    if not isinstance(value, (str, Path)) or not str(value).strip():
        raise ValueError("expected a directory")
    return Path(value).expanduser().absolute()


def as_directories(value: Any) -> Any:
    """A list of them, or one text with colons between, as variables and PATH have it."""
    parts = [part for part in value.split(":") if part] if isinstance(value, str) else value
    if not isinstance(parts, (list, tuple)) or len(set(map(str, parts))) != len(parts):
        raise ValueError("expected a list of directories, each once")
    return tuple(map(as_directory, parts))


def as_table(value: Any) -> Any:
    """A table, or one as JSON, as variables have it."""
    return json.loads(value) if isinstance(value, str) else value


def as_number(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("expected a number")
    return value


Bytes = Annotated[int, BeforeValidator(as_size), Field(ge=0, le=1 << 60)]
Pages = Annotated[int, BeforeValidator(as_size), Field(ge=PAGE_BYTES, le=1 << 60, multiple_of=PAGE_BYTES)]
Count = Annotated[int, BeforeValidator(as_number), Field(ge=1, le=1 << 30)]
Seconds = Annotated[float, BeforeValidator(as_number), Field(gt=0, allow_inf_nan=False)]


def made(how: str) -> dict[str, Any]:
    """Marks a default that is made from the machine; `how` stands in the page and in the origin."""
    return {"made": how}


def no_larger(name: str, value: int, limit_name: str, limit: int) -> None:
    if value > limit:
        raise ConfigError(
            f"{name} = {show_bytes(value)}: more than {limit_name} = {show_bytes(limit)}; give less, or more there"
        )


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
