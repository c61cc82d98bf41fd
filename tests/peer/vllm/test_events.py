"""KV events as vLLM publishes them: what a router reads from its socket is where the blocks are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.peer.ports import free_port
from tests.peer.redis_server import MISSING, RedisServer
from tests.peer.vllm.conftest import Run, cache
from tests.peer.vllm.prompts import ask, ids

A, B = ids(700, 1), ids(700, 2)


def published() -> dict[str, Any]:
    address = f"tcp://127.0.0.1:{free_port()}"
    return {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "inproc://kv", "replay_endpoint": address}


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
def test_vllm_publishes_events_of_a_shared_tier(run: Run) -> None:
    server, told = RedisServer("--maxmemory", "512mb"), published()
    options = cache(Path("unused"))
    options["settings"] |= {"nvme": {"enabled": False}, "redis": {"enabled": True, "url": server.tcp}}
    try:
        result = run([ask(A), "flush", f"events {told['replay_endpoint']}"], connector=options, events=told)
    finally:
        server.end()
    found = [e for e in result["rounds"][-1] if e["type"] == "BlockStored"]
    by_tier = {tier: [e for e in found if e["ownership"] == f"kvcache {tier}"] for tier in ("host", "redis")}
    assert {(e["medium"], e["locality"]) for e in by_tier["host"]} == {("CPU", "LOCAL")}
    assert {(e["medium"], e["locality"]) for e in by_tier["redis"]} == {("STORAGE", "REMOTE")}
    chains = []
    for events in by_tier.values():
        chain: dict[Any, tuple[Any, list[int]]] = {}  # by hash: its parent, its tokens
        for event in events:
            parent, size = event["parent_block_hash"], event["block_size"]
            for i, name in enumerate(event["block_hashes"]):
                chain[name] = parent, event["token_ids"][i * size : (i + 1) * size]
                parent = name
        chains.append(chain)
    assert chains[0] == chains[1]
    (last,) = set(chains[0]) - {parent for parent, _ in chains[0].values()}
    tokens: list[int] = []
    while last is not None:
        last, ids_of = chains[0][last]
        tokens = ids_of + tokens
    assert tokens == (A + result["rounds"][0]["tokens"][0])[:704]  # an answer's tokens fill the last block


def of_medium(events: list[dict[str, Any]], kind: str, medium: str) -> list[dict[str, Any]]:
    return [e for e in events if e["type"] == kind and e["medium"] == medium]


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-gemma3"])
def test_vllm_publishes_events_of_host_and_drive(run: Run, tmp_path: Path, model: str) -> None:
    options = cache(tmp_path / "nvme")
    options["settings"]["host"]["capacity_bytes"] = "8MiB"  # one prompt more than that, so that some leave
    others = [ask(ids(700, seed)) for seed in range(3, 9)]
    told = published()
    result = run(
        [ask(A), ask(B), "flush", *others, ask(A), "flush", "records", f"events {told['replay_endpoint']}"],
        model=model,
        connector=options,
        llm={"enable_prefix_caching": True},
        events=told,
    )
    events = result["rounds"][-1]
    own = of_medium(events, "BlockStored", "GPU")
    of_prompt: dict[Any, list[int]] = {}
    for event in own:
        size = event["block_size"]
        for i, block_hash in enumerate(event["block_hashes"]):
            of_prompt[block_hash] = event["token_ids"][i * size : (i + 1) * size]
    there: dict[str, set[tuple[int, Any]]] = {"CPU": set(), "STORAGE": set()}
    for event in events:
        if event["medium"] not in there:
            continue
        named = {(event["group_idx"], block_hash) for block_hash in event["block_hashes"]}
        if event["type"] == "BlockRemoved":
            there[event["medium"]] -= named
            continue
        there[event["medium"]] |= named
        size = event["block_size"]
        for i, block_hash in enumerate(event["block_hashes"]):  # the names that vLLM has for its own blocks
            assert of_prompt[block_hash] == event["token_ids"][i * size : (i + 1) * size]
    assert of_medium(events, "BlockRemoved", "CPU")
    stored = of_medium(events, "BlockStored", "STORAGE")
    assert {event["ownership"] for event in stored} == {"kvcache nvme"}
    records = result["rounds"][-2]
    if model == "tiny-llama":  # one group: a block is one record
        assert {"host": len(there["CPU"]), "nvme": len(there["STORAGE"])} == records
    assert all(there.values())
