"""`mode = "observe"`: a trial without risk. Blocks are named and remembered, none is stored or loaded.

What would have been found is counted in the cache's own rows: `asked_tokens`, `hit_tokens` and `misses` of this traffic
in an LRU of the capacity that is set for host and the drive together. Tiers are not told apart: all is `host`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from kvcache.config import load
from kvcache.connector.vllm.identity import Who
from kvcache.connector.vllm.options import Options
from kvcache.observe.metrics import Counters


class Trial:
    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self._sizes: OrderedDict[tuple[Who, bytes], int] = OrderedDict()
        self._counters = Counters()

    @classmethod
    def of(cls, options: Options) -> Trial:
        settings = load(options.config, **options.settings)
        drive = settings.nvme.capacity_bytes if settings.nvme.enabled else 0
        return cls(settings.host.capacity_bytes + drive)

    def ask(self, who: Who, digests: Sequence[bytes], block_tokens: int) -> int:
        """The blocks from the front that would have been found; they count as used."""
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
            self._counters.add("misses", reason="cold")
        return found

    def keep(self, who: Who, digests: Sequence[bytes], block_bytes: int) -> None:
        for digest in digests:
            if (who, digest) not in self._sizes:
                self._sizes[who, digest] = block_bytes
                self.used_bytes += block_bytes
        while self.used_bytes > self.capacity_bytes:
            self.used_bytes -= self._sizes.popitem(last=False)[1]

    def stats(self) -> dict[str, Any]:
        tier = {"records": len(self._sizes), "used_bytes": self.used_bytes, "capacity_bytes": self.capacity_bytes}
        return {"tiers": {"host": {**tier, "held_bytes": 0}}, "counters": self._counters.tree()}

    def close(self) -> None:
        self._sizes.clear()
