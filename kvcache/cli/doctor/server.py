"""Does the server that a fleet shares answer, is it set as a cache should be, and does a record come back from it?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from time import perf_counter

import numpy as np

from kvcache.block.layout import Shard
from kvcache.block.record import Address, header_area, record_bytes, seal
from kvcache.cli.doctor.finding import Finding, fail, ok, warn
from kvcache.settings import Settings
from kvcache.settings.types import show_bytes
from kvcache.tier.redis import RedisTier
from kvcache.tier.tier import Outcome, Tier

SIZE = 1 << 20


def checks(settings: Settings) -> Iterator[Finding]:
    """Writes one record of 1 MiB under a prefix of its own, and removes it."""
    given = settings.redis.model_dump(exclude={"enabled", "write"})
    with closing(RedisTier(**{**given, "prefix": f"{settings.redis.prefix[:57]}:doctor"})) as tier:
        began = perf_counter()
        policies = tier.policies()
        milliseconds = 1000 * (perf_counter() - began)
        if not policies:
            faults = [name.partition("_")[2] for name in tier.counters if name.startswith("faults_")]
            why = ", ".join(faults) or "no answer"
            remedy = "look at redis.url, the password, TLS and the server's log; until then everything there is a miss"
            yield fail("redis", f"{tier.where}: {why}", remedy)
            return
        usage = tier.usage()
        size = f"{show_bytes(usage.used_bytes)} of {show_bytes(usage.capacity_bytes)}"
        yield ok("redis", f"{tier.where} answers in {milliseconds:.1f} ms: {usage.records:,} keys, {size}")
        yield _policy(policies)
        yield trip(tier, "docs/operations.md tells which commands a user needs; see the server's log")


def _policy(policies: set[str]) -> Finding:
    if "" in policies:
        remedy = "CONFIG SET maxmemory: without a limit the server takes all there is, and is killed"
        return warn("redis memory", "maxmemory is not set", remedy)
    if "noeviction" in policies:
        remedy = "CONFIG SET maxmemory-policy allkeys-lru: else writes are refused once the server is full"
        return warn("redis memory", "maxmemory-policy is noeviction", remedy)
    return ok("redis memory", f"maxmemory-policy is {', '.join(sorted(policies))}")


def trip(tier: Tier, remedy: str) -> Finding:
    """One record there and back, and nothing left of it."""
    given = np.random.default_rng().bytes(SIZE)
    address = Address(given[:32], given[32:64], b"", 0, Shard(0, 1, 0, 1))
    out, back = (memoryview(bytearray(record_bytes(SIZE))) for _ in range(2))
    area = header_area(SIZE)
    out[area : area + SIZE] = given
    seal(out[:area], out[area:], address, stored_bytes=SIZE)
    began = perf_counter()
    (written,) = tier.write([address], [[out[:area], out[area:]]])
    (read,) = tier.read([address], [[back[:area], back[area:]]])
    seconds = perf_counter() - began
    tier.remove([address])
    if (written, read) != (Outcome.DONE, Outcome.DONE) or back[area : area + SIZE] != given:
        why = "".join(f", {line}" for line in tier.troubles())
        return fail(f"{tier.name} trip", f"a write was {written.value}, a read {read.value}{why}", remedy)
    return ok(f"{tier.name} trip", f"1 MiB there and back in {1000 * seconds:.1f} ms, the same bytes")
