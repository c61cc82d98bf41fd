"""What single calls of a request and of a store take, by pytest-benchmark: the median of its rounds.

A prompt of 131,072 tokens is 8,192 blocks of 16, all there in an index of 10^5 blocks; a block's bytes are 2 MiB.

    micro/digest     the digest chain of the prompt
    micro/where      which tiers have each of its blocks
    micro/touch      a use of each counted
    micro/hold       each kept from leaving, and let go
    micro/seal       a record's header written, with the payload's checksums
    micro/verify     a record checked whole: header, address, payload

`pytest benchmarks/microbenchmarks.py` gives pytest-benchmark's own table and takes its options (`--benchmark-compare`).
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from harness import Row, options, publish

from kvcache.block.chain import SIGNATURE_BYTES, digest_chain
from kvcache.block.layout import Shard
from kvcache.block.record import Address, header_area, seal, verify
from kvcache.evict.policy import LRU
from kvcache.index.block_run import BlockRun, pack_shard_key
from kvcache.index.index import Index

SPACE, SHARD = bytes(32), Shard(0, 32, 0, 8)
BLOCK_TOKENS, BLOCKS, FILLED, BLOCK_BYTES = 16, 8192, 100_000, 2 << 20

Timed = Callable[[Callable[[], object]], object]


@pytest.fixture(scope="module")
def random() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture(scope="module")
def prompt(random: np.random.Generator) -> BlockRun:
    return BlockRun(pack_shard_key(SPACE, 0, SHARD), random.bytes(SIGNATURE_BYTES * BLOCKS))


@pytest.fixture(scope="module")
def index(random: np.random.Generator, prompt: BlockRun) -> Index:
    made = Index(["host", "nvme"], LRU())
    for run in (BlockRun(prompt.shard_key, random.bytes(SIGNATURE_BYTES * (FILLED - BLOCKS))), prompt):
        made.tick()
        made.insert_run(run, SPACE, "host")
    return made


@pytest.fixture(scope="module")
def record(random: np.random.Generator) -> tuple[memoryview, memoryview, Address]:
    signature, parent = random.bytes(SIGNATURE_BYTES), random.bytes(SIGNATURE_BYTES)
    header = memoryview(bytearray(header_area(BLOCK_BYTES)))
    payload = memoryview(bytearray(random.bytes(BLOCK_BYTES)))
    return header, payload, Address(SPACE, signature, parent, 0, SHARD)


def test_digest(benchmark: Timed, random: np.random.Generator) -> None:
    tokens = random.integers(0, 128_000, BLOCKS * BLOCK_TOKENS, dtype=np.uint32)
    signatures = benchmark(lambda: digest_chain(SPACE, tokens, BLOCK_TOKENS, None))
    assert isinstance(signatures, bytes)
    assert len(signatures) == BLOCKS * SIGNATURE_BYTES


def test_where(benchmark: Timed, index: Index, prompt: BlockRun) -> None:
    assert benchmark(lambda: index.tier_masks(prompt)) == b"\1" * BLOCKS


def test_touch(benchmark: Timed, index: Index, prompt: BlockRun) -> None:
    benchmark(lambda: index.touch(prompt, index.tick()))
    assert index.check() == []


def test_hold(benchmark: Timed, index: Index, prompt: BlockRun) -> None:
    def hold() -> int:
        held = index.hold(prompt)
        index.release(prompt)
        return held[0]

    assert benchmark(hold) == BLOCKS
    assert index.held() == 0


def test_seal(benchmark: Timed, record: tuple[memoryview, memoryview, Address]) -> None:
    header, payload, address = record
    benchmark(lambda: seal(header, payload, address, stored_bytes=BLOCK_BYTES))
    assert verify(header, payload, address).address == address


def test_verify(benchmark: Timed, record: tuple[memoryview, memoryview, Address]) -> None:
    header, payload, address = record
    seal(header, payload, address, stored_bytes=BLOCK_BYTES)
    benchmark(lambda: verify(header, payload, address))


def main() -> None:
    arguments = options(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as place:
        path = Path(place, "measured.json")
        most_s = 0.2 if arguments.quick else 2
        words = [f"--benchmark-json={path}", f"--benchmark-max-time={most_s}", "-q", "-p", "no:cacheprovider"]
        if status := pytest.main([__file__, *words]):
            raise SystemExit(status)
        measured = json.loads(path.read_text())["benchmarks"]
    rows = [Row(f"micro/{one['name'].removeprefix('test_')}", one["stats"]["median"] * 1e6, "us") for one in measured]
    publish("microbenchmarks", rows, arguments.json)


if __name__ == "__main__":
    main()
