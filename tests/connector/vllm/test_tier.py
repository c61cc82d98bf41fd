"""The tier under vLLM's own offloading, as its manager asks it: chunks by key, jobs, and what did not come."""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from hashlib import sha256
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kvcache.connector.vllm as package
from kvcache.testing.faulty_cache import FaultyCache, RaisingProxy
from kvcache.testing.naive_cache import NaiveCache

CHUNKS, CHUNK_BYTES, TOKENS = 16, 256, 4
TIER = "kvcache.connector.vllm.tier"
Make = Callable[..., "Manager"]


class Found(Enum):
    HIT = 1
    MISS = 2
    RETRY = 3


@dataclass
class JobResult:
    job_id: int
    success: bool
    successful_keys: Any = None
    transfer_time: float = 0.0
    transfer_bytes: int = 0


class SecondaryTierManager:
    def __init__(self, spec: Any, view: memoryview, tier_type: str, detector: Any) -> None:
        self.block_size_bytes = CHUNK_BYTES


@dataclass
class Manager:
    """vLLM's, as far as it asks one tier."""

    tier: Any
    memory: Any
    jobs: int = 0
    keys: dict[str, list[bytes]] = field(default_factory=dict)

    def context(self, request: str) -> Any:
        at = {key: i * TOKENS for i, key in enumerate(self.keys[request])}
        return SimpleNamespace(req_id=request, get_offload_key_position=at.get)

    def begin(self, request: str, prompt: int, length: int) -> list[bytes]:
        keys = [sha256(b"%d %d" % (prompt, i)).digest() + bytes(4) for i in range(length)]
        self.keys[request] = keys
        self.tier.on_new_request(self.context(request))
        return keys

    def look(self, request: str, key: bytes) -> Any:
        return self.tier.lookup(key, self.context(request))

    def move(self, request: str, keys: list[bytes], chunks: list[int], *, load: bool) -> JobResult:
        self.jobs += 1
        job = SimpleNamespace(job_id=self.jobs, keys=keys, chunk_ids=chunks, req_context=self.context(request))
        (self.tier.submit_load if load else self.tier.submit_store)(job)
        for _ in range(1000):
            (result,) = self.tier.get_finished_jobs() or (None,)
            if result is not None:
                assert result.job_id == self.jobs
                return result
        raise AssertionError("a job has no end")

    def end(self, request: str) -> None:
        self.tier.on_request_finished(self.context(request))


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, any_vllm_version: None) -> Iterator[Make]:
    base: Any = ModuleType("vllm.v1.kv_offload.base")
    base.LookupResult, base.Medium = Found, SimpleNamespace(STORAGE="STORAGE")
    base.RequestOffloadingContext = SimpleNamespace
    tiering: Any = ModuleType("vllm.v1.kv_offload.tiering.base")
    tiering.JobResult, tiering.SecondaryTierManager, tiering.TransferJob = JobResult, SecondaryTierManager, object
    monkeypatch.setitem(sys.modules, base.__name__, base)
    monkeypatch.setitem(sys.modules, tiering.__name__, tiering)
    monkeypatch.delitem(sys.modules, TIER, raising=False)
    module = importlib.import_module(TIER)
    parallel = SimpleNamespace(tp_size=1, pp_size=1, pcp_size=1, dcp_size=1)
    config = SimpleNamespace(
        cache=SimpleNamespace(tokens_per_hash=TOKENS, blocks_per_chunk=1),
        model=SimpleNamespace(name="m", dtype="bf16"),
        engine_id="e",
        parallel=parallel,
        kv_cache_layout="LBNHC",
        canonical_layout=False,
        worker_kv_bytes_per_block=CHUNK_BYTES,
        groups=(),
    )

    def of(cache: Any, **told: Any) -> Manager:
        monkeypatch.setattr(module, "open_tier_cache", lambda _: cache)
        memory = np.zeros((CHUNKS, CHUNK_BYTES), np.uint8)
        told = told or {"revision": "r"}
        tier = module.KVCacheTier(SimpleNamespace(config=config), memoryview(memory), "KVCacheTier", **told)
        return Manager(tier, memory)

    yield of
    sys.modules.pop(TIER, None)
    vars(package).pop("tier", None)


def content(key: bytes) -> Any:
    return np.frombuffer((key * 8)[:CHUNK_BYTES], np.uint8)


def keep(manager: Manager, prompt: int, length: int) -> JobResult:
    keys = manager.begin("writer", prompt, length)
    for i, key in enumerate(keys):
        manager.memory[i] = content(key)
    result = manager.move("writer", keys, list(range(length)), load=False)
    manager.end("writer")
    return result


def test_an_unidentified_model_is_not_stored(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    manager = make(NaiveCache(), tenant="default")
    assert not keep(manager, 1, 5).success
    assert "give `revision`" in caplog.text
    keys = manager.begin("r", 1, 5)
    assert [manager.look("r", key) for key in keys] == [Found.MISS] * 5


def test_stored_blocks_load_into_other_chunks(make: Make) -> None:
    manager = make(NaiveCache())
    assert keep(manager, 1, 5).success
    keys = manager.begin("r", 1, 6)
    assert [manager.look("r", key) for key in keys] == [Found.HIT] * 5 + [Found.MISS]
    assert manager.move("r", keys[:5], [9, 8, 7, 11, 12], load=True).success
    assert all((manager.memory[at] == content(key)).all() for key, at in zip(keys, [9, 8, 7, 11, 12], strict=False))
    manager.end("r")
    manager.tier.shutdown()


def test_a_failed_load_is_not_promised_again(make: Make) -> None:
    """vLLM asks once more after a failed load: the same answer would be the same failure."""
    cache = FaultyCache()
    manager = make(cache)
    keep(manager, 1, 6)
    keys = manager.begin("r", 1, 6)
    cache.fault = "damaged"
    result = manager.move("r", keys, list(range(6, 12)), load=True)
    assert not result.success
    assert set(result.successful_keys) == set(keys[:3])
    cache.fault = "none"
    assert [manager.look("r", key) for key in keys] == [Found.HIT] * 3 + [Found.MISS] * 3
    manager.end("r")
    keys = manager.begin("s", 1, 6)
    assert [manager.look("s", key) for key in keys] == [Found.HIT] * 6, "another request may try"
    manager.tier.shutdown()


@pytest.mark.parametrize("seed", range(10))
def test_every_job_ends_without_wrong_bytes_on_errors(make: Make, seed: int) -> None:
    rng = random.Random(seed)
    part = [rng.choice([0.05, 0.2, 0.5])]
    manager = make(RaisingProxy(NaiveCache(), lambda _: rng.random() < part[0]))
    for i in range(30):
        prompt, length = rng.randrange(4), rng.randrange(1, 6)
        keep(manager, prompt, length)
        request = f"r{i}"
        keys = manager.begin(request, prompt, length)
        found = [key for key in keys if manager.look(request, key) is Found.HIT]
        if found:
            manager.memory[:] = 0
            result = manager.move(request, found, list(range(len(found))), load=True)
            came = set(found if result.success else result.successful_keys)
            for at, key in enumerate(found):
                assert key not in came or (manager.memory[at] == content(key)).all()
        manager.end(request)
    assert manager.tier._failed == {}
    part[0] = 0.0
    assert keep(manager, 99, 5).success
    manager.tier.shutdown()
