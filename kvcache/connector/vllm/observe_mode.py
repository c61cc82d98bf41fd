"""`mode = "observe"`: a trial without risk. Blocks are named and remembered, and none is stored or loaded.

The cache's own metrics count what would have been found: `asked_tokens`, `hit_tokens` and `misses` of this traffic. The
model is an LRU with the capacity of host and drive together, plus the hit rate at other capacities (the curve). Tiers
are not distinguished: all hits count as `host`.

`saved_seconds` is the time to compute the tokens found, less the time to load them. The computing time is measured on
this engine's own steps. The loading time is the plan's initial estimate, of a drive where one is configured, because
nothing is loaded here that could be timed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

import numpy as np

from kvcache.cache.load_plan import INITIAL_LATENCY, INITIAL_PREFILL, LatencyModel
from kvcache.connector.vllm.config import Options
from kvcache.connector.vllm.identity import NamespaceKey
from kvcache.evict.policy import AGE_BINS, LRU, Evidence
from kvcache.index.cost_classes import ModelShape
from kvcache.index.mrc import MissRatioCurve
from kvcache.observe.metrics import Counters
from kvcache.os_env import OsEnv
from kvcache.settings.sources import load

MAX_EVICTED = 1 << 18
"""Limit of evicted blocks that are remembered, so that a miss has its reason."""


class ObserveMode:
    def __init__(self, capacity_bytes: int, *, samples: int = 0, slowest_tier: str = "host") -> None:
        """Create the model of a cache with `capacity_bytes`.

        `samples` is the number of sampled blocks for the curve, 0 for none. `slowest_tier` is the tier that loads are
        assumed to read from.
        """
        self.capacity_bytes = capacity_bytes
        self._computing, self._loading = LatencyModel(*INITIAL_PREFILL), LatencyModel(*INITIAL_LATENCY[slowest_tier])
        self._evicted: OrderedDict[tuple[NamespaceKey, bytes], None] = OrderedDict()
        self._player = OsEnv().executor(1, "curve")
        policy = LRU()
        values = policy.values(Evidence(*[np.zeros((1, AGE_BINS), np.int64)] * 3))
        self._curve = MissRatioCurve(
            {"host": capacity_bytes}, policy, lambda: values, self._player.submit, samples=samples
        )
        self.used_bytes = 0
        self._sizes: OrderedDict[tuple[NamespaceKey, bytes], int] = OrderedDict()
        self._counters = Counters()

    @classmethod
    def of(cls, options: Options) -> ObserveMode:
        settings = load(options.config, **options.settings)
        drive = settings.nvme.capacity_bytes if settings.nvme.enabled else 0
        return cls(
            settings.host.capacity_bytes + drive,
            samples=settings.evict.mrc_samples,
            slowest_tier="nvme" if drive else "host",
        )

    def computed(self, tokens: int, seconds: float) -> None:
        """Record that a step computed this many prompt tokens in this many seconds."""
        self._computing.learn(tokens, seconds)

    def lookup(
        self,
        namespace_key: NamespaceKey,
        digests: Sequence[bytes],
        block_tokens: int,
        block_bytes: int = 0,
        tokens: int | None = None,
    ) -> int:
        """Return the number of leading blocks that would have been found, and count them as used.

        Args:
            block_bytes: bytes of a block; the curve and the saved seconds need it.
            tokens: tokens of the prompt, with those that do not fill a block.
        """
        hits = 0
        for digest in digests:
            if (namespace_key, digest) not in self._sizes:
                break
            hits += 1
        for digest in reversed(digests[:hits]):  # heads are used last, so that tails are evicted first
            self._sizes.move_to_end((namespace_key, digest))
        self._counters.add("requests")
        self._counters.add("asked_tokens", len(digests) * block_tokens)
        self._counters.add("hit_tokens", hits * block_tokens, tier="host")
        self._save(len(digests) * block_tokens if tokens is None else tokens, hits * block_tokens, hits * block_bytes)
        if hits < len(digests):
            self._counters.add(
                "misses", reason="evicted" if (namespace_key, digests[hits]) in self._evicted else "cold"
            )
        if block_bytes and digests:
            key_bytes = repr(namespace_key).encode()
            signatures = b"".join(sha256(key_bytes + digest).digest() for digest in digests)
            model = ModelShape((), block_tokens, (block_bytes,))
            self._curve.add(signatures, len(digests), model, (namespace_key.tenant, "", ""))
        return hits

    def _save(self, tokens: int, found_tokens: int, found_bytes: int) -> None:
        if found_bytes and self._computing.known:
            rest = self._computing.seconds(max(1, tokens - found_tokens)) + self._loading.seconds(found_bytes)
            self._counters.add("saved_seconds", max(0.0, self._computing.seconds(tokens) - rest))

    def record_store(self, namespace_key: NamespaceKey, digests: Sequence[bytes], block_bytes: int) -> None:
        for digest in digests:
            if (namespace_key, digest) not in self._sizes:
                self._sizes[namespace_key, digest] = block_bytes
                self.used_bytes += block_bytes
        while self.used_bytes > self.capacity_bytes:
            name, size = self._sizes.popitem(last=False)
            self.used_bytes -= size
            self._evicted[name] = None
        while len(self._evicted) > MAX_EVICTED:
            self._evicted.popitem(last=False)

    def stats(self) -> dict[str, Any]:
        tier = {"records": len(self._sizes), "used_bytes": self.used_bytes, "capacity_bytes": self.capacity_bytes}
        return {
            "tiers": {"host": {**tier, "held_bytes": 0}},
            "counters": self._counters.tree(),
            "curve": self._curve.rates(),
        }

    def curve(self) -> dict[str, Any]:
        """Return the curve in the form of `kvcache.index.mrc`."""
        return self._curve.report()

    def close(self) -> None:
        self._player.close()
        self._sizes.clear()
        self._evicted.clear()
