"""This library as a side: one cache in the process, asked through its public face as an engine would."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any

import torch
from harness import flush

import kvcache
from kvcache.block.record import record_bytes
from kvcache.cache.cache import Cache
from kvcache.cache.request import CacheNamespace
from kvcache.transfer.copier import CopierRegistry
from kvcache.transfer.pinned import address_of
from lmcache_comparison.worker_loop import serve
from lmcache_comparison.workload import BLOCK_TOKENS, KEPT_ON_DISK, LEAST, Pages, Shape, prompt, resident_bytes

MARGIN = 1.1  # of the arena over what it is meant to hold: extents are whole
DEADLINE_S = 60.0  # a slow drive is measured here, not turned into a miss


class KVCacheWorker:
    def name(self) -> str:
        return f"kvcache {kvcache.__version__}"

    def open(
        self,
        shape: Shape,
        tokens: int,
        room_tokens: int,
        directory: str | None = None,
        direct: bool = True,
        patience_s: float = 0,
        url: str = "",
        native: bool = False,
    ) -> None:
        """Room for `room_tokens` in host memory, prompts of `tokens`. With a directory also on the drive, always
        around the page cache, and waited for by `flush`; with a URL also in that server."""
        layers, heads, dim = shape
        self._tokens, self._pages = tokens, Pages(shape, tokens)
        group = kvcache.Group(layers=layers, kv_heads=heads, head_dim=dim, dtype="bf16")
        self._layout = kvcache.KVLayout((group,), block_tokens=BLOCK_TOKENS)
        self._block_bytes = self._layout.block_bytes()
        host = int(room_tokens // BLOCK_TOKENS * record_bytes(self._block_bytes) * MARGIN)
        nvme: dict[str, Any] = {"enabled": False}
        if directory:
            kept = KEPT_ON_DISK * tokens // BLOCK_TOKENS * record_bytes(self._block_bytes)
            nvme = {"path": directory, "capacity_bytes": kept, "min_free_bytes": 0}
        self._settings: dict[str, Any] = {
            "host": {"capacity_bytes": host},
            "nvme": nvme,
            "redis": {"enabled": True, "url": url} if url else {},
            "flow": {"lookup_timeout_s": DEADLINE_S, "queue_blocks": 1 << 15},  # more than any prompt here has
            "control": {"enabled": False},
            # As LMCache's: `hazard` may keep what is there, and take in nothing of prompts that are never used again.
            "evict": {"policy": "lru"},
        }
        self._begin()
        self._directory = directory
        self._taken: list[Any] = []
        axes = ("kv", "page", "token", "head", "dim")
        self._source = [kvcache.GroupPages.from_tensors(self._layout, self._pages.source, axes=axes)]
        self._target = [kvcache.GroupPages.from_tensors(self._layout, self._pages.target, axes=axes)]

    def _begin(self) -> None:
        """A cache that knows nothing of what it holds but what its tiers tell."""
        cache = kvcache.open(**self._settings)
        assert isinstance(cache, Cache)
        threads = torch.get_num_threads()
        cache.copiers = CopierRegistry(lambda call: call(), threads=threads)  # no setting: only a comparison wants one
        self._cache = cache
        self._handle = self._namespace("")

    def _namespace(self, salt: str) -> CacheNamespace:
        return self._cache.namespace(self._layout, model="Llama-3-8B", revision="1", cache_salt=salt)

    def store(self, seed: int) -> dict[str, float]:
        """Seconds until the pages may change again, and until it would survive a loss of power."""
        ids, page_ids = prompt(seed, self._tokens), [self._pages.order(seed).tolist()]
        begun = time.perf_counter()
        with self._handle.request(deadline_s=DEADLINE_S) as r:
            r.match(ids.numpy())
            r.store(self._source, page_ids).wait()
        stored = time.perf_counter() - begun
        flush(self._cache)
        return {"stored_s": stored, "durable_s": time.perf_counter() - begun}

    def retrieve(self, seed: int, salt: str = "") -> dict[str, Any]:
        """Seconds; of the tokens those that are said to be hits, those of them that came out of memory, and those that
        are not what was stored."""
        handle = self._namespace(salt)
        ids, page_ids = prompt(seed, self._tokens), self._pages.order(seed + 1).tolist()
        self._pages.forget()
        begun = time.perf_counter()
        with handle.request(deadline_s=DEADLINE_S) as r:
            hit = _settled(r, ids.numpy())
            r.admit()
            t = r.load(hit.blocks, self._target, [page_ids[: hit.blocks]])
            t.wait()
        seconds = time.perf_counter() - begun
        said = torch.arange(self._tokens) < t.blocks * BLOCK_TOKENS
        near = hit.by_tier.get("host", 0) * BLOCK_TOKENS
        return {"seconds": seconds, "hits": int(said.sum()), "near": near, "wrong": self._pages.wrong(seed, said)}

    def match(self, seed: int, kind: str, runs: int) -> list[float]:
        """Seconds of each look-up of a prompt that is all there: a torch tensor of int64, or a list."""
        ids: Any = prompt(seed, self._tokens)
        ids = ids.tolist() if kind == "list" else ids
        times = []
        for _ in range(runs):
            begun = time.perf_counter()
            with self._handle.request() as r:
                hit = r.match(ids if kind == "list" else ids.numpy())
            times.append(time.perf_counter() - begun)
            assert hit.tokens == self._tokens, hit
        return times

    def contains(self, seed: int, runs: int) -> list[float]:
        """Seconds until a process that has just begun knows that a server has all of a prompt; connecting is among
        them."""
        ids, times = prompt(seed, self._tokens).numpy(), []
        for _ in range(runs):
            self._cache.close()
            self._begin()
            begun = time.perf_counter()
            with self._handle.request(deadline_s=DEADLINE_S) as r:
                hit = _settled(r, ids)
            times.append(time.perf_counter() - begun)
            assert hit.by_tier == {"redis": self._tokens // BLOCK_TOKENS}, hit
        return times

    def hold(self, seed: int, runs: int) -> list[float]:
        """The same of a list, and its blocks kept from leaving until the request ends."""
        ids = prompt(seed, self._tokens).tolist()
        times = []
        for _ in range(runs):
            begun = time.perf_counter()
            with self._handle.request() as r:
                r.match(ids)
                r.admit()
            times.append(time.perf_counter() - begun)
        return times

    def evict(self, runs: int, tokens: int) -> list[float]:
        """Seconds to find room for so many tokens in a full host tier."""
        assert self._cache.host.free_slots(record_bytes(self._block_bytes)) == 0, "the host tier is not full"
        tier_manager, times = self._cache.tier_manager, []
        before = self._cache.index.tick()
        for _ in range(runs):
            begun = time.perf_counter()
            slots = tier_manager.slots(tokens // BLOCK_TOKENS, self._block_bytes, "default", before=before)
            times.append(time.perf_counter() - begun)
            assert len(slots) == tokens // BLOCK_TOKENS
            self._taken += slots
        return times

    def structure(self, name: str, records: int) -> float:
        """Bytes a cached token of all that is kept beside keys and values, whatever the peer's structure. Once a
        process: memory that was freed before would not count."""
        tokens = records * BLOCK_TOKENS
        self.open(LEAST, tokens, tokens)
        before = self._beside()
        self.store(0)
        return (self._beside() - before) / tokens

    def _beside(self) -> int:
        """Memory of this process that is not the arena's, where keys and values lie."""
        arena: list[tuple[int, int]] = []

        def came(memory: memoryview) -> None:
            first = address_of(memory)
            arena.append((first, first + memory.nbytes))

        self._cache.host.arena.watch(came)
        gc.collect()
        return resident_bytes(without=arena)

    def files(self) -> list[str]:
        """Where the bytes of blocks lie."""
        return sorted(map(str, Path(str(self._directory)).glob("segment-*")))

    def close(self) -> None:
        self._cache.close()


def _settled(r: Any, ids: Any) -> Any:
    """The hit that stands once no tier is asked any more."""
    hit = r.match(ids)
    while hit.pending:
        time.sleep(0.0001)
        hit = r.match()
    return hit


if __name__ == "__main__":
    serve(KVCacheWorker())
