"""A prefix outlives its process: stored, closed, opened again, loaded from the drive, compared byte for byte."""

from __future__ import annotations

import tempfile

import numpy as np

import kvcache

LAYOUT = kvcache.KVLayout.mha(layers=4, kv_heads=2, head_dim=64, dtype="fp32")
AXES = ("kv", "page", "token", "head", "dim")
PROMPT = list(range(1000, 1100))
BLOCKS = len(PROMPT) // LAYOUT.block_tokens


def tensors(fill: float | None = None) -> np.ndarray:
    """An engine's pages: layer, K and V, page, token, head, dim."""
    shape = (4, 2, 16, LAYOUT.block_tokens, 2, 64)
    made = np.random.default_rng(0).random(shape) if fill is None else np.full(shape, fill)
    return made.astype("float32")


def open_model(directory: str) -> tuple[kvcache.KVCache, kvcache.NamespaceHandle]:
    cache = kvcache.open(host__capacity_bytes="16MiB", nvme={"path": directory, "capacity_bytes": "64MiB"})
    return cache, cache.namespace(LAYOUT, model="example", revision="1")


def main() -> None:
    computed, page_ids = tensors(), list(range(BLOCKS))
    with tempfile.TemporaryDirectory() as directory:
        cache, model = open_model(directory)
        with model.request() as request:
            assert request.match(PROMPT).blocks == 0
            pages = [kvcache.GroupPages.from_tensors(LAYOUT, computed, axes=AXES)]
            request.store(pages, [page_ids]).wait()
        if not (report := cache.close()):
            raise SystemExit(f"not every block is on the drive: {report}")

        cache, model = open_model(directory)
        loaded, elsewhere = tensors(fill=-1), [15 - page for page in page_ids]
        with model.request() as request:
            hit = request.match(PROMPT)
            request.admit()
            pages = [kvcache.GroupPages.from_tensors(LAYOUT, loaded, axes=AXES)]
            transfer = request.load(hit.blocks, pages, [elsewhere[: hit.blocks]])
            transfer.wait()
        cache.close()

    print(f"{hit.tokens} of {len(PROMPT)} tokens found in {dict(hit.by_tier)}, {transfer.blocks} blocks loaded")
    assert transfer.blocks == BLOCKS
    assert np.array_equal(computed[:, :, page_ids], loaded[:, :, elsewhere])
    print("the same bytes")


if __name__ == "__main__":
    main()
