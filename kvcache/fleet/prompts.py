"""The prefixes that a file names: a JSON value a line.

    {"text": "You are a helpful assistant. ..."}
    {"messages": [{"role": "system", "content": "..."}]}
    {"token_ids": [1, 2, 3]}

A text or a list of token ids may stand alone. Empty lines, and lines that begin with #, are left out.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from kvcache.errors import ConfigError

Kind = Literal["text", "messages", "token_ids"]


@dataclass(frozen=True, slots=True)
class Prompt:
    kind: Kind
    content: Any

    def digest(self, model: str) -> str:
        """32 hexadecimal digits: the same on every node for the same prompt to the same model."""
        told = json.dumps([model, self.kind, self.content], ensure_ascii=False, sort_keys=True, separators=(",", ":"))
        return sha256(told.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def read(path: Path) -> list[Prompt]:
    """In the file's order. ConfigError, with the line, for what is none."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give a file with a prompt a line") from None
    except ValueError:
        raise ConfigError(f"{path}: not UTF-8; give a file with a JSON value a line") from None
    prompts = []
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.lstrip().startswith("#"):
            prompts.append(_prompt(line, f"{path}, line {number}"))
    return prompts


def _prompt(line: str, where: str) -> Prompt:
    try:
        said = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON: {error}; a text stands in quotation marks") from None
    if isinstance(said, str):
        said = {"text": said}
    elif isinstance(said, list):
        said = {"token_ids": said}
    if isinstance(said, dict) and len(said) == 1:
        (kind, content), *_ = said.items()
        if kind == "text" and isinstance(content, str) and content:
            return Prompt("text", content)
        if kind == "token_ids" and _is_list_of(content, int) and min(content) >= 0:
            return Prompt("token_ids", content)
        if kind == "messages" and _is_list_of(content, dict):
            return Prompt("messages", content)
    raise ConfigError(f"{where}: expected text, a list of messages, or token_ids, and nothing beside it")


def _is_list_of(content: object, kind: type) -> bool:
    return (
        isinstance(content, list)
        and bool(content)
        and all(isinstance(each, kind) and not isinstance(each, bool) for each in content)
    )
