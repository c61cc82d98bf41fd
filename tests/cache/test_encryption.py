"""What lies below host is encrypted where the settings say so: on a drive, in Redis, in an object store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvcache
from kvcache.block.record import ENCRYPTION, PARENT, read_header, with_field
from kvcache.errors import ConfigError
from tests.cache.test_object_tier import load
from tests.contract.fake_engine import FULL, Engine, bind, store, wait_background
from tests.peer.redis_server import MISSING, empty

pytest.importorskip("cryptography", reason="encryption needs cryptography")

MiB = 1 << 20
TOKENS = list(range(40))  # ten blocks
KEYS = {"one": "11" * 32, "two": "22" * 32}
Open = Callable[..., Any]


@pytest.fixture(
    params=["nvme", "object", pytest.param("redis", marks=pytest.mark.skipif(bool(MISSING), reason=MISSING))]
)
def tier(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def opened(tier: str, tmp_path: Path) -> Iterator[Open]:
    """Opens a cache on host and one tier, with these keys; one at a time."""
    caches: list[Any] = []
    server = empty(tmp_path) if tier == "redis" else None

    def end() -> None:
        while caches:
            cache = caches.pop()
            assert cache.flush(30)
            assert cache.check() == []
            cache.close()

    def open_cache(*keys: str, accept_unencrypted: bool = False, signing: bool = False, **nvme: Any) -> Any:
        end()
        (tmp_path / "keys").write_text("\n".join(KEYS[key] for key in keys))
        (tmp_path / "signing").write_text("33" * 32)
        caches.append(
            kvcache.open(
                host={"capacity_bytes": 8 * MiB},
                nvme={
                    "enabled": tier == "nvme",
                    "path": tmp_path / "nvme",
                    "capacity_bytes": 64 * MiB,
                    "min_free_bytes": 0,
                    **nvme,
                },
                redis={
                    "enabled": server is not None,
                    "url": server.unix if server else "redis://127.0.0.1:9/0",
                    "signing_key_file": str(tmp_path / "signing") if signing else "",
                },
                object={"enabled": tier == "object", "url": f"file://{tmp_path}/objects"},
                encryption={
                    "key_file": str(tmp_path / "keys") if keys else "",
                    "accept_unencrypted": accept_unencrypted,
                },
                flow={"lookup_timeout_s": 30, "deadline_s": 30},
                control={"enabled": False},
            )
        )
        return caches[-1]

    yield open_cache
    end()


def medium(tier: str, place: Path) -> bytes:
    """Every byte that the tier keeps."""
    if tier == "redis":
        client = empty(place).client
        return b"".join(client.get(name) for name in client.scan_iter())
    root = place / {"nvme": "nvme", "object": "objects"}[tier]
    return b"".join(path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file())


def filled() -> tuple[Engine, list[bytes]]:
    engine = Engine(FULL)
    engine.fill(1, list(range(10)))
    return engine, [engine.block(page) for page in range(10)]


def kept(cache: Any, engine: Engine) -> None:
    assert store(bind(cache), engine, TOKENS, list(range(10))).blocks == 10
    assert cache.flush(30)
    wait_background(cache)  # a concurrent writer has files that come and go


def test_lower_tiers_hold_no_plaintext(opened: Open, tier: str, tmp_path: Path) -> None:
    engine, expected = filled()
    kept(opened("one"), engine)
    there = medium(tier, tmp_path)
    assert len(there) > sum(map(len, expected))
    for block in expected:
        assert not any(block[at : at + 16] in there for at in range(0, len(block) - 16, 64))
    assert load(bind(opened("one")), Engine(FULL)) == ({tier: 10}, expected)


def test_without_encryption_lower_tiers_hold_plaintext(opened: Open, tier: str, tmp_path: Path) -> None:
    """The search above finds what there is to find."""
    engine, expected = filled()
    kept(opened(), engine)
    there = medium(tier, tmp_path)
    assert all(block[:16] in there for block in expected)


def test_key_rotation_reads_records_of_the_old_key(opened: Open, tier: str) -> None:
    """A new key is put first: what the old one encrypted is read for as long as it stands behind."""
    engine, expected = filled()
    kept(opened("one"), engine)
    assert load(bind(opened("two", "one")), Engine(FULL)) == ({tier: 10}, expected)
    kept(opened("two", "one"), engine)
    cache = opened("two")
    assert load(bind(cache), Engine(FULL))[1] == []
    assert cache.counters.get("refused_records", check="foreign") > 0
    assert load(bind(opened("one")), Engine(FULL))[1] == expected  # what cannot be read was left alone


def test_a_reader_without_the_key_misses_and_leaves_the_record(opened: Open, tier: str) -> None:
    engine, expected = filled()
    kept(opened("one"), engine)
    assert load(bind(opened()), Engine(FULL))[1] == []
    assert load(bind(opened("one")), Engine(FULL))[1] == expected


def test_accept_unencrypted_reads_unencrypted_records(opened: Open, tier: str) -> None:
    engine, expected = filled()
    kept(opened(), engine)
    cache = opened("one")
    assert load(bind(cache), Engine(FULL))[1] == []
    assert cache.counters.get("refused_records", tier=tier, check="foreign") > 0
    assert load(bind(opened("one", accept_unencrypted=True)), Engine(FULL))[1] == expected  # it was left alone


@pytest.mark.parametrize("tier", ["nvme"])
def test_a_scrub_removes_unencrypted_records(opened: Open, tier: str, tmp_path: Path) -> None:
    """Its bytes too; what is encrypted stays, and so does all while it is read, or where there are no keys."""
    engine, expected = filled()
    kept(opened(), engine)
    for more in ({}, {"accept_unencrypted": True}):
        cache = opened(*(["one"] if more else []), **more)
        assert (cache.scrub().unwanted, load(bind(cache), Engine(FULL))[1]) == (0, expected)
    there = medium(tier, tmp_path)
    assert all(block[:16] in there for block in expected)
    cache = opened("one")
    other = bind(cache, model="other")
    assert store(other, engine, TOKENS, list(range(10))).blocks == 10
    assert cache.flush(30)
    found = cache.scrub()
    assert (found.records, found.unwanted, found.damaged) == (20, 10, 0)
    assert cache.check() == []
    there = medium(tier, tmp_path)
    assert not any(block[at : at + 16] in there for block in expected for at in range(0, len(block) - 16, 64))
    assert cache.scrub().unwanted == 0
    assert load(bind(opened("one"), model="other"), Engine(FULL))[1] == expected


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
@pytest.mark.parametrize("tier", ["redis"])
@pytest.mark.parametrize("signing", [False, True], ids=["unsigned", "signed"])
def test_a_record_with_its_encryption_removed_is_refused(
    opened: Open, tier: str, signing: bool, tmp_path: Path
) -> None:
    """Whoever can write to the server drops the field, and makes all checksums anew."""
    engine, _ = filled()
    kept(opened("one", signing=signing), engine)
    client = empty(tmp_path).client
    stripped = 0
    for name in list(client.scan_iter()):
        value = client.get(name)
        if value[:4] != b"KVCR":
            continue
        header = read_header(value)
        fields = {tag: body for tag, body in header.fields.items() if tag != ENCRYPTION}
        cut = replace(header, fields=fields)
        client.set(name, with_field(value, cut, PARENT, header.fields[PARENT]) + value[header.header_bytes :])
        assert ENCRYPTION not in read_header(client.get(name)).fields
        stripped += 1
    assert stripped == 10
    cache = opened("one", signing=signing)
    assert load(bind(cache), Engine(FULL))[1] == []
    check = "damaged" if signing else "foreign"
    assert cache.counters.get("refused_records", tier="redis", check=check) > 0


@pytest.mark.parametrize("codec", ["zstd", "fp8"])
def test_encryption_works_with_a_codec(opened: Open, tier: str, codec: str) -> None:
    if tier != "nvme":
        pytest.skip("only a drive has a codec")
    layout = kvcache.KVLayout.mha(layers=1, kv_heads=2, head_dim=64, dtype="fp32", block_tokens=4)
    values = np.random.default_rng(1).standard_normal((2, 10, 4, 2, 64)).astype(np.float32)
    pages = [kvcache.GroupPages.from_tensors(layout, [values], axes=("kv", "page", "token", "head", "dim"))]
    with opened("one", codec=codec).namespace(layout, model="m", revision="1").request() as r:
        r.match(TOKENS)
        assert r.store(pages, [list(range(10))]).wait(30)
    cache = opened("one", codec=codec)
    before = values.copy()
    values[:] = np.nan
    with cache.namespace(layout, model="m", revision="1").request() as r:
        assert r.match(TOKENS).by_tier == {"nvme": 10}
        r.admit()
        transfer = r.load(10, pages, [list(range(10))])
        assert transfer.wait(30)
        assert transfer.blocks == 10
    assert np.array_equal(values, before) if codec == "zstd" else np.allclose(values, before, atol=0.2)


def test_a_key_file_without_keys_is_refused_at_start(opened: Open, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"encryption\.key_file"):
        kvcache.open(nvme={"enabled": False}, encryption={"key_file": str(tmp_path / "none")})
