"""A prompt as it is typed: text of which a tokenizer makes ids, or the ids themselves."""

from __future__ import annotations

import json
from array import array

from kvcache.errors import ConfigError


def token_ids(text: str, model: str | None) -> bytes:
    """uint32, little-endian; ConfigError where they cannot be known."""
    try:
        given = json.loads(text)
    except ValueError:
        given = None
    if isinstance(given, list):
        try:
            return array("I", given).tobytes()
        except (TypeError, OverflowError):
            raise ConfigError("a JSON list, but not of token ids: expected integers from 0 to 4294967295") from None
    if model is None:
        raise ConfigError(
            f"{text[:40]!r}: no request of that id is remembered; for a prompt, name its tokenizer with --model, or "
            "give its token ids as a JSON list"
        )
    from kvcache.cli.vocabulary import tokenizer_of

    return array("I", tokenizer_of(model).encode(text)).tobytes()
