"""A tier with a codec: what goes down encoded comes up decoded, and no client meets a loss that it did not choose."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvcache
from kvcache.block.layout import Group, KVLayout
from kvcache.block.record import header_area, read_header, record_bytes, seal
from kvcache.cache.cache import Cache
from kvcache.codec.codec import CODECS, Raw, codec
from kvcache.settings import TABLE
from kvcache.tier.record_codec import slot_bytes
from kvcache.transfer.pages import GroupPages
from tests.contract.fake_engine import flushed

KiB = 1 << 10
LAYOUT = KVLayout.mha(layers=1, kv_heads=2, head_dim=512, dtype="fp32", block_tokens=4)  # 32 KiB a block
BLOCKS = 6
TOKENS = list(range(4 * BLOCKS))
LOSSLESS, LOSSY = ("raw", "zstd"), ("fp8", "int8")


def open_at(path: Path, codec_name: str, *, capacity_bytes: int = 8 << 20, host_bytes: int = 8 << 20) -> Cache:
    made = kvcache.open(
        host={"capacity_bytes": host_bytes},
        nvme={"path": path, "capacity_bytes": capacity_bytes, "min_free_bytes": 0, "codec": codec_name},
    )
    assert isinstance(made, Cache)
    return made


class Engine:
    """A page a block: (kv, page, token, head, dim)."""

    def __init__(self, values: np.ndarray[Any, Any]) -> None:
        self.kv = np.ascontiguousarray(values, np.float32)
        self.pages = [GroupPages.from_tensors(LAYOUT, [self.kv], axes=("kv", "page", "token", "head", "dim"))]


def noise(seed: int, blocks: int = BLOCKS) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal((2, blocks, 4, 2, 512))


def bound(cache: Cache) -> Any:
    return cache.namespace(LAYOUT, model="m", revision="r")


def put(cache: Cache, tokens: Sequence[int], engine: Engine) -> None:
    with bound(cache).request() as r:
        r.match(tokens)
        assert r.store(engine.pages, [list(range(engine.kv.shape[1]))]).wait(30)
    assert flushed(cache)


def get(cache: Cache, tokens: Sequence[int]) -> tuple[int, np.ndarray[Any, Any]]:
    """Blocks found and loaded, and the pages."""
    engine = Engine(np.full((2, len(tokens) // 4, 4, 2, 512), np.nan))
    with bound(cache).request() as r:
        hit = r.match(tokens)
        r.admit()
        transfer = r.load(hit.blocks, engine.pages, [list(range(hit.blocks))])
        assert transfer.wait(30)
        return transfer.blocks, engine.kv


@pytest.mark.parametrize("name", CODECS)
def test_encoded_blocks_load_after_a_restart(name: str, tmp_path: Path) -> None:
    engine = Engine(noise(1))
    with open_at(tmp_path, name) as cache:
        put(cache, TOKENS, engine)
        used = cache.stats()["tiers"]["nvme"]["used_bytes"]
        assert cache.check() == []
    with open_at(tmp_path, name) as cache:
        blocks, kv = get(cache, TOKENS)
        assert blocks == BLOCKS
        if name in LOSSLESS:
            assert np.array_equal(kv, engine.kv)
        else:
            largest = np.abs(engine.kv).max(axis=(2, 4), keepdims=True)  # 4 tokens: one scale a head
            assert (np.abs(kv - engine.kv) <= codec(name).error_bound * largest).all()
            assert not np.array_equal(kv, engine.kv)
        assert cache.check() == []
        again = get(cache, TOKENS)  # from host, where it is an ordinary record now
        assert again[0] == BLOCKS
        assert np.array_equal(again[1], kv)
    assert (used < BLOCKS * record_bytes(LAYOUT.block_bytes())) == (name != "raw")


@pytest.mark.parametrize("name", ["zstd", "fp8", "int8"])
def test_a_record_names_its_codec(name: str, tmp_path: Path) -> None:
    with open_at(tmp_path, name) as cache:
        put(cache, TOKENS, Engine(noise(2)))
        (nvme,) = cache.lower_tiers
        size = record_bytes(LAYOUT.block_bytes())
        area = header_area(LAYOUT.block_bytes())
        for address in nvme.scan():
            record = memoryview(bytearray(size))
            assert nvme.read([address], [[record[:area], record[area:]]])[0].value == "done"
            header = read_header(record)
            assert header.codec == name
            assert header.decoded_bytes == LAYOUT.block_bytes() > header.stored_bytes
        written = cache.counters.get("encoded_bytes", tier="nvme", codec=name)
        stored = cache.counters.get("encoded_stored_bytes", tier="nvme", codec=name)
        assert written == BLOCKS * LAYOUT.block_bytes() > stored > 0


@pytest.mark.parametrize("first", CODECS)
@pytest.mark.parametrize("then", CODECS)
def test_a_store_of_another_codec_is_still_read(first: str, then: str, tmp_path: Path) -> None:
    """What was kept exactly is read by either lossless one; what passed a loss only by those who chose that very loss,
    and what did not is not met by them: one key has one meaning."""
    engine = Engine(noise(3))
    with open_at(tmp_path, first) as cache:
        put(cache, TOKENS, engine)
    with open_at(tmp_path, then) as cache:
        blocks, kv = get(cache, TOKENS)
        readable = first == then or (first in LOSSLESS and then in LOSSLESS)
        assert blocks == (BLOCKS if readable else 0)
        if then in LOSSLESS and readable:
            assert np.array_equal(kv, engine.kv)
        assert cache.check() == []


def test_a_record_of_an_unknown_codec_is_a_miss_and_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_at(tmp_path, "zstd") as cache:
        put(cache, TOKENS, Engine(noise(4)))
    monkeypatch.setattr("kvcache.tier.record_codec.codecs", lambda: {"raw": Raw()})
    with open_at(tmp_path, "raw") as cache:
        assert get(cache, TOKENS)[0] == 0
        assert cache.counters.get("refused_records", tier="nvme", check="foreign") >= 1
        assert cache.stats()["tiers"]["nvme"]["records"] == BLOCKS
        assert cache.check() == []
    monkeypatch.undo()
    with open_at(tmp_path, "raw") as cache:
        assert get(cache, TOKENS)[0] == BLOCKS


@pytest.mark.parametrize("name", CODECS)
def test_an_undecodable_record_is_a_miss_and_removed(name: str, tmp_path: Path) -> None:
    """Its checksum says that it is what was written; the codec says that it is no payload."""
    payload_bytes, engine = LAYOUT.block_bytes(), Engine(noise(5, 1))
    area = header_area(payload_bytes)
    with open_at(tmp_path, name) as cache:
        put(cache, TOKENS[:4], engine)
        (nvme,) = cache.lower_tiers
        (address,) = list(nvme.scan())
        for length, decoded in ((5000, payload_bytes), (payload_bytes, payload_bytes - 4), (5000, 5000)):
            nvme.remove([address])
            record = memoryview(bytearray(b"\xff" * record_bytes(payload_bytes)))
            seal(record[:area], record[area:], address, stored_bytes=length, decoded_bytes=decoded, codec=name)
            nvme.write([address], [[record[:area], record[area:]]])
            cache.host.unpublish(address)
            cache.index.discard(address, "host")
            cache.index.insert(address, "nvme")
            assert get(cache, TOKENS[:4])[0] == 0
            assert cache.flush(30)
            assert cache.check() == []
        assert cache.counters.get("refused_records", tier="nvme", check="damaged") == 3


@pytest.mark.parametrize("name", ["zstd", "fp8", "int8"])
def test_incompressible_blocks_are_stored_raw(name: str, tmp_path: Path) -> None:
    values = noise(6)
    if name == "zstd":
        words = np.random.default_rng(6).integers(0, 1 << 32, values.shape, np.uint32)
        values = words.view(np.float32)  # noise in every bit
    else:
        values[1, 3, 2, 1, 7] = np.inf
        values[0, 4, 0, 0, 0] = np.nan
    engine = Engine(values)
    with open_at(tmp_path, name) as cache:
        put(cache, TOKENS, engine)
        alone = cache.counters.get("encoded_bytes", tier="nvme", codec="raw") // LAYOUT.block_bytes()
        assert alone == (BLOCKS if name == "zstd" else 2)
    with open_at(tmp_path, name) as cache:
        blocks, kv = get(cache, TOKENS)
        assert blocks == BLOCKS
        for i in (3, 4):
            assert kv[:, i].tobytes() == engine.kv[:, i].tobytes()


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize(
    "group",
    [Group(layers=1, kind="opaque", opaque_bytes=64), Group(layers=1, head_dim=8, dtype="fp8_e4m3")],
    ids=["opaque", "fp8"],
)
def test_an_unsupported_layout_is_refused_at_bind(name: str, group: Group, tmp_path: Path) -> None:
    with open_at(tmp_path, name) as cache:
        with pytest.raises(kvcache.ConfigError, match=f"^nvme.codec = '{name}': group 0 .*; use raw or zstd"):
            cache.namespace(KVLayout((group,)), model="m", revision="r")
        assert cache.namespaces == []
    with open_at(tmp_path, "zstd") as cache:
        cache.namespace(KVLayout((group,)), model="m", revision="r")


def test_a_missing_codec_library_is_refused_at_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise kvcache.ConfigError("codec = 'zstd': its library is not installed; pip install 'kvcache-tiers[zstd]'")

    monkeypatch.setitem(CODECS, "zstd", missing)
    with pytest.raises(kvcache.ConfigError, match=r"^nvme\.codec = 'zstd': .*pip install"):
        open_at(tmp_path / "none", "zstd")
    assert not (tmp_path / "none").exists()
    open_at(tmp_path / "none", "fp8").close()


def test_the_settings_name_every_codec() -> None:
    assert set(get_args(TABLE["nvme.codec"].field.annotation)) == set(CODECS)


@given(st.integers(1, 1 << 40))
def test_varying_sizes_round_to_few_slot_sizes(used_bytes: int) -> None:
    size = slot_bytes(used_bytes, varies=True)
    assert used_bytes <= size <= max(4 * KiB, used_bytes + used_bytes // 8 + 4 * KiB)
    assert size % (4 * KiB) == 0
    assert slot_bytes(size, varies=True) == size
    assert slot_bytes(used_bytes, varies=False) - used_bytes < 4 * KiB


def test_each_power_of_two_has_eight_slot_sizes() -> None:
    sizes = {slot_bytes(used, varies=True) for used in range((1 << 18) + 1, (1 << 19) + 1, 64)}
    assert sizes == {(1 << 18) + i * (1 << 15) for i in range(1, 9)}


def test_records_of_every_size_pass_a_full_tier(tmp_path: Path) -> None:
    """Blocks that shrink to anything from nothing to all of their size, far more than fit, host far too small: what
    is found is right, and what is new finds room to the end."""
    rng = np.random.default_rng(7)
    kept: dict[int, np.ndarray[Any, Any]] = {}
    with open_at(tmp_path, "zstd", capacity_bytes=2 << 20, host_bytes=256 * KiB) as cache:
        for turn in range(60):
            values = noise(turn, 3).astype(np.float32)
            words = values.view(np.uint32)
            for i in range(3):
                words[:, i] &= np.uint32(0xFFFFFFFF << int(rng.integers(0, 33)) & 0xFFFFFFFF)
            kept[turn] = values
            put(cache, [turn * 1000 + t for t in range(12)], Engine(values))
            old = int(rng.integers(max(0, turn - 12), turn + 1))
            for which in (turn, old):
                blocks, kv = get(cache, [which * 1000 + t for t in range(12)])
                assert np.array_equal(kv[:, :blocks], kept[which][:, :blocks])
                assert blocks == 3 or which != turn
        assert cache.check() == []
        assert cache.counters.get("evicted_blocks", tier="nvme") > 0
        # room is made by size: a new size in the same batch may take a segment that another counted on
        assert cache.counters.get("write_failures", tier="nvme") < 60 * 3 // 20
        assert cache.counters.get("write_failures") == cache.counters.get("write_failures", outcome="no_room")
