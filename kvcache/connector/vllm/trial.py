"""`mode = "observe"`: a trial without risk. Blocks are named and remembered, none is stored or loaded.

What would have been found is counted in the cache's own rows: `asked_tokens`, `hit_tokens` and `misses` of this traffic
in an LRU of the capacity that is set for host and the drive together, and what more or less of that would find (the
curve). Tiers are not told apart: all is `host`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

import numpy as np

from kvcache.config import load
from kvcache.connector.vllm.identity import Who
from kvcache.connector.vllm.options import Options
from kvcache.evict.lru import LRU
from kvcache.evict.policy import AGE_BINS, Evidence
from kvcache.hierarchy.curve import Curve
from kvcache.hierarchy.kinds import Model
from kvcache.observe.metrics import Counters
from kvcache.port import Port

MOST_GONE = 1 << 18
"""Blocks that made room and are remembered, so that a miss has its reason."""


class Trial:
    def __init__(self, capacity_bytes: int, *, samples: int = 0) -> None:
        """`samples`: blocks that stand for all, for the curve; 0 for none."""
        self.capacity_bytes = capacity_bytes
        self._gone: OrderedDict[tuple[Who, bytes], None] = OrderedDict()
        self._player = Port().executor(1, "curve")
        policy = LRU()
        values = policy.values(Evidence(*[np.zeros((1, AGE_BINS), np.int64)] * 3))
        self._curve = Curve({"host": capacity_bytes}, policy, lambda: values, self._player.submit, samples=samples)
        self.used_bytes = 0
        self._sizes: OrderedDict[tuple[Who, bytes], int] = OrderedDict()
        self._counters = Counters()

    @classmethod
    def of(cls, options: Options) -> Trial:
        settings = load(options.config, **options.settings)
        drive = settings.nvme.capacity_bytes if settings.nvme.enabled else 0
        return cls(settings.host.capacity_bytes + drive, samples=settings.evict.curve_samples)

    def ask(self, who: Who, digests: Sequence[bytes], block_tokens: int, block_bytes: int = 0) -> int:
        """The blocks from the front that would have been found; they count as used. The curve wants a block's bytes."""
        found = 0
        for digest in digests:
            if (who, digest) not in self._sizes:
                break
            found += 1
        for digest in reversed(digests[:found]):  # heads are used last, so that tails leave first
            self._sizes.move_to_end((who, digest))
        self._counters.add("requests")
        self._counters.add("asked_tokens", len(digests) * block_tokens)
        self._counters.add("hit_tokens", found * block_tokens, tier="host")
        if found < len(digests):
            self._counters.add("misses", reason="evicted" if (who, digests[found]) in self._gone else "cold")
        if block_bytes and digests:
            whose = repr(who).encode()
            signatures = b"".join(sha256(whose + digest).digest() for digest in digests)
            model = Model((), block_tokens, (block_bytes,))
            self._curve.add(signatures, len(digests), model, (who.tenant, "", ""))
        return found

    def keep(self, who: Who, digests: Sequence[bytes], block_bytes: int) -> None:
        for digest in digests:
            if (who, digest) not in self._sizes:
                self._sizes[who, digest] = block_bytes
                self.used_bytes += block_bytes
        while self.used_bytes > self.capacity_bytes:
            name, size = self._sizes.popitem(last=False)
            self.used_bytes -= size
            self._gone[name] = None
        while len(self._gone) > MOST_GONE:
            self._gone.popitem(last=False)

    def stats(self) -> dict[str, Any]:
        tier = {"records": len(self._sizes), "used_bytes": self.used_bytes, "capacity_bytes": self.capacity_bytes}
        return {
            "tiers": {"host": {**tier, "held_bytes": 0}},
            "counters": self._counters.tree(),
            "curve": self._curve.rates(),
        }

    def curve(self) -> dict[str, Any]:
        """As `kvcache.hierarchy.curve` tells it."""
        return self._curve.tell()

    def close(self) -> None:
        self._player.close()
        self._sizes.clear()
        self._gone.clear()
