"""A connector for an engine of one's own, whole: `docs/connector.md` walks through it.

The engine is a toy: the keys and values of a token are a digest of those before it, and so is the next token, which
makes one wrong byte in its pages a wrong answer.
"""

from __future__ import annotations

import hashlib

import numpy as np

import kvcache

LAYOUT = kvcache.KVLayout.mha(layers=2, kv_heads=2, head_dim=8, dtype="fp32")
BLOCK = LAYOUT.block_tokens


class Engine:
    """One prompt at a time, in pages 0, 1, 2 and so on. `patience_s`: how long it waits for a load."""

    def __init__(self, cache: kvcache.KVCache | None, *, weights: int = 0, pages: int = 64, patience_s: float = 1.0):
        self.kv = np.zeros((2, 2, pages, BLOCK, 2, 8), np.float32)  # layer, K and V, page, token, head, dim
        self.pages = [kvcache.GroupPages.from_tensors(LAYOUT, self.kv, axes=("kv", "page", "token", "head", "dim"))]
        self.weights, self.patience_s, self.reused_tokens = str(weights), patience_s, 0
        self.handle = cache.namespace(LAYOUT, model="toy", revision=self.weights) if cache else None

    def generate(self, prompt: list[int], tokens: int) -> list[int]:
        said, self.reused_tokens = list(prompt), 0
        if self.handle is None:
            return self.run(said, 0, tokens)
        with self.handle.request() as request:
            try:
                self.reused_tokens = self.load(request, said)
                answer = self.run(said, self.reused_tokens, tokens)
                request.extend(answer[:-1])  # the last token has no keys yet
                blocks = range(self.reused_tokens // BLOCK, len(request.signatures))
                request.store(self.pages, [list(blocks)], first_block=blocks.start).wait(self.patience_s)
            except kvcache.ClosedError:  # a cache that went away fails no request
                return self.run(list(prompt), 0, tokens)
        return answer

    def load(self, request: kvcache.Request, said: list[int]) -> int:
        """Tokens that need not be computed: whole blocks, and never the last token."""
        hit = request.match(said)
        blocks = min(hit.blocks, (len(said) - 1) // BLOCK)
        if hit.pending or not blocks:  # an engine with a queue would ask again later
            return 0
        request.admit()
        transfer = request.load(blocks, self.pages, [list(range(blocks))])
        if not transfer.wait(self.patience_s):
            transfer.cancel()
            transfer.wait()  # only then are the pages ours again
        return transfer.blocks * BLOCK  # as far as it came; the rest is a miss

    def run(self, said: list[int], computed: int, tokens: int) -> list[int]:
        """The model: fill in what is missing, take the next token, and so on."""
        prompt = len(said)
        while len(said) < prompt + tokens:
            for at in range(computed, len(said)):
                before = self.token(at - 1).tobytes() if at else self.weights.encode()
                digest = hashlib.shake_128(before + bytes([said[at]])).digest(2 * 64)
                self.token(at)[:] = np.frombuffer(digest, np.uint16).reshape(2, 2, 2, 8)
            computed = len(said)
            seen = b"".join(self.token(at).tobytes() for at in range(computed))
            said.append(hashlib.sha256(seen).digest()[0] % 250)
        return said[prompt:]

    def token(self, at: int) -> np.ndarray:
        return self.kv[:, :, at // BLOCK, at % BLOCK]

    def close(self) -> None: ...


if __name__ == "__main__":
    prompt = [i * i % 250 for i in range(100)]
    with kvcache.open(host__capacity_bytes="16MiB", nvme__enabled=False) as cache:
        for engine in (Engine(None), Engine(cache), Engine(cache)):
            print(engine.generate(prompt, 8), f"with {engine.reused_tokens} of {len(prompt)} tokens reused")
