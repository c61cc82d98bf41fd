"""Erasure: what is a tenant's leaves every tier, and no byte of it is found there any more; the rest stays."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kvcache
from kvcache.cache import erase
from kvcache.cache.write_back import VictimBuffer
from kvcache.errors import ConfigError
from kvcache.os_env import LocalDisk
from kvcache.tier.host.arena import Region
from kvcache.tier.redis.keys import part_key
from tests.cache.test_object_tier import final_match
from tests.contract.fake_engine import FULL, Engine, store, wait_background
from tests.peer.redis_server import MISSING, RedisServer, empty

MiB = 1 << 20
TOKENS = list(range(40))  # ten blocks
PAGES = list(range(10))
_seeds = itertools.count(100)

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Opens caches on every tier that there is, one at a time."""
    caches: list[Any] = []
    shared = empty(tmp_path)

    def end() -> None:
        while caches:
            cache = caches.pop()
            assert cache.flush(30)
            assert cache.check() == []
            cache.close()

    def open_cache(server: RedisServer = shared) -> Any:
        end()
        caches.append(
            kvcache.open(
                host={"capacity_bytes": 8 * MiB},
                nvme={"path": tmp_path / "nvme", "capacity_bytes": 64 * MiB, "min_free_bytes": 0},
                redis={"enabled": True, "url": server.unix},
                object={"enabled": True, "url": f"file://{tmp_path}/objects"},
                flow={"lookup_timeout_s": 30, "deadline_s": 30},
                control={"enabled": False},
            )
        )
        return caches[-1]

    yield open_cache
    end()


def bind(cache: Any, tenant: str, cache_salt: str = "") -> Any:
    return cache.namespace(FULL, model="m", revision="1", tenant=tenant, cache_salt=cache_salt)


def kept(handle: Any) -> list[bytes]:
    """Store ten blocks that no other request has; their bytes."""
    engine = Engine(FULL)
    engine.fill(next(_seeds), PAGES)
    assert store(handle, engine, TOKENS, PAGES).blocks == 10
    return [engine.block(page) for page in PAGES]


def found(handle: Any) -> int:
    with handle.request() as r:
        return int(final_match(r, TOKENS).blocks)


def lies(cache: Any, place: Path, blocks: list[bytes]) -> set[str]:
    """In which tiers a piece of one of these blocks lies, whatever says that it does."""
    wait_background(cache)  # a concurrent writer has files that come and go
    client = empty(place).client
    media = {
        "host": b"".join(bytes(region.view) for region in cache.host.arena._regions()),
        "nvme": b"".join(path.read_bytes() for path in (place / "nvme").iterdir()),
        "redis": b"".join(client.get(name) for name in client.scan_iter()),
        "object": b"".join(path.read_bytes() for path in (place / "objects").rglob("*") if path.is_file()),
    }
    pieces = [block[at : at + 64] for block in blocks for at in range(0, len(block), len(block) // 4)]
    return {tier for tier, data in media.items() if any(piece in data for piece in pieces)}


ALL = {"host", "nvme", "redis", "object"}


@pytest.mark.parametrize("how", ["tenant", "cache_salt", "namespace"])
def test_erase_leaves_no_byte_in_any_tier(opened: Any, tmp_path: Path, how: str) -> None:
    cache = opened()
    mine, others = bind(cache, "mine", "my secret salt"), bind(cache, "other")
    blocks, rest = kept(mine), kept(others)
    assert cache.flush(30)
    assert lies(cache, tmp_path, blocks) == lies(cache, tmp_path, rest) == ALL
    given = {"tenant": "mine", "cache_salt": "my secret salt", "namespace": mine.id.hex()[:12]}
    counted = cache.erasure.erase(**{how: given[how]}, dry_run=True)
    erased = cache.erasure.erase(**{how: given[how]})
    assert (erased.namespaces, erased.incomplete) == ([mine.id], {})
    assert erased.records == counted.records == dict.fromkeys(ALL, 10)
    assert lies(cache, tmp_path, blocks) == set()
    assert lies(cache, tmp_path, rest) == ALL
    assert (found(mine), found(others)) == (0, 10)
    kept(mine)
    assert found(mine) == 10


def test_erase_finds_a_tenants_blocks_after_a_restart(opened: Any, tmp_path: Path) -> None:
    """Nobody has the namespace bound any more: the tiers know whose it is."""
    cache = opened()
    blocks, rest = kept(bind(cache, "mine", "salt")), kept(bind(cache, "other"))
    assert cache.flush(30)
    cache = opened()
    erased = cache.erasure.erase(tenant="mine")
    assert (len(erased.namespaces), erased.incomplete) == (1, {})
    assert erased.records == {"host": 0, "nvme": 10, "redis": 10, "object": 10}
    assert lies(cache, tmp_path, blocks) == set()
    assert lies(cache, tmp_path, rest) == ALL - {"host"}
    assert found(bind(opened(), "mine", "salt")) == 0
    assert found(bind(opened(), "other")) == 10


def test_erase_overwrites_evicted_records(opened: Any, tmp_path: Path) -> None:
    """A slot that is free has what was in it until it is used again."""
    cache = opened()
    mine = bind(cache, "mine")
    blocks = kept(mine)
    assert cache.flush(30)
    for tier in (cache.host, cache.lower_tiers[0]):
        gone = [address for address in tier.scan() if address.namespace == mine.id]
        for address in gone:
            cache.index.discard(address, tier.name)
        tier.remove(gone)
    assert {"host", "nvme"} <= lies(cache, tmp_path, blocks)
    assert cache.erasure.erase(tenant="mine").incomplete == {}
    assert lies(cache, tmp_path, blocks) == set()


def test_erase_matches_all_given_criteria(opened: Any) -> None:
    cache = opened()
    spaces = {(t, s): bind(cache, t, s) for t in ("a", "b") for s in ("", "x")}
    for handle in spaces.values():
        kept(handle)
    erased = cache.erasure.erase(tenant="a", cache_salt="x")
    assert erased.namespaces == [spaces["a", "x"].id]
    assert {key: found(handle) for key, handle in spaces.items()} == {
        ("a", ""): 10,
        ("a", "x"): 0,
        ("b", ""): 10,
        ("b", "x"): 10,
    }
    for given in ({}, {"namespace": "00000000"}, {"tenant": "nobody"}, {"cache_salt": "none"}):
        with pytest.raises(ConfigError):
            cache.erasure.erase(**given)


def test_erase_reports_a_tier_that_does_not_answer(opened: Any, tmp_path: Path) -> None:
    server = RedisServer()
    try:
        cache = opened(server)
        blocks = kept(bind(cache, "mine"))
        assert cache.flush(30)
        server.stop()
        erased = cache.erasure.erase(tenant="mine")
        assert set(erased.incomplete) == {"redis"}
        assert [erased.records[name] for name in ("host", "nvme", "object")] == [10, 10, 10]
        assert not erased.records.get("redis")
        assert lies(cache, tmp_path, blocks) == set()
    finally:
        server.end()


def everything(cache: Any) -> list[Any]:
    return [cache.host, *cache.lower_tiers]


def test_a_namespace_of_unknown_owner_is_erased_by_id_only(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = opened()
    mine = bind(cache, "mine")
    kept(mine)
    wait_background(cache)
    cache.erasure._owners.clear()
    for tier in cache.lower_tiers:
        monkeypatch.setattr(tier, "owners", dict)
    for given in ({"tenant": "other"}, {"cache_salt": "x"}, {"tenant": "mine"}):
        for dry_run in (True, False):
            erased = cache.erasure.erase(namespace=mine.id.hex()[:8], dry_run=dry_run, **given)
            assert erased.namespaces == []
            assert list(erased.incomplete) == [f"namespace {mine.id.hex()[:16]}"]
    assert found(mine) == 10
    assert cache.erasure.erase(namespace=mine.id.hex()[:8]).incomplete == {}
    assert found(mine) == 0


def test_erase_reports_pending_stores(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = opened()
    kept(bind(cache, "mine"))
    assert cache.flush(30)
    answers = [False, True]  # late first, then all has arrived
    monkeypatch.setattr(cache.erasure, "_flush", lambda _: answers.pop(0))
    assert cache.erasure.erase(tenant="mine").incomplete == {}
    monkeypatch.setattr(cache.erasure, "_flush", lambda _: False)
    assert list(cache.erasure.erase(tenant="mine").incomplete) == ["stores"]


@pytest.mark.parametrize(("stores", "said"), [(2, set()), (99, {"nvme"})])
def test_erase_repeats_while_an_engine_stores(
    opened: Any, monkeypatch: pytest.MonkeyPatch, stores: int, said: set[str]
) -> None:
    """The next round erases blocks that were stored meanwhile. The erasure ends in any case and reports the rest."""
    cache = opened()
    mine = bind(cache, "mine")
    kept(mine)
    assert cache.flush(30)
    rounds, remove = list[int](), erase.remove

    def meanwhile(namespaces: Any, index: Any, tier: Any) -> int:
        removed = remove(namespaces, index, tier)
        if tier.name == "nvme":
            rounds.append(removed)
            if len(rounds) <= stores:
                kept(mine)
                assert cache.flush(30)
        return removed

    monkeypatch.setattr(erase, "remove", meanwhile)
    erased = cache.erasure.erase(tenant="mine")
    assert len(rounds) == 3
    assert set(erased.incomplete) >= said
    assert bool(erased.incomplete) == bool(said)
    assert (found(mine) > 0) == bool(said)


def test_owner_notes_are_retried_until_written(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = opened()

    def refuse(*_: Any) -> None:
        raise OSError("full")

    def noted() -> list[bool]:
        wait_background(cache)
        return [mine.id in tier.owners() for tier in cache.lower_tiers]

    with monkeypatch.context() as patch:
        patch.setattr(cache.lower_tiers[-1], "note_owner", refuse)
        mine = bind(cache, "mine")
        assert noted() == [True, True, False]
    bind(cache, "mine")
    assert noted() == [True] * 3
    kept(mine)
    assert cache.erasure.erase(tenant="mine").incomplete == {}
    assert noted() == [True] * 3  # it is bound, and may go on storing


def test_erase_reports_a_server_that_refuses_scans(opened: Any) -> None:
    server = RedisServer()
    try:
        cache = opened(server)
        kept(bind(cache, "mine"))
        assert cache.flush(30)
        server.client.execute_command("ACL", "SETUSER", "default", "-scan")
        assert set(cache.erasure.erase(tenant="mine").incomplete) == {"redis"}
        server.client.execute_command("ACL", "SETUSER", "default", "+scan")
        for pool in cache.lower_tiers[1]._nodes.pools():
            pool.breaker.record_success()  # it is shut by a refusal, for a while
        erased = cache.erasure.erase(tenant="mine")
        assert (erased.incomplete, erased.records["redis"]) == ({}, 10)
    finally:
        server.client.execute_command("ACL", "SETUSER", "default", "+scan")
        opened()  # on another one
        server.end()


def test_erase_removes_orphaned_record_parts(opened: Any, tmp_path: Path) -> None:
    cache = opened()
    mine, other = bind(cache, "mine"), bind(cache, "other")
    kept(mine)
    kept(other)
    assert cache.flush(30)
    client, tier = empty(tmp_path).client, cache.lower_tiers[1]
    parts = {}
    for whose, handle in (("mine", mine), ("other", other)):
        (address, *_) = [address for address in tier.scan() if address.namespace == handle.id]
        parts[whose] = part_key(tier._names.record(address), 7, 1)
        client.set(parts[whose], b"payload")
    assert cache.erasure.erase(tenant="mine").incomplete == {}
    assert client.exists(parts["mine"]) == 0
    assert client.exists(parts["other"]) == 1
    client.delete(parts["other"])


def test_erase_overwrites_a_file_before_deleting_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone: list[bytes] = []
    remove = LocalDisk.remove

    def look(disk: LocalDisk, path: str) -> None:
        if "segment-" in path:
            gone.append(Path(path).read_bytes())
        remove(disk, path)

    monkeypatch.setattr(LocalDisk, "remove", look)
    with kvcache.open(
        host={"capacity_bytes": 8 * MiB},
        nvme={"path": tmp_path / "nvme", "capacity_bytes": 2 * MiB, "min_free_bytes": 0, "segment_bytes": 4096},
        control={"enabled": False},
    ) as cache:
        blocks = kept(bind(cache, "mine"))
        assert cache.flush(30)
        assert cache.erasure.erase(tenant="mine").incomplete == {}
        assert len(gone) > 1
        assert not any(block[:64] in data for block in blocks for data in gone)
        assert cache.check() == []


def test_erase_overwrites_copies_of_a_pending_store() -> None:
    leaving, region = VictimBuffer(), Region(4096)
    region.view[:] = b"x" * 4096
    leaving._free.append(region)
    leaving.wipe()
    assert bytes(region.view) == bytes(4096)


def test_no_tenant_name_is_sent_to_a_server(opened: Any, tmp_path: Path) -> None:
    cache = opened()
    kept(bind(cache, "customer of ours", "my secret salt"))
    assert cache.flush(30)
    cache.erasure.close()
    client = empty(tmp_path).client
    there = b"".join(name + client.get(name) for name in client.scan_iter())
    there += b"".join(path.read_bytes() for path in (tmp_path / "objects").rglob("*") if path.is_file())
    assert b"customer" not in there
    assert b"secret" not in there
