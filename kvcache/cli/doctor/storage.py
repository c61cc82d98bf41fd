"""One store, and one load through every tier: do the bytes come back that were given?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from time import perf_counter

import numpy as np

from kvcache.block.layout import KVLayout
from kvcache.cache.cache import Cache
from kvcache.cli.doctor.finding import Finding, fail, ok
from kvcache.codec.codec import codec
from kvcache.settings import Settings
from kvcache.settings.sources import load
from kvcache.settings.types import MiB
from kvcache.tier.tier import Outcome
from kvcache.transfer.pages import GroupPages

LAYOUT = KVLayout.mha(layers=4, kv_heads=2, head_dim=64, dtype="fp16")
BLOCKS = 16
AXES = ("kv", "page", "token", "head", "dim")
WAIT_S = 30.0

Bytes = np.ndarray[tuple[int, ...], np.dtype[np.uint16]]


def checks(settings: Settings, place: Path) -> Iterator[Finding]:
    """A small cache of its own in `place`, opened twice: the second time only the tiers that last have the blocks."""
    small = _settings(settings, place)
    given = np.random.default_rng().integers(0, 1 << 16, _shape(), np.uint16)
    with closing(Cache(small)) as cache:
        yield _store(cache, given)
        yield _load(cache, given, "host")
        yield from _flush(cache)
    if small.nvme.enabled:
        with closing(Cache(small)) as cache:
            yield _load(cache, given, "nvme")


def _flush(cache: Cache) -> Iterator[Finding]:
    """A finding where not every block is in the tiers below host memory."""
    report = cache.flush(WAIT_S)
    if report:
        return
    refused, waiting = (sum(getattr(t, name) for t in report.tiers.values()) for name in ("refused", "waiting"))
    faults = [report.fault, *(line for tier in cache.below for line in tier.troubles())]
    why = "".join(f"; {fault}" for fault in faults if fault)
    found = f"of {BLOCKS} blocks {refused} were refused and {waiting} still wait after at most {WAIT_S:g} s{why}"
    yield fail("flush", found, "the drive hangs, fails, is full or is very slow: see the system's log")


def _settings(settings: Settings, place: Path) -> Settings:
    lossless = not codec(settings.nvme.codec).error_bound  # ConfigError where its library is missing
    nvme = {
        "enabled": settings.nvme.enabled,
        "path": place / "nvme",
        "capacity_bytes": 64 * MiB,
        "codec": settings.nvme.codec if lossless else "raw",
        "durability": settings.nvme.durability,
        "free_floor_bytes": 0,
    }
    return load(environ={}, host={"capacity_bytes": 16 * MiB}, nvme=nvme, evict={"policy": settings.evict.policy})


def _shape() -> tuple[int, ...]:
    group = LAYOUT.groups[0]
    return (group.layers, 2, BLOCKS, LAYOUT.block_tokens, group.kv_heads, group.head_dim)


def _pages(tensors: Bytes) -> list[GroupPages]:
    return [GroupPages.from_tensors(LAYOUT, list(tensors), axes=AXES)]


def _store(cache: Cache, given: Bytes) -> Finding:
    began = perf_counter()
    with cache.namespace(LAYOUT, model="doctor", revision="1").request() as r:
        r.match(range(BLOCKS * LAYOUT.block_tokens))
        transfer = r.store(_pages(given), [list(range(BLOCKS))])
        transfer.wait(WAIT_S)
    return _judged("store", cache, transfer.outcomes, perf_counter() - began)


def _load(cache: Cache, given: Bytes, tier: str) -> Finding:
    name, got = f"load from {tier}", np.zeros_like(given)
    began = perf_counter()
    with cache.namespace(LAYOUT, model="doctor", revision="1").request() as r:
        hit = r.match(range(BLOCKS * LAYOUT.block_tokens))
        if hit.by_tier != {tier: BLOCKS}:
            found = f"{BLOCKS} blocks were stored; found {dict(hit.by_tier) or 'none'}"
            return fail(name, found, _REPORT)
        r.admit()
        transfer = r.load(BLOCKS, _pages(got), [list(range(BLOCKS))])
        transfer.wait(WAIT_S)
    judged = _judged(name, cache, transfer.outcomes, perf_counter() - began)
    if judged.state == "ok" and not np.array_equal(got, given):
        return fail(name, "other bytes came back than were stored", _REPORT)
    return judged


_REFUSED = "refused_records"
_REPORT = "this is a defect of kvcache or of the drive: report it with `kvcache doctor --bundle FILE`"


def _judged(name: str, cache: Cache, outcomes: tuple[Outcome, ...], seconds: float) -> Finding:
    bad = sorted({outcome.value for outcome in outcomes if outcome is not Outcome.DONE})
    if bad:
        rows = (labels for name, labels, _ in cache.counters.rows() if name == _REFUSED)
        refused = [f"{labels['check']} in {labels['tier']}" for labels in rows]
        found = f"not all of {len(outcomes)} blocks came through: {', '.join([*bad, *refused])}"
        return fail(name, found, _REPORT)
    return ok(name, f"{len(outcomes)} blocks in {seconds * 1000:.1f} ms")
