"""Recorded prompts: a file of JSON lines, gzip or not, each an object with the prompt in `input`."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvcache.cli.demo.script import Prompt
from kvcache.engine.tokenizer import Tokenizer
from kvcache.errors import ConfigError

_GZIP = b"\x1f\x8b"


def read_prompts(path: Path, tokenizer: Tokenizer, *, longest_tokens: int) -> tuple[list[Prompt], int]:
    """The prompts of at most `longest_tokens`, in the order of the file, and how many were left out for being longer.

    Each is the user's message of a conversation. Its agent is the line's `session_id`, shortened, where it has one.
    """
    prompts, longer = [], 0
    for number, line in enumerate(_lines(path), 1):
        said = _object(path, number, line)
        token_ids = tokenizer.chat([{"role": "user", "content": said["input"]}])
        if len(token_ids) <= longest_tokens:
            prompts.append(Prompt(str(said.get("session_id", ""))[:8], token_ids))
        else:
            longer += 1
    if not prompts:
        raise ConfigError(
            f"--prompts {path}: no prompts of at most {longest_tokens} tokens; {longer} longer: give shorter ones"
        )
    return prompts, longer


def _lines(path: Path) -> Iterator[str]:
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if data.startswith(_GZIP) else data).decode()
    except (OSError, EOFError, ValueError) as error:  # not there; cut short; not UTF-8
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"--prompts {path}: {reason}: expected a file of JSON lines, gzip or not") from None
    return (line for line in text.split("\n") if line.strip())


def _object(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        said = json.loads(line)
        if said["input"].encode():  # which refuses half of a character
            return dict(said)
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise ConfigError(f"--prompts {path}, line {number}: expected an object with the prompt's text in `input`")
