"""Random lives of requests against a plain model: what a block of these tokens must contain, from any request.

A block's bytes follow from the prefix, as they do in a real engine, so any load that says DONE can be checked. The
cache is small, so that stores drop, victims leave and records come back from the drive. Ends with nothing held, a
clean audit, and, with a drive, everything that was flushed there again after a restart.
"""

from __future__ import annotations

import shutil
import tempfile
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

import kvcache
from kvcache.block.layout import KVLayout
from kvcache.tier.tier import Outcome
from kvcache.transfer.pages import GroupPages

LAYOUT = KVLayout.mha(layers=2, kv_heads=2, head_dim=64, dtype="fp32", block_tokens=4)  # 8 KiB a block
PAGES = 32
KiB = 1 << 10


def contents(space: int, tokens: list[int]) -> bytes:
    """What the block that ends these tokens holds."""
    seed = sha256(repr((space, tokens)).encode()).digest()
    return np.random.default_rng(list(seed)).bytes(LAYOUT.block_bytes())


class CacheMachine(RuleBasedStateMachine):
    nvme = False
    host_records = 12

    @initialize()
    def begin(self) -> None:
        self.directory = Path(tempfile.mkdtemp())
        self.memory = [np.zeros((2, PAGES, 4, 2, 64), np.float32) for _ in range(2)]
        self.pages = [GroupPages.from_tensors(LAYOUT, self.memory, axes=("kv", "page", "token", "head", "dim"))]
        self.stored: set[tuple[int, tuple[int, ...]]] = set()
        self.requests: list[tuple[Any, int, list[int], Any]] = []
        self.open()

    def open(self) -> None:
        self.cache: Any = kvcache.open(
            host={"capacity_bytes": self.host_records * 12 * KiB, "slab_bytes": 48 * KiB},
            nvme={
                "enabled": self.nvme,
                "path": self.directory,
                "capacity_bytes": 768 * KiB,
                "segment_bytes": 48 * KiB,
                "min_free_bytes": 0,
            },
            flow={"queue_blocks": 8},
        )
        self.spaces = [
            self.cache.namespace(LAYOUT, model="m", revision="r", tenant=tenant, cache_salt=salt)
            for tenant, salt in (("a", ""), ("a", "s"), ("b", ""))
        ]

    def write_page(self, page: int, payload: bytes) -> None:
        block = np.frombuffer(payload, np.float32).reshape(2, 2, 4, 2, 64)
        for layer in range(2):
            self.memory[layer][:, page] = block[layer]

    def read_page(self, page: int) -> bytes:
        return np.stack([self.memory[layer][:, page] for layer in range(2)]).tobytes()

    @rule(space=st.integers(0, 2), branch=st.integers(0, 2), length=st.integers(1, 40))
    def ask(self, space: int, branch: int, length: int) -> None:
        tokens = [branch * 1000 + i if i > 9 else i for i in range(length)]  # branches share their first blocks
        r = self.spaces[space].request()
        hit = r.match(tokens)
        assert hit.blocks <= length // 4
        for i in range(hit.blocks):
            assert (space, tuple(tokens[: 4 * i + 4])) in self.stored, "found what was never stored"
        self.requests.append((r, space, tokens, hit))

    @rule(data=st.data(), admit=st.booleans(), more=st.integers(0, 2))
    def load(self, data: st.DataObject, admit: bool, more: int) -> None:
        if not self.requests:
            return
        r, space, tokens, hit = data.draw(st.sampled_from(self.requests))
        if admit:
            r.admit()
        end = min(hit.blocks + more, len(r.signatures))
        first = data.draw(st.integers(0, end))
        ids = data.draw(st.permutations(range(PAGES)))[: end - first]
        transfer = r.load(end, self.pages, [ids], first_block=first)
        assert transfer.wait(30)
        for i, outcome in enumerate(transfer.outcomes):
            if outcome is Outcome.DONE:
                assert self.read_page(ids[i]) == contents(space, tokens[: 4 * (first + i) + 4]), "wrong bytes"
        assert Outcome.FAILED not in transfer.outcomes

    @rule(data=st.data(), grow=st.integers(0, 9))
    def store(self, data: st.DataObject, grow: int) -> None:
        if not self.requests:
            return
        r, space, tokens, _ = data.draw(st.sampled_from(self.requests))
        new = [len(tokens) + 7 * i for i in range(grow)]
        r.extend(new)
        tokens += new
        blocks = len(r.signatures)
        first = data.draw(st.integers(max(0, blocks - PAGES), blocks))
        ids = data.draw(st.permutations(range(PAGES)))[: blocks - first]
        for i, page in enumerate(ids):
            self.write_page(page, contents(space, tokens[: 4 * (first + i) + 4]))
        transfer = r.store(self.pages, [ids], first_block=first)
        assert transfer.wait(30)
        assert set(transfer.outcomes) <= {Outcome.DONE, Outcome.DROPPED}
        self.stored.update((space, tuple(tokens[: 4 * (first + i) + 4])) for i in range(transfer.blocks))

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        if self.requests:
            self.requests.pop(data.draw(st.integers(0, len(self.requests) - 1)))[0].close()

    @rule()
    def audit(self) -> None:
        assert self.cache.flush(30)
        assert self.cache.check() == []
        tiers = self.cache.stats()["tiers"]
        for tier in tiers.values():
            assert tier["used_bytes"] <= tier["capacity_bytes"]
            assert tier["held_bytes"] * 4 <= tier["capacity_bytes"]

    @rule()
    def restart(self) -> None:
        if self.nvme:
            self.settle()
            there = self.cache.index.names("nvme")
            self.cache.close()
            self.open()
            assert self.cache.index.names("nvme") == there
        elif not self.requests:
            self.cache.close()
            self.stored.clear()
            self.open()

    def settle(self) -> None:
        for r, *_ in self.requests:
            r.close()
        self.requests = []
        assert self.cache.flush(30)
        assert self.cache.check() == []
        assert self.cache.index.held() == 0
        assert set(self.cache._context.holds.held_bytes().values()) == {0}
        slabs = list(self.cache.host.arena.slabs())
        assert all(slot.references == 1 for slab in slabs for slot in slab.slots.values())

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            self.settle()
            self.cache.close()
            assert list(self.cache.host.arena.slabs()) == []
            shutil.rmtree(self.directory)


class HostMachine(CacheMachine):
    pass


class NvmeMachine(CacheMachine):
    nvme = True


TestHost = HostMachine.TestCase
TestHost.settings = settings(max_examples=2 * settings.default.max_examples, stateful_step_count=40)
TestNvme = NvmeMachine.TestCase
TestNvme.settings = settings(max_examples=settings.default.max_examples, stateful_step_count=40)
