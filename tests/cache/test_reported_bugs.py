"""What users of other caches reported, as tests with the right answer: isolation, memory, concurrency.

Each test names the reports that it stands for, as they are numbered in public trackers (LMCache unless said otherwise).
"""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvcache
from kvcache.block.chain import Chain
from kvcache.block.layout import KVLayout, Shard
from kvcache.cache.cache import Cache
from kvcache.tier.tier import Outcome
from kvcache.transfer.pages import GroupPages

KiB, MiB = 1 << 10, 1 << 20
LAYOUT = KVLayout.mha(layers=2, kv_heads=4, head_dim=32, dtype="fp32", block_tokens=4)
TOKENS = list(range(40))


def described(layout: KVLayout, shard: Shard | None = None, count: int = 64) -> tuple[list[Any], list[GroupPages]]:
    group = layout.groups[0]
    shard = shard or group.whole
    dtype = {"fp32": np.float32, "bf16": np.uint16, "fp16": np.float16, "fp8_e4m3": np.uint8}[group.dtype]
    tensors = [
        np.zeros((2, count, layout.block_tokens, shard.heads, group.head_dim), dtype) for _ in range(shard.layers)
    ]
    axes = ("kv", "page", "token", "head", "dim")
    return tensors, [GroupPages.from_tensors(layout, tensors, axes=axes, shard=shard)]


def open_cache(path: Path | None = None, **host: Any) -> Cache:
    made = kvcache.open(
        host={"capacity_bytes": 8 * MiB, **host},
        nvme={
            "enabled": path is not None,
            "path": path or Path("unused"),
            "capacity_bytes": 64 * MiB,
            "min_free_bytes": 0,
        },
    )
    assert isinstance(made, Cache)
    return made


def put(cache: Any, layout: KVLayout = LAYOUT, tokens: Any = TOKENS, **fields: Any) -> None:
    with cache.namespace(layout, **{"model": "m", "revision": "r", **fields}).request() as r:
        r.match(tokens)
        assert r.store(described(layout)[1], [list(range(len(r.signatures)))]).wait(30)


def found(cache: Any, layout: KVLayout = LAYOUT, tokens: Any = TOKENS, **fields: Any) -> int:
    with cache.namespace(layout, **{"model": "m", "revision": "r", **fields}).request() as r:
        return int(r.match(tokens).blocks)


NAMES = ["a/b", "a-b", "a@b", "..", "a\nb", "a\0b", "é", "e\u0301", "", " ", "a" * 4096]


@pytest.mark.parametrize("field", ["model", "revision", "adapter", "tenant", "cache_salt"])
def test_similar_names_give_different_namespaces(field: str, tmp_path: Path) -> None:
    """2878, 2960, 2961, 2962, 4825; vLLM 44250; `/` and `-` in file names: any Unicode is a name of its own."""
    cache = open_cache(tmp_path / "nvme")
    for i, name in enumerate(NAMES):
        assert found(cache, **{field: name}) == 0, f"{name!r} sees what {NAMES[:i]!r} stored"
        put(cache, **{field: name})
        assert cache.flush(30)  # more tenants than extents: those before must be on the drive before they can leave
        assert found(cache, **{field: name}) == 10
    assert cache.flush(30)
    assert sorted({p.name.split("-")[0].split(".")[0] for p in (tmp_path / "nvme").iterdir()}) != NAMES
    assert all(p.parent == tmp_path / "nvme" for p in (tmp_path / "nvme").rglob("*")), "a name became a directory"
    assert cache.check() == []
    cache.close()


def test_adapters_of_one_name_and_other_weights_differ() -> None:
    """vLLM 44250, 2960: the adapter's field holds its weights' fingerprint beside its name."""
    cache = open_cache()
    adapters = [None, "A sha256:1", "A sha256:2", "B sha256:1"]
    for adapter in adapters:
        assert found(cache, adapter=adapter) == 0
        put(cache, adapter=adapter)
    assert [found(cache, adapter=adapter) for adapter in adapters] == [10] * 4
    cache.close()


def test_another_dtype_or_layout_over_one_store_is_a_miss(tmp_path: Path) -> None:
    """4903: stored as bf16, asked for as fp8 after a restart."""

    def layout(**change: Any) -> KVLayout:
        return KVLayout.mha(
            **{"layers": 2, "kv_heads": 4, "head_dim": 32, "dtype": "bf16", "block_tokens": 4, **change}
        )

    cache = open_cache(tmp_path / "nvme")
    put(cache, layout())
    assert cache.flush(30)
    cache.close()
    cache = open_cache(tmp_path / "nvme")
    assert found(cache, layout()) == 10
    others = [
        layout(dtype="fp8_e4m3"),
        layout(dtype="fp16"),
        layout(layers=3),
        layout(head_dim=64),
        layout(order=("layer", "kv", "head", "token", "dim")),
    ]
    assert [found(cache, other) for other in others] == [0] * 5
    assert found(cache, facts={"max_position_embeddings": 1}) == 0
    cache.close()


def test_no_foreign_key_reaches_the_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are derived within the caller's namespace before anything is looked up."""
    cache = open_cache()
    put(cache, tenant="a")
    asked: list[bytes] = []
    own, lookup = cache.index.names("host"), cache.index.lookup

    def spy(places: list[bytes], needs: list[int]) -> Any:
        asked.extend(places)
        return lookup(places, needs)

    monkeypatch.setattr(cache.index, "lookup", spy)
    foreign = cache.namespace(LAYOUT, model="m", revision="r", tenant="b")
    with foreign.request() as r:
        assert r.match(TOKENS).blocks == 0
        assert not {name[:16] for name in own} & {signature[:16] for signature in r.signatures}
    assert {place[:32] for place in asked} == {foreign.id}
    cache.close()


def test_a_hundred_thousand_images_have_distinct_keys() -> None:
    """3301, 4086: sixteen bits of an image's hash collided at 300 images."""
    keys = set()
    for i in range(100_000):
        chain = Chain(bytes(32), 1)
        chain.extend([7], extras=[[(b"image", i.to_bytes(32, "little"))]])
        keys.add(chain.signatures[0][:16])
    assert len(keys) == 100_000


def test_ids_that_collide_in_a_builtin_hash_stay_distinct() -> None:
    """The builtin hash of an int repeats at 2**61 - 1; such ids are refused, as is what would wrap to 32 bits."""
    chain = Chain(bytes(32), 1)
    for wrapped in (5 + (1 << 61) - 1, 5 + (1 << 32)):
        with pytest.raises(kvcache.TokenError):
            chain.extend([wrapped])
    assert hash(5) == hash(5 + (1 << 61) - 1)


def test_ranks_of_any_world_size_have_distinct_addresses() -> None:
    """Eight bits for a rank made 512 ranks and 513 the same."""
    shards = {Shard(layer, layer + 1, head, head + 1).pack() for layer in range(33) for head in range(33)}
    shards |= {Shard(first, first + 1, 0, 1).pack() for first in range(0, 65534, 257)}
    assert len(shards) == 33 * 33 + len({f for f in range(0, 65534, 257) if f >= 33})


def test_an_old_match_is_served_or_a_clean_miss() -> None:
    """4691, 4137, vLLM 35931: a lease that ran out while the request waited in a queue."""
    cache = open_cache(capacity_bytes=2 * MiB)
    tensors, pages = described(LAYOUT)
    put(cache)
    waiting = cache.namespace(LAYOUT, model="m", revision="r").request(deadline_s=0.000001)
    assert waiting.match(TOKENS).blocks == 10
    for i in range(60):  # no admit: nothing holds it
        put(cache, tokens=[1000 * i + t for t in range(40)])
    for tensor in tensors:
        tensor.fill(-1)
    transfer = waiting.load(10, pages, [list(range(10))])
    assert transfer.wait(30)
    assert transfer.blocks == 0
    assert Outcome.DONE not in transfer.outcomes
    waiting.close()
    assert cache.check() == []
    cache.close()


def test_stores_are_accepted_after_many_evictions() -> None:
    """4817: the eviction thread died and the server stayed full."""
    cache = open_cache(capacity_bytes=1 * MiB)
    for turn in range(200):
        tokens = [1000 * turn + t for t in range(40)]
        put(cache, tokens=tokens)
        assert found(cache, tokens=tokens) == 10
    assert cache.check() == []
    cache.close()


def test_memory_does_not_grow_with_past_requests() -> None:
    """A timestamp was kept for every hash that was ever seen."""
    cache = open_cache(capacity_bytes=1 * MiB)
    sizes = []
    for turn in range(300):
        put(cache, tokens=[1000 * turn + t for t in range(40)])
        found(cache, tokens=[10_000_000 + 1000 * turn + t for t in range(400)])
        sizes.append(len(cache.index))
    assert max(sizes[100:]) <= max(sizes[:100])
    assert len(cache.tier_manager.promoter) == 0
    cache.close()


def test_later_page_writes_do_not_change_stored_blocks() -> None:
    """2706, 4612, 4822, vLLM 52360: pages were given to another request while they were read."""
    cache = open_cache()
    tensors, pages = described(LAYOUT)
    rng = np.random.default_rng(0)
    for tensor in tensors:
        tensor[:] = rng.standard_normal(tensor.shape, np.float32)
    kept = [tensor[:, :10].copy() for tensor in tensors]
    handle = cache.namespace(LAYOUT, model="m", revision="r")
    with handle.request() as r:
        r.match(TOKENS)
        store = r.store(pages, [list(range(10))])
        assert store.wait(30)
        for tensor in tensors:
            tensor[:, :10] = 0
        assert r.match().blocks == 10
        assert r.load(10, pages, [list(range(20, 30))]).wait(30)
    assert all((tensor[:, 20:30] == was).all() for tensor, was in zip(tensors, kept, strict=True))
    cache.close()


def test_a_block_lost_by_one_rank_is_a_miss_for_all() -> None:
    """1379, 1467, 1101, 512, 651, 407: ranks that disagreed about how much was there. Here a process that holds two
    ranges of heads asks for both; the part that one lacks ends the prefix."""
    cache = open_cache()
    halves = [Shard(0, 2, 0, 2), Shard(0, 2, 2, 4)]
    handles = [cache.namespace(LAYOUT, model="m", revision="r", shards=[half]) for half in halves]
    for handle, half in zip(handles, halves, strict=True):
        with handle.request() as r:
            r.match(TOKENS)
            assert r.store(described(LAYOUT, half)[1], [list(range(10))]).wait(30)
    with handles[1].request() as r:
        r.match(TOKENS)
        lost = r._chains()[0][4]
    assert cache.index.discard(lost, "host")
    cache.host.unpublish(lost)
    hits = []
    for handle in handles:
        with handle.request() as r:
            hits.append(r.match(TOKENS).blocks)
    assert hits == [10, 4]
    assert min(hits) == 4, "what the scheduler may promise is the least of its ranks"
    cache.close()


def test_a_failed_read_is_reported_per_block(tmp_path: Path) -> None:
    """910, 953, 1770, 2106, 1835, 2865, 4600: fewer blocks came than were promised, and no report said which."""
    cache = open_cache(tmp_path / "nvme")
    put(cache)
    assert cache.flush(30)
    cache.close()
    cache = open_cache(tmp_path / "nvme")
    segments = sorted((tmp_path / "nvme").glob("segment-*"))
    for path in segments:  # the medium lost everything behind the fourth record
        data = bytearray(path.read_bytes())
        record = 8 * KiB + 4 * KiB
        data[4 * record :] = bytes(len(data) - 4 * record)
        path.write_bytes(data)
    _, pages = described(LAYOUT)
    with cache.namespace(LAYOUT, model="m", revision="r").request() as r:
        assert r.match(TOKENS).blocks == 10
        r.admit()
        transfer = r.load(10, pages, [list(range(10))])
        assert transfer.wait(30)
        assert transfer.blocks < 10
        assert all(outcome is not Outcome.DONE for outcome in transfer.outcomes[transfer.blocks :])
    assert cache.counters.get("load_failures") == 10 - transfer.blocks
    with cache.namespace(LAYOUT, model="m", revision="r").request() as r:
        assert r.match(TOKENS).blocks <= transfer.blocks, "what was found to be lost is not promised again"
    cache.close()


def test_evictions_lookups_and_loads_run_concurrently(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """3536, 3406: crashes and foreign bytes under concurrency. Threads share prefixes in a cache that is too small."""
    turns = 400 if request.config.getoption("--long") else 40
    cache = open_cache(tmp_path / "nvme", capacity_bytes=1 * MiB)
    handle = cache.namespace(LAYOUT, model="m", revision="r")
    faults: list[str] = []

    def fill(tensors: list[Any], tokens: list[int], ids: list[int]) -> None:
        for i, page in enumerate(ids):
            for layer, tensor in enumerate(tensors):
                tensor[:, page] = hash((layer, *tokens[: 4 * i + 4])) % 9973

    def work(worker: int) -> None:
        rng = random.Random(worker)
        tensors, pages = described(LAYOUT)
        try:
            for _ in range(turns):
                branch, length = rng.randrange(6), rng.randrange(4, 44)
                tokens = [i if i < 12 else 1000 * branch + i for i in range(length)]
                with handle.request() as r:
                    hit = r.match(tokens)
                    if rng.random() < 0.7:
                        r.admit()
                    transfer = r.load(hit.blocks, pages, [list(range(hit.blocks))])
                    if rng.random() < 0.1:
                        transfer.cancel()
                    assert transfer.wait(60), "a load did not end"
                    for i in range(transfer.blocks):
                        for layer, tensor in enumerate(tensors):
                            if not (tensor[:, i] == hash((layer, *tokens[: 4 * i + 4])) % 9973).all():
                                faults.append(f"worker {worker}: foreign bytes in block {i} of {tokens}")
                    ids = list(range(32, 32 + length // 4))
                    fill(tensors, tokens, ids)
                    assert r.store(pages, [ids]).wait(60), "a store did not end"
        except Exception as error:  # noqa: BLE001  a thread's error must reach the test
            faults.append(f"worker {worker}: {error!r}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    assert cache.flush(60)
    assert cache.check() == []
    assert cache.index.held() == 0
    cache.close()
