"""The digests by which a request's blocks are named, before they are bound to a namespace (`docs/spec/key.md`).

Three origins, each a fact of the namespace:

    vllm    the engine's own block hashes, where every process makes the same: they bind media, salt and embeddings
    chain   our chain of tokens, with media and salt as extras, where vLLM's hashes are seeded by chance or not safe
    pages   the page chain of SGLang, for blocks that both engines are to find
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Any, Literal

from kvcache.block.chain import Chain, page_digests

ROOT = sha256(b"kvcache vllm chain 1\n").digest()

Origin = Literal["vllm", "chain", "pages"]


class Digests:
    """Those of one request, which grow as its tokens do. Each full block is hashed once."""

    def __init__(self, request: Any, origin: Origin, block_tokens: int, hash_tokens: int) -> None:
        self._request, self._origin = request, origin
        self._block_tokens, self._hashes = block_tokens, block_tokens // hash_tokens
        self._known: list[bytes] = []
        self._chain = Chain(ROOT, block_tokens)

    def first(self, blocks: int) -> Sequence[bytes]:
        """The digests of so many blocks, or of as many as are full."""
        full = min(blocks, self._request.num_tokens // self._block_tokens)
        if len(self._known) < full:
            {"vllm": self._vllm, "chain": self._tokens, "pages": self._pages}[self._origin](full)
        return self._known[:blocks]

    def _vllm(self, full: int) -> None:
        hashes = self._request.block_hashes
        full = min(full, len(hashes) // self._hashes)
        self._known += [bytes(hashes[(i + 1) * self._hashes - 1]) for i in range(len(self._known), full)]

    def _tokens(self, full: int) -> None:
        size, known = self._block_tokens, len(self._known)
        tokens = self._request.all_token_ids[known * size : full * size]
        self._chain.extend(list(tokens), [_extras(self._request, i, size) for i in range(known, full)])
        self._known += self._chain.signatures[known:full]

    def _pages(self, full: int) -> None:
        size, known = self._block_tokens, len(self._known)
        tokens = self._request.all_token_ids[known * size : full * size]
        self._known += page_digests(list(tokens), size, self._known[-1] if known else b"")


def unnamed(request: Any, origin: Origin) -> str:
    """Why the blocks of a request have no name, as the table of reasons calls it; "" where they have."""
    if origin != "vllm" and getattr(request, "prompt_embeds", None) is not None:
        return "embeddings"
    if origin == "pages" and request.mm_features:
        return "media"
    if getattr(request, "resumable", False):
        return "streamed input"
    return ""


def _extras(request: Any, block: int, size: int) -> list[tuple[bytes, bytes]]:
    """What identifies a block beside its tokens: the salt in the first one, media by hash and where they begin."""
    extras = []
    if block == 0 and request.cache_salt:
        extras.append((b"salt", request.cache_salt.encode()))
    start, end = block * size, (block + 1) * size
    for feature in request.mm_features or ():
        at, length = feature.mm_position.offset, feature.mm_position.length
        if at < end and at + length > start:
            extras.append((b"media", f"{at - start} {feature.identifier}".encode()))
    return extras
