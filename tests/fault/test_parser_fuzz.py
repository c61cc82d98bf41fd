"""Any bytes, for everything here that reads bytes which others wrote: the parser's own error, or what was written.

Each parser gets sound input, damaged in ways that find more than chance would: bits, cuts, numbers at their limits,
pieces doubled, swapped or taken from another input. What it accepts all the same must be what the undamaged input said
wherever a checksum guards it. By seed: the default run does the same each time, `--long` a hundred times as much.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgpack
import numpy as np
import pytest

from kvcache.block.chain import Chain
from kvcache.block.hf import engine_facts, layout_from_hf
from kvcache.block.layout import KVLayout, Shard
from kvcache.block.record import RecordError, header_area, read_header, verify
from kvcache.block.revision import model_revision
from kvcache.codec.codec import codec, codecs
from kvcache.daemon import protocol as control
from kvcache.daemon.protocol import (
    HEADER_BYTES,
    body_length,
    pack,
    parse_layout,
    parse_reply,
    parse_request,
    parse_shards,
    unpack,
)
from kvcache.daemon.server.slot_lease import LEASE_DTYPE
from kvcache.daemon.shm import SlabMappings
from kvcache.errors import ConfigError, KVCacheError, LayoutError, ModelError, StoreError, TokenError
from kvcache.os_env import SystemClock
from kvcache.settings.sources import load
from kvcache.settings.tiers import NvmeSettings
from kvcache.settings.types import parse_bytes
from kvcache.tier.nvme.archive import export_archive, import_archive
from kvcache.tier.nvme.journal import ENTRY_BYTES, PUT, Entry, FileHeader, HeaderError, pack_frame, read_frames
from kvcache.tier.nvme.segment import SegmentFooter
from kvcache.tier.nvme.tier import NvmeTier
from kvcache.tier.redis import keys as redis_name
from kvcache.tier.redis.wire import ProtocolError, RespConnection
from kvcache.tier.tier import Outcome
from kvcache.transfer.copier import CopierRegistry
from tests.fault.corruption import corrupt
from tests.tier.blocks import chain, payload, record

LAYOUT = KVLayout.mha(layers=2, kv_heads=2, head_dim=8, dtype="fp32", block_tokens=4)
ADDRESS = chain(2)[1]
SIZE = 300_000  # two chunks


@dataclass(frozen=True)
class Parser:
    """`read` gets damaged bytes, and may raise `refuses`. `rounds` in the default run."""

    sound: Sequence[bytes]
    read: Callable[[bytes], object]
    refuses: type[Exception] | tuple[type[Exception], ...] = ()
    rounds: int = 2000
    files: bool = field(default=False)  # `read` also gets a folder of the test


def record_bytes_of() -> list[bytes]:
    return [
        b"".join(record(address, size)) for address, size in ((ADDRESS, SIZE), (chain(1)[0], 1), (chain(1)[0], SIZE))
    ]


def read_record(data: bytes) -> None:
    area = header_area(SIZE)
    header, body = memoryview(bytearray(data[:area])), memoryview(bytearray(data[area:]))
    read_header(header)
    verify(header, body, ADDRESS)
    assert bytes(body[:SIZE]) == payload(ADDRESS, SIZE), "a damaged payload passed for the one that was stored"


ENTRIES = [
    Entry(PUT, segment=1, slot=i, record_bytes=4096 * i, signature=a.signature).pack() for i, a in enumerate(chain(9))
]


def journal() -> list[bytes]:
    head = FileHeader(1, 7, 5).pack()
    first, second = b"".join(ENTRIES[:4]), b"".join(ENTRIES[4:])
    return [head + pack_frame(first, 5, 7) + pack_frame(second, 9, 7), head + pack_frame(second, 5, 7)]


def read_journal(data: bytes) -> None:
    header = FileHeader.unpack(data, 1, 7)
    assert header == FileHeader(1, 7, 5)
    found = read_frames(bytearray(data), header.sequence, 7)
    entries = b"".join(found.entries)
    assert any(whole.startswith(entries) for whole in (b"".join(ENTRIES), b"".join(ENTRIES[4:]))), (
        "entries that were never written"
    )
    assert found.sequence == 5 + len(entries) // ENTRY_BYTES


def read_label(data: bytes) -> None:
    assert SegmentFooter.unpack(data) in (None, SegmentFooter(64, 3, 12288))


def read_head_in_redis(data: bytes) -> None:
    head = data[:174]
    found = redis_name.address_of(head)
    if redis_name.looks_like_record(head):
        redis_name.stored_bytes_of(head), redis_name.write_id_of(head), redis_name.header_bytes_of(head)
    if found is not None and redis_name.is_head_of(head, ADDRESS):
        assert (found.namespace, found.signature) == (ADDRESS.namespace, ADDRESS.signature)


def messages() -> list[bytes]:
    lent = np.array([(0, 0, 0, 1, 2, 3), (1, 0, 0, 1, 3, 3)], LEASE_DTYPE)
    layout = LAYOUT.describe()
    return [
        pack({"op": "hello", "version": 1, "role": "control", "engine": "e"}),
        pack(
            {
                "op": "namespace",
                "layout": layout,
                "model": "m",
                "revision": "r",
                "tenant": "t",
                "cache_salt": "",
                "facts": {"a": [1, {"b": None}]},
                "shards": [[0, 2, 0, 2]],
                "ranks": [[[0, 2, 0, 2]]],
            }
        ),
        pack({"op": "match", "request": 1, "signatures": bytes(64)}),
        pack({"op": "load", "request": 1, "first": 0, "end": 2}),
        pack({"lent": lent.tobytes(), "extents": [], "gone": [1], "blocks": 2}),
        pack({"ok": {"outcomes": b"\0\1"}}),
        pack({"error": "closed", "text": "gone"}),
    ]


def read_message(data: bytes) -> None:
    size = body_length(data[:HEADER_BYTES])
    message = unpack(data[HEADER_BYTES : HEADER_BYTES + size])
    if "op" in message:
        op, _ = parse_request(message, "control" if message["op"] in ("hello", "namespace", "match") else "mover")
        if op == "namespace":
            parse_layout(message["layout"])
            parse_shards(message.get("shards") or [])
    elif "lent" in message:
        there = SlabMappings(CopierRegistry(lambda call: None), lambda call: None)
        there.map_slabs(message.get("extents", ()), (), message.get("gone", ()))
        there.parse_leases(message["lent"], blocks=2, groups=1)
    else:
        parse_reply(message)


def read_control(data: bytes) -> None:
    here, there = socket.socketpair()
    with here, there:
        there.sendall(data)
        there.shutdown(socket.SHUT_WR)
        assert isinstance(control.receive_message(here, max_bytes=1 << 16, timeout_s=30), dict)


def control_frames() -> list[bytes]:
    bodies = [msgpack.packb({"verb": "stats", "args": {}}), msgpack.packb({"verb": "bypass", "args": {"mode": "on"}})]
    return [len(body).to_bytes(4, "little") + body for body in bodies]


REPLIES = [
    b"$5\r\nhello\r\n+OK\r\n",
    b"*3\r\n:1\r\n$-1\r\n*1\r\n$2\r\nab\r\n",
    b">2\r\n$10\r\ninvalidate\r\n*1\r\n$1\r\nk\r\n:7\r\n",
    b"-LOADING the data set\r\n",
    b"%1\r\n$1\r\na\r\n:2\r\n_\r\n",
]


def read_reply(data: bytes) -> None:
    here, there = socket.socketpair()
    with here, there:
        there.sendall(data)
        there.shutdown(socket.SHUT_WR)
        wire = RespConnection(None, here, SystemClock())
        wire.set_deadline(30.0)
        wire.reply()


def layouts() -> list[bytes]:
    hybrid = KVLayout.mha(layers=4, kv_heads=8, head_dim=64, order=("layer", "kv", "head", "token", "dim"))
    return [json.dumps(each.describe()).encode() for each in (LAYOUT, hybrid)]


def read_layout_json(data: bytes) -> None:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return
    if isinstance(found, dict):
        parse_layout(found)


CONFIGS = [
    {
        "model_type": "llama",
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "hidden_size": 512,
        "head_dim": 64,
        "torch_dtype": "bfloat16",
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0},
        "max_position_embeddings": 8192,
    },
    {
        "model_type": "gemma3_text",
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "hidden_size": 640,
        "head_dim": 256,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "torch_dtype": "bfloat16",
    },
    {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 3,
        "num_attention_heads": 16,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "torch_dtype": "bfloat16",
    },
]


def read_model_config(data: bytes) -> None:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return
    layout_from_hf(found)
    engine_facts(found)


SETTINGS = [
    b"""
block_tokens = 32
[host]
capacity_bytes = "1GiB"
slab_bytes = "64MiB"
[nvme]
enabled = false
[flow]
deadline_s = 0.5
queue_blocks = 10
[log]
format = "json"
""",
    b"""
[nvme]
path = "/tmp/x"
capacity_bytes = "1GB"
codec = "zstd"
threads = 7
[control]
enabled = false
""",
]


def read_settings(data: bytes, place: Path) -> None:
    file = place / "settings.toml"
    file.write_bytes(data)
    load(file, environ={})


def safetensors() -> list[bytes]:
    head = json.dumps({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}, "__metadata__": {"f": "pt"}})
    return [struct.pack("<Q", len(head)) + head.encode() + bytes(range(16))]


def read_revision(data: bytes, place: Path) -> None:
    (place / "model.safetensors").write_bytes(data)
    assert model_revision(place).startswith("sha256:")


def archives(place: Path) -> list[bytes]:
    addresses = chain(3)
    tier = opened(place / "from")
    assert set(tier.write(addresses, [record(a, 3000) for a in addresses])) == {Outcome.DONE}
    asyncio.run(export_archive(tier, str(place / "whole"), None))
    tier.close()
    return [(place / "whole").read_bytes()]


def opened(path: Path) -> NvmeTier:
    return NvmeTier(
        str(path),
        NvmeSettings(capacity_bytes=8 << 20, segment_bytes=1 << 18, durability="none", threads=1, min_free_bytes=0),
    )


def read_archive(data: bytes, place: Path) -> None:
    (place / "damaged").write_bytes(data)
    asyncio.run(import_archive(None, str(place / "damaged")))


def encoded(name: str) -> list[bytes]:
    rng = np.random.default_rng(1)
    values = [rng.standard_normal(256).astype(np.float32).tobytes(), bytes(1024)]
    return [bytes(codec(name).encode(memoryview(v), LAYOUT, 0, LAYOUT.groups[0].whole) or b"") for v in values]


def read_codec(name: str) -> Callable[[bytes], None]:
    def read(data: bytes) -> None:
        into = memoryview(bytearray(1024))
        codec(name).decode(memoryview(data), into, LAYOUT, 0, LAYOUT.groups[0].whole)

    return read


def read_chain(data: bytes) -> None:
    Chain.from_signatures(bytes(32), data, 16)
    Chain.from_digests(bytes(32), [data[i : i + 32] for i in range(0, len(data), 32)], 16)
    Chain(data[:32], 16)


PARSERS: dict[str, Parser] = {
    "record": Parser(record_bytes_of(), read_record, RecordError, rounds=400),
    "record head": Parser([r[:700] for r in record_bytes_of()], read_header, RecordError),
    "journal": Parser(journal(), read_journal, HeaderError),
    "segment label": Parser([SegmentFooter(64, 3, 12288).pack()], read_label),
    "shard": Parser([Shard(0, 2, 0, 4).pack()], lambda data: Shard.unpack(data.ljust(8, b"\0")[:8]), LayoutError),
    "record head in redis": Parser([r[:400] for r in record_bytes_of()], read_head_in_redis),
    "daemon message": Parser(messages(), read_message, KVCacheError, rounds=6000),
    "control message": Parser(control_frames(), read_control, control.FrameError),
    "reply of redis": Parser(REPLIES, read_reply, ProtocolError, rounds=4000),
    "layout": Parser(layouts(), read_layout_json, LayoutError),
    "model config": Parser(
        [json.dumps(c).encode() for c in CONFIGS], read_model_config, (LayoutError, ModelError, ConfigError)
    ),
    "settings": Parser(SETTINGS, read_settings, ConfigError, rounds=500, files=True),
    "size": Parser(
        [b"2GiB", b"512 MB", b"1.5T", b"4096"], lambda data: parse_bytes(data.decode("latin-1")), ValueError
    ),
    "weights": Parser(safetensors(), read_revision, ModelError, rounds=500, files=True),
    "signatures": Parser([bytes(range(64)), bytes(96)], read_chain, TokenError),
    **{f"codec {name}": Parser(encoded(name), read_codec(name), ValueError) for name in codecs()},
}


@pytest.mark.parametrize("what", PARSERS)
def test_corrupt_bytes_raise_the_parsers_own_error(what: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    parser, rng = PARSERS[what], random.Random(what)
    refused = 0
    for _ in range(parser.rounds * (100 if request.config.getoption("--long") else 1)):
        data = corrupt(rng, parser.sound)
        try:
            parser.read(data, tmp_path) if parser.files else parser.read(data)  # type: ignore[call-arg]
        except parser.refuses:
            refused += 1
        except AssertionError:
            raise
        except Exception as error:
            raise AssertionError(f"{what}: {error!r} for {data[:400]!r}") from error
    assert refused or not parser.refuses, "nothing was ever refused: this tests nothing"


@pytest.mark.parametrize("what", PARSERS)
def test_valid_bytes_are_read(what: str, tmp_path: Path) -> None:
    parser = PARSERS[what]
    first = parser.sound[0]
    parser.read(first, tmp_path) if parser.files else parser.read(first)  # type: ignore[call-arg]


LARGE = [b"$536870913\r\nx", *(kind + b"99999999999999\r\n" for kind in (b"$", b"*", b"%"))]
DEEP = [kind + b"1\r\n" * 5000 for kind in (b"*", b">")]
OF_NO_KEYS = [b"1\r\n%b", b"2\r\n%b:7\r\n", b"2\r\n%b*1\r\n:7\r\n", b"2\r\n%b$1\r\nk\r\n", b"3\r\n%b_\r\n_\r\n"]


@pytest.mark.parametrize("reply", [*LARGE, *DEEP, *(b">" + told % b"$10\r\ninvalidate\r\n" for told in OF_NO_KEYS)])
def test_absurd_server_replies_are_refused(reply: bytes) -> None:
    with pytest.raises(ProtocolError):
        read_reply(reply + b":7\r\n")


def test_corrupt_archives_are_refused(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    sound, rng = archives(tmp_path), random.Random(0)
    read_archive(sound[0], tmp_path)
    for _ in range(10_000 if request.config.getoption("--long") else 150):
        data = corrupt(rng, sound)
        if data == sound[0]:
            continue
        with pytest.raises(StoreError, match="archive"):
            read_archive(data, tmp_path)
