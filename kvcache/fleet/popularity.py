"""The most used chains of a fleet: one count per chain in Redis, with exponential decay, reported by every node.

Each node periodically reports the prefixes that its recent requests matched. A thread does this, so that no request
waits for it.

A score is log2(count) + now / half life. Old scores need no update, and compare with new ones as they are. A use at
time `now` changes a score s to log2(2^s + 2^now), with `now` in half lives.

The number of chains is bounded: the coldest is removed, except the one just reported, because otherwise no new chain
could collect a second use. The length of a chain is bounded too: a longer one is cut to its first blocks.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter

from kvcache.block.chain import SIGNATURE_BYTES
from kvcache.cache.cache import Cache
from kvcache.fleet.coordination import Coordination
from kvcache.log import log_faults, logger
from kvcache.tier.redis.keys import popularity_keys

MAX_CHAINS = 256
"""Per namespace, in the server."""
MAX_CHAIN_BLOCKS = 2048
"""Per chain: 64 KiB of signatures."""
MAX_REPORTED_CHAINS = 64
"""Most chains in one report of a node; the most used are reported."""
REPORT_INTERVAL_S = 30.0
HALF_LIFE_S = 3600.0
_EXPIRE_S = 7 * 86_400

_ADD = b"""local new = tonumber(ARGV[2]) + math.log(tonumber(ARGV[3])) / math.log(2)
local was = tonumber(redis.call('ZSCORE', KEYS[1], ARGV[1]))
if was then
  local high, low = math.max(was, new), math.min(was, new)
  new = high + math.log(1 + 2 ^ (low - high)) / math.log(2)
end
redis.call('ZADD', KEYS[1], string.format('%.17g', new), ARGV[1])
redis.call('HSET', KEYS[2], ARGV[1], ARGV[4])
local over = redis.call('ZCARD', KEYS[1]) - tonumber(ARGV[5])
if over > 0 then
  for _, cold in ipairs(redis.call('ZRANGE', KEYS[1], 0, over)) do
    if over > 0 and cold ~= ARGV[1] then
      redis.call('ZREM', KEYS[1], cold)
      redis.call('HDEL', KEYS[2], cold)
      over = over - 1
    end
  end
end
redis.call('EXPIRE', KEYS[1], ARGV[6])
redis.call('EXPIRE', KEYS[2], ARGV[6])
return 1"""
_HOTTEST = b"""local found = {}
for _, chain in ipairs(redis.call('ZREVRANGE', KEYS[1], 0, ARGV[1] - 1)) do
  found[#found + 1] = redis.call('HGET', KEYS[2], chain) or ''
end
return found"""

_log = logger("kvcache.fleet")


class Popularity:
    """The counts of a fleet, by namespace. OSError where no server answers."""

    def __init__(
        self, coordination: Coordination, *, half_life_s: float = HALF_LIFE_S, chains: int = MAX_CHAINS
    ) -> None:
        self._coordination, self._half_life_s, self._chains = coordination, half_life_s, chains

    def add(self, namespace: bytes, packed: bytes, uses: int, wall_s: float) -> None:
        """Add uses to a chain.

        Args:
            namespace: Id of the namespace.
            packed: The chain's signatures.
            uses: Number of uses.
            wall_s: Time of the uses, in seconds since 1970.
        """
        packed = packed[: MAX_CHAIN_BLOCKS * SIGNATURE_BYTES]
        name, now = packed[-SIGNATURE_BYTES:], wall_s / self._half_life_s
        bounds = (b"%d" % self._chains, b"%d" % _EXPIRE_S)
        self._coordination.script(
            _ADD,
            popularity_keys(self._coordination.prefix, namespace),
            name,
            b"%.17g" % now,
            b"%d" % uses,
            packed,
            *bounds,
        )

    def hottest(self, namespace: bytes, count: int) -> list[bytes]:
        """Return the signatures of the most used chains, hottest first; malformed ones are omitted."""
        chains = self._coordination.script(
            _HOTTEST, popularity_keys(self._coordination.prefix, namespace), b"%d" % max(1, count)
        )
        if not isinstance(chains, list):
            return []
        return [each for each in chains if isinstance(each, bytes) and each and not len(each) % SIGNATURE_BYTES]


class PopularityReporter:
    """Reports the prefixes that a cache's requests matched. Its thread ends at `close`, or with the cache."""

    def __init__(self, cache: Cache, popularity: Popularity, *, report_interval_s: float = REPORT_INTERVAL_S) -> None:
        self._cache, self._popularity, self._report_interval_s = weakref.ref(cache), popularity, report_interval_s
        self._reported_clock = 0  # the cache's clock, in requests
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvcache-popularity", daemon=True)
        self._thread.start()

    def report(self) -> int:
        """Report matches since the last report; return the number of chains."""
        cache = self._cache()
        if cache is None:
            return 0
        recent = cache.miss_explainer.recent_requests.last()
        entries = [each for each in recent if each.clock > self._reported_clock and each.hit_blocks]
        if not entries:
            return 0
        self._reported_clock = max(each.clock for each in entries)
        uses = Counter((each.namespace, each.packed[: each.hit_blocks * SIGNATURE_BYTES]) for each in entries)
        now = cache.os_env.clock.wall()
        top_chains = uses.most_common(MAX_REPORTED_CHAINS)
        for (namespace, packed), count in top_chains:
            self._popularity.add(namespace, packed, count, now)
        return len(top_chains)

    def _run(self) -> None:
        while not self._over.wait(self._report_interval_s) and self._cache() is not None:
            with log_faults(_log, "updating the fleet's use counts failed"):
                try:
                    self.report()
                except OSError as error:  # the tier counts this error
                    _log.debug("cannot update the fleet's use counts: %s", error)

    def close(self) -> None:
        """Stop the thread; wait for a report that is running, which has a deadline."""
        self._over.set()
        self._thread.join()
