"""When records go down: at once, on leaving host, on second use, never; a head is never missing where its tail is."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kvcache
from kvcache.tier.tier import Outcome, Ticket
from tests.contract.fake_engine import FULL, HYBRID, Engine, bind, store
from tests.peer.redis_server import MISSING, empty

KiB = 1 << 10
SHORT = list(range(40))  # ten blocks


def open_cache(path: Path, mode: str, tier: str = "nvme", host_bytes: int = 512 * KiB, **flow: Any) -> Any:
    nvme = {"path": path / "nvme", "capacity_bytes": 64 << 20, "min_free_bytes": 0, "write": mode}
    redis = {"enabled": True, "url": empty(path).unix, "write": mode} if tier == "redis" else {}
    objects = {"enabled": True, "url": f"file://{path}/objects", "write": mode} if tier == "object" else {}
    return kvcache.open(
        host={"capacity_bytes": host_bytes},
        nvme=nvme if tier == "nvme" else {"enabled": False},
        redis=redis,
        object=objects,
        flow=flow,
        control={"enabled": False},
    )


TIERS = ["nvme", "object", pytest.param("redis", marks=pytest.mark.skipif(bool(MISSING), reason=MISSING))]


@pytest.fixture(params=TIERS)
def tier(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def written(cache: Any, tier: str) -> int:
    assert cache.flush(30)
    return int(cache.counters.get("written_blocks", tier=tier))


def use(handle: Any, tokens: list[int]) -> None:
    with handle.request() as r:
        r.match(tokens)
        r.admit()


@pytest.mark.parametrize(
    ("mode", "stored", "used"), [("write_through", 10, 10), ("on_second_use", 0, 10), ("off", 0, 0)]
)
def test_each_mode_writes_at_its_time(tmp_path: Path, tier: str, mode: str, stored: int, used: int) -> None:
    with open_cache(tmp_path, mode, tier) as cache:
        handle = bind(cache)
        store(handle, Engine(FULL), SHORT, list(range(10)))
        assert written(cache, tier) == stored
        use(handle, [1000 + t for t in SHORT])
        assert written(cache, tier) == stored
        use(handle, SHORT)
        assert written(cache, tier) == used
        use(handle, SHORT)
        assert written(cache, tier) == used
        assert cache.check() == []


def test_a_failed_offer_does_not_delay_a_flush(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any) -> int:
        raise RuntimeError("no offers")

    with open_cache(tmp_path, "on_second_use") as cache:
        handle = bind(cache)
        store(handle, Engine(FULL), SHORT, list(range(10)))
        with monkeypatch.context() as patch:
            patch.setattr(cache.tier_manager.write_back_queues[0], "offer", fails)
            use(handle, SHORT)
            assert cache.flush(30).tiers["nvme"].reached == 10, "the flush offers them again"
        assert "RuntimeError: no offers" in caplog.text


def headless(cache: Any, tier: str, handle: Any, prompts: list[list[int]]) -> list[str]:
    """Blocks whose parent the tier has not, by prompt."""
    faults = []
    for prompt in prompts:
        with handle.request() as r:
            r.match(prompt)
            (chain,) = r._chains()
            there = [cache.index.contains(chain[i], tier) for i in range(len(chain))]
        if True in there and there != sorted(there, reverse=True):
            faults.append(f"{prompt[0]}: {there}")
    return faults


def test_evicted_blocks_are_written_with_their_heads(tmp_path: Path, tier: str) -> None:
    """Sixty prompts through a host that holds ten: what left comes back, byte for byte."""
    with open_cache(tmp_path, "write_back", tier) as cache:
        handle, engine = bind(cache), Engine(FULL)
        prompts = [[seed, *range(39)] for seed in range(60)]
        expected = []
        for seed, prompt in enumerate(prompts):
            engine.fill(seed, list(range(10)))
            expected.append([engine.block(page) for page in range(10)])
            if store(handle, engine, prompt, list(range(10))).blocks < 10:  # a drive that falls behind holds its slots
                assert cache.flush(30)
                assert store(handle, engine, prompt, list(range(10))).blocks == 10
            if seed == 0:
                assert written(cache, tier) == 0
        assert cache.flush(30)
        assert cache.counters.get("evicted_blocks", tier="host", kept="yes") > 200
        assert headless(cache, tier, handle, prompts) == []
        found = 0
        for prompt, blocks in zip(prompts, expected, strict=True):
            engine.poison()
            with handle.request() as r:
                hit = r.match(prompt)
                r.admit()
                transfer = r.load(hit.blocks, engine.described, engine.ids(list(range(hit.blocks))))
                assert transfer.wait(30)
                assert [engine.block(page) for page in range(transfer.blocks)] == blocks[: transfer.blocks]
                found += transfer.blocks
        assert found > 400
        assert cache.check() == []


_ANOTHER = """
import hashlib, json, sys
from pathlib import Path
from tests.contract.fake_engine import FULL, Engine, bind
from tests.cache.test_object_tier import final_match
from tests.cache.test_write_modes import open_cache
engine, said = Engine(FULL), []
flow = {"lookup_timeout_s": 60, "deadline_s": 60}
with open_cache(Path(sys.argv[1]), "write_back", "object", 8 << 20, **flow) as cache:
    bound = bind(cache)
    for prompt in json.loads(sys.argv[2]):
        engine.poison()
        with bound.request() as r:
            hit = final_match(r, prompt)
            r.admit()
            transfer = r.load(hit.blocks, engine.described, engine.ids(list(range(hit.blocks))))
            assert transfer.wait(60)
            said.append([hashlib.sha256(engine.block(page)).hexdigest() for page in range(transfer.blocks)])
    assert cache.check() == []
print(json.dumps(said))
"""


def test_another_process_reads_blocks_demoted_to_the_store(tmp_path: Path) -> None:
    """As much of each prompt as this process has in the store, byte for byte, while it is open; of what is in its host
    memory alone, nothing."""
    with open_cache(tmp_path, "write_back", "object") as cache:
        handle, engine = bind(cache), Engine(FULL)
        prompts = [[seed, *range(39)] for seed in range(30)]
        expected = []
        for seed, prompt in enumerate(prompts):
            engine.fill(seed, list(range(10)))
            expected.append([hashlib.sha256(engine.block(page)).hexdigest() for page in range(10)])
            store(handle, engine, prompt, list(range(10)))
            assert cache.flush(30)
        there = []
        for prompt in prompts:
            with handle.request() as r:
                r.match(prompt)
                (chain,) = r._chains()
                there.append(sum(cache.index.contains(chain[i], "object") for i in range(len(chain))))
        assert sum(there) > 100
        assert 0 in there
        command = [sys.executable, "-c", _ANOTHER, str(tmp_path), json.dumps(prompts)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        came = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=300)
        assert came.returncode == 0, came.stderr
        assert json.loads(came.stdout) == [blocks[:count] for blocks, count in zip(expected, there, strict=True)]
        assert cache.check() == []


def test_evictions_faster_than_writes_are_dropped(tmp_path: Path) -> None:
    with open_cache(tmp_path, "write_back", queue_blocks=4) as cache:
        handle, engine = bind(cache), Engine(FULL)
        prompts = [[seed, *range(39)] for seed in range(60)]
        for prompt in prompts:
            assert store(handle, engine, prompt, list(range(10))).blocks == 10
        report = cache.flush(30).tiers["nvme"]
        assert report.refused == report.lost == cache.counters.get("drops", reason="nvme queue") > 0
        assert headless(cache, "nvme", handle, prompts) == []
        assert cache.check() == []


def test_a_tail_is_dropped_if_its_head_was_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_cache(tmp_path, "write_through") as cache:
        handle, engine = bind(cache), Engine(FULL)
        (nvme,) = cache.lower_tiers
        submit = nvme.submit
        refuse: set[bytes] = set()

        def some(op: str, addresses: Any, segments: Any = (), **keywords: Any) -> Any:
            if op != "write" or not refuse:
                return submit(op, addresses, segments, **keywords)
            kept = [i for i, address in enumerate(addresses) if address.signature not in refuse]
            ticket = submit(op, [addresses[i] for i in kept], [segments[i] for i in kept], **keywords)
            ticket.wait()
            whole = Ticket(len(addresses))
            for i in range(len(addresses)):
                whole.settle(i, ticket.outcomes[kept.index(i)] if i in kept else Outcome.NO_CAPACITY)
            return whole

        monkeypatch.setattr(nvme, "submit", some)
        with handle.request() as r:
            r.match(SHORT)
            refuse.add(r.signatures[4])
        store(handle, engine, SHORT, list(range(10)))
        report = cache.flush(30).tiers["nvme"]
        assert (report.reached, report.refused, report.waiting, report.lost) == (4, 6, 0, 0)
        assert headless(cache, "nvme", handle, [SHORT]) == []
        refuse.clear()
        store(handle, engine, [*SHORT, 1, 2, 3, 4], [10], first_block=10)
        assert written(cache, "nvme") == 11
        assert cache.check() == []


def test_groups_without_head_rule_are_written_alone(tmp_path: Path) -> None:
    with open_cache(tmp_path, "write_back", host_bytes=512 * KiB) as cache:
        handle, engine = bind(cache, HYBRID), Engine(HYBRID)
        prompts = [[seed, *range(39)] for seed in range(40)]
        for prompt in prompts:
            store(handle, engine, prompt, list(range(10)))
        assert written(cache, "nvme") > 0
        assert cache.check() == []
