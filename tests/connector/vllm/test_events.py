"""KV events: what a router builds from them is what is in the tiers, and each explains itself."""

from __future__ import annotations

import random
from collections import defaultdict
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kvcache
from kvcache.block.layout import Shard
from kvcache.connector.vllm.events import KVEventPublisher
from kvcache.connector.vllm.kv_layout import ModelIdentity
from kvcache.index.kv_events import EventBatch, KVEvent
from tests.contract.fake_engine import FULL, HYBRID, Engine, MiB

WORDS: Any = SimpleNamespace(
    event=lambda kind, **fields: SimpleNamespace(kind=kind, **fields),
    event_hash=lambda h: h,
    event_keys=lambda request, first, end: None,
)


class Silent:
    """A cache whose changes a test tells by hand."""

    def changes(self, after: int | None, namespaces: Any) -> EventBatch:
        return EventBatch(0, lost=False, kv_events=())


def hashed(ids: list[int], size: int) -> list[bytes]:
    return [bytes(str(ids[: (i + 1) * size]), "ascii").hex().encode()[-40:] for i in range(len(ids) // size)]


def request_of(ids: list[int], size: int = 4, lora: Any = None) -> Any:
    return SimpleNamespace(all_token_ids=ids, block_hashes=hashed(ids, size), lora_request=lora)


def whole_model(layout: Any) -> ModelIdentity:
    held = tuple(Shard(0, g.layers, 0, g.kv_heads) for g in layout.groups)
    return ModelIdentity("m", "r", {}, layout, {(0, 0): held}, tuple(range(len(layout.groups))))


class Router:
    """Keeps what events say: by medium and group, hashes and the tokens from the front."""

    def __init__(self) -> None:
        self.there: dict[tuple[str, int], set[bytes]] = defaultdict(set)
        self.prompts: dict[bytes, list[int]] = {}

    def apply_changes(self, events: list[Any]) -> None:
        for event in events:
            place = event.ownership.split()[-1], event.group_idx
            if event.kind == "BlockRemoved":
                self.there[place] -= set(event.block_hashes)
                continue
            assert event.block_size * len(event.block_hashes) == len(event.token_ids)
            before = [] if event.parent_block_hash is None else self.prompts[event.parent_block_hash]
            for i, block_hash in enumerate(event.block_hashes):
                before = before + event.token_ids[i * event.block_size : (i + 1) * event.block_size]
                self.prompts[block_hash] = before
            self.there[place] |= set(event.block_hashes)


@pytest.mark.parametrize("layout", [FULL, HYBRID], ids=["full", "hybrid"])
def test_events_give_a_router_the_tiers_contents(tmp_path: Path, layout: Any) -> None:
    rng, engine, router = random.Random(1), Engine(layout), Router()
    with kvcache.open(
        host={"capacity_bytes": MiB, "slab_bytes": MiB // 4},
        nvme={"path": tmp_path, "capacity_bytes": 4 * MiB, "segment_bytes": MiB, "min_free_bytes": 0},
        control={"enabled": False},
    ) as cache:
        announcer, model = KVEventPublisher(cache, WORDS), whole_model(layout)
        handle = model.bind(cache, SimpleNamespace(adapter=None, tenant="default", salt="", epoch=""))  # type: ignore[arg-type]  # a stand-in
        announcer.subscribe(model, handle)
        hashes = {}
        for _ in range(40):
            start = rng.randrange(20) * 1000
            ids = list(range(start, start + 4 * rng.randrange(4, 40)))
            asked = request_of(ids)
            with handle.request() as r:
                r.match(digests=asked.block_hashes)
                announcer.name_blocks(handle, asked, asked.block_hashes, 0, 1)
                r.admit()
                blocks = len(asked.block_hashes)
                r.store(engine.described, engine.ids(list(range(blocks)))).wait(30)
                hashes.update(zip(r.signatures, asked.block_hashes, strict=True))
        cache.tier_manager.promoter.wait_idle()
        assert cache.flush(30)
        announcer.close()
        announcer.poll()
        events = announcer.drain()
        router.apply_changes(events)
        assert {event.kind for event in events} == {"BlockStored", "BlockRemoved"}
        for tier in (cache.host, *cache.lower_tiers):
            for group in range(len(layout.groups)):
                found = {hashes[a.signature] for a in tier.scan() if a.group == group}
                assert router.there[tier.name, group] == found
        for block_hash, prompt in router.prompts.items():
            assert hashed(prompt, 4)[-1] == block_hash


def told(kind: Any, handle: Any, digests: list[bytes], shard: tuple[int, int, int, int], tier: str = "host") -> KVEvent:
    packed = b"".join(sha256(handle.id + digest).digest() for digest in digests)
    return KVEvent(kind, tier, handle.id, 0, shard, b"", packed)


@pytest.fixture
def two_ranks() -> Any:
    left, right = Shard(0, 2, 0, 1), Shard(0, 2, 1, 2)
    model = ModelIdentity("m", "r", {}, FULL, {(0, 0): (left,), (0, 1): (right,)}, (0,))
    handle: Any = SimpleNamespace(id=bytes(32), event_signature=lambda signature: signature)
    announcer = KVEventPublisher(Silent(), WORDS, most_blocks=4)
    announcer.subscribe(model, handle)
    yield announcer, handle
    announcer.close()


LEFT, RIGHT = (0, 2, 0, 1), (0, 2, 1, 2)


def test_a_block_is_announced_once_all_ranks_have_it(two_ranks: Any) -> None:
    announcer, handle = two_ranks
    asked = request_of(list(range(8)))
    announcer.name_blocks(handle, asked, asked.block_hashes, 0, 1)
    announcer.apply_changes([told("stored", handle, asked.block_hashes, LEFT)])
    assert announcer.drain() == []
    announcer.apply_changes([told("stored", handle, asked.block_hashes[:1], RIGHT)])
    (stored,) = announcer.drain()
    assert (stored.block_hashes, stored.token_ids) == (asked.block_hashes[:1], [0, 1, 2, 3])
    assert (stored.medium, stored.locality, stored.parent_block_hash) == ("CPU", "LOCAL", None)
    announcer.apply_changes([told("removed", handle, asked.block_hashes, LEFT)])
    (gone,) = announcer.drain()
    assert (gone.kind, gone.block_hashes) == ("BlockRemoved", asked.block_hashes[:1])
    announcer.apply_changes([told("removed", handle, asked.block_hashes, RIGHT)])
    assert announcer.drain() == []


@pytest.mark.parametrize("how", ["lost", "reset", "full"])
def test_blocks_no_longer_tracked_are_announced_as_removed(two_ranks: Any, how: str) -> None:
    announcer, handle = two_ranks
    asked = request_of(list(range(12)))
    announcer.name_blocks(handle, asked, asked.block_hashes, 0, 1)
    for shard in (LEFT, RIGHT):
        announcer.apply_changes([told("stored", handle, asked.block_hashes, shard, tier="redis")])
    assert [e.locality for e in announcer.drain()] == ["REMOTE"]
    if how == "lost":
        announcer.apply_changes([], lost=True)
    elif how == "reset":
        announcer.forget()
    else:
        other = request_of(list(range(100, 116)))
        announcer.name_blocks(handle, other, other.block_hashes, 0, 1)
    gone = [h for event in announcer.drain() if event.kind == "BlockRemoved" for h in event.block_hashes]
    assert sorted(gone) == sorted(asked.block_hashes)


def test_blocks_without_a_local_name_are_not_published(two_ranks: Any) -> None:
    announcer, handle = two_ranks
    for shard in (LEFT, RIGHT):
        announcer.apply_changes(
            [told("stored", handle, [b"0" * 32], shard), told("removed", handle, [b"0" * 32], shard)]
        )
    assert announcer.drain() == []


def test_an_event_without_local_hash_fails_no_request(two_ranks: Any) -> None:
    announcer, handle = two_ranks
    asked = request_of(list(range(8)))
    asked.request_id, asked.block_hashes = "r", []  # another version of vLLM: nothing is where it was
    announcer.name_blocks(handle, asked, [b"1" * 32], 0, 1)
    assert announcer.drain() == []
    announcer.apply_changes([told("stored", handle, [b"1" * 32], LEFT), told("stored", handle, [b"1" * 32], RIGHT)])
    assert announcer.drain() == []
