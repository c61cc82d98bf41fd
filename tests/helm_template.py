"""The part of Helm's template language that our chart uses, and no other: what it does not know is an error."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import yaml

_ACTION = re.compile(r"[ \t\n]*\{\{- (.*?) \}\}|\{\{ (.*?) \}\}", re.DOTALL)
"""An action with a dash takes the white space before it away, line ends too."""


def render(text: str, data: Mapping[str, Any]) -> str:
    out: list[str] = []
    taken = [True]  # by `if`, the innermost last: whether its text is
    matched: list[bool] = []  # by `if`: whether one of its branches was
    at = 0
    for found in _ACTION.finditer(text):
        if all(taken):
            out.append(text[at : found.start()])
        at = found.end()
        action = found[1] or found[2]
        if action.startswith("if "):
            holds = bool(_value(action.removeprefix("if "), data))
            taken.append(holds)
            matched.append(holds)
        elif action == "else":
            taken[-1] = not matched[-1]
        elif action == "end":
            taken.pop()
            matched.pop()
        elif all(taken):
            out.append(_text(_value(action, data)))
    if len(taken) != 1:
        raise ValueError("an if without its end")
    return "".join(out) + text[at:]


def _value(expression: str, data: Mapping[str, Any]) -> Any:
    first, *steps = (part.strip() for part in expression.split("|"))
    value: Any
    if first.startswith("toYaml "):
        value = yaml.safe_dump(_path(first.removeprefix("toYaml "), data), default_flow_style=False).rstrip()
    else:
        value = _path(first, data)
    for step in steps:
        if step == "quote":
            value = json.dumps(_text(value))
        elif step.startswith("nindent "):
            value = "\n" + "\n".join(" " * int(step.split()[1]) + line for line in value.splitlines())
        else:
            raise ValueError(f"{step!r}: this renderer does not know it")
    return value


def _path(expression: str, data: Mapping[str, Any]) -> Any:
    if not re.fullmatch(r"(\.[A-Za-z]+)+", expression):
        raise ValueError(f"{expression!r}: this renderer does not know it")
    value: Any = data
    for name in expression.split(".")[1:]:
        value = value[name]
    return value


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
