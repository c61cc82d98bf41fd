"""The names that SGLang gives pages, for engines that share blocks with it: `docs/spec/key.md`, its page chain."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

from kvcache.block.key import tokens

IDENTITY = "sglang page chain: sha256(previous digest, token ids), seeded by adapter and salt"
"""The origin of these digests, as a namespace's facts name it."""


def page_digests(token_ids: Any, page_tokens: int, seed: bytes = b"") -> list[bytes]:
    """One digest a full page. `seed`: nothing, or what SGLang makes of an adapter and a salt; TokenError for no ids."""
    ids = memoryview(tokens(token_ids).tobytes())
    size, digests, before = 4 * page_tokens, [], seed
    for page in range(len(ids) // size):
        before = sha256(before + ids[page * size : (page + 1) * size]).digest()
        digests.append(before)
    return digests
