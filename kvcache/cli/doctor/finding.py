"""What a check found: ok, a warning or a failure, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    name: str
    state: State
    found: str
    remedy: str = ""  # there is one wherever the state is not ok


def ok(name: str, found: str) -> Finding:
    return Finding(name, "ok", found)


def warn(name: str, found: str, remedy: str) -> Finding:
    return Finding(name, "warn", found, remedy)


def fail(name: str, found: str, remedy: str) -> Finding:
    return Finding(name, "fail", found, remedy)
