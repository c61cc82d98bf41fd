"""The page pool against a plain account of who has what."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from kvcache.engine.pool import PagePool
from kvcache.errors import ConfigError


class Copying:
    """A transfer that ends when the test says so."""

    def __init__(self) -> None:
        self.done = False


def chain(name: int, blocks: int) -> list[bytes]:
    return [f"{name}/{i}".encode() for i in range(blocks)]


def filled(pool: PagePool, signatures: list[bytes]) -> list[int]:
    pages = pool.allocate(len(signatures))
    assert pages is not None
    return [pool.publish(page, signature) for page, signature in zip(pages, signatures, strict=True)]


def test_a_pool_needs_at_least_one_page() -> None:
    with pytest.raises(ConfigError, match="pages = 0"):
        PagePool(0)


def test_allocate_returns_all_pages_or_none() -> None:
    pool = PagePool(4)
    assert pool.allocate(5) is None
    pages = pool.allocate(4)
    assert pages is not None
    assert sorted(pages) == [0, 1, 2, 3]
    assert pool.allocate(1) is None
    assert pool.allocate(0) == []
    pool.release(pages)
    assert pool.available == 4
    assert pool.check() == []


def test_released_blocks_are_hits_and_reused_tail_first() -> None:
    pool = PagePool(6)
    a, b = chain(1, 3), chain(2, 3)
    pool.release(filled(pool, a))
    pool.release(filled(pool, b))
    assert pool.available == 6
    pool.allocate(2)
    assert pool.acquire(a) == [pool.acquire(a[:1])[0]], "the tail of the longest idle chain left, its head stayed"
    assert len(pool.acquire(b)) == 3
    assert pool.check() == []


def test_a_used_chain_is_evicted_last() -> None:
    pool = PagePool(4)
    a, b = chain(1, 2), chain(2, 2)
    pool.release(filled(pool, a))
    pool.release(filled(pool, b))
    pool.release(pool.acquire(a))
    pool.allocate(2)
    assert pool.acquire(b) == []
    assert len(pool.acquire(a)) == 2


def test_a_block_has_one_page() -> None:
    pool = PagePool(4)
    [first] = filled(pool, chain(1, 1))
    [again] = filled(pool, chain(1, 1))
    assert again == first
    assert pool.references(first) == 2
    assert pool.available == 3
    pool.release([first])
    pool.release([first])
    [once_more] = filled(pool, chain(1, 1))  # the earlier one is idle
    assert once_more == first
    assert pool.check() == []


def test_a_page_under_store_is_a_hit_but_not_allocated() -> None:
    pool, store = PagePool(2), Copying()
    a = chain(1, 2)
    pages = filled(pool, a)
    pool.watch(store, pages)
    pool.release(pages)
    assert pool.allocate(1) is None
    assert pool.acquire(a) == pages
    pool.release(pages)
    pool.clear()
    assert pool.acquire(a) == []
    assert pool.allocate(1) is None, "forgotten, but still read"
    store.done = True
    pool.poll()
    assert pool.available == 2
    assert pool.check() == []


def test_a_page_of_an_abandoned_load_is_freed_at_its_end() -> None:
    pool, load = PagePool(2), Copying()
    pages = pool.allocate(2)
    assert pages is not None
    pool.watch(load, pages)
    pool.release(pages)
    assert (pool.available, pool.busy, pool.check()) == (0, True, [])
    pool.poll()
    assert pool.available == 0
    load.done = True
    pool.poll()
    assert (pool.available, pool.busy, pool.check()) == (2, False, [])


def test_check_reports_inconsistencies() -> None:
    pool = PagePool(2)
    pages = pool.allocate(1)
    assert pages is not None
    pool._free.append(pages[0])
    assert any("one state" in fault for fault in pool.check())


class PoolMachine(RuleBasedStateMachine):
    """Any order of calls: no page given out while somebody has it, reads it or writes it."""

    tables = Bundle("tables")
    copies = Bundle("copies")

    @initialize(pages=st.integers(1, 12))
    def start(self, pages: int) -> None:
        self.pool = PagePool(pages)
        self.held: Counter[int] = Counter()
        self.copying: list[tuple[Copying, list[int]]] = []
        self.holds: dict[int, bytes] = {}  # what the bytes of each page are: written when given out, not before

    def busy(self) -> set[int]:
        return {page for copy, pages in self.copying if not copy.done for page in pages}

    @rule(target=tables, name=st.integers(0, 2), blocks=st.integers(1, 6), publish=st.booleans())
    def begin(self, name: int, blocks: int, publish: bool) -> list[int]:
        signatures = chain(name, blocks)
        found = self.pool.acquire(signatures)
        assert [self.holds[page] for page in found] == signatures[: len(found)]
        self.held.update(found)
        available = self.pool.available
        fresh = self.pool.allocate(blocks - len(found))
        assert (fresh is None) == (blocks - len(found) > available)
        if fresh is None:
            self.held.subtract(found)
            self.pool.release(found)
            return []
        assert not [page for page in fresh if self.held[page] or page in self.busy()]
        table = found + fresh
        self.held.update(fresh)
        for i in range(len(found), blocks):
            self.holds[table[i]] = signatures[i] if publish else b"private"
            if publish:
                page = self.pool.publish(table[i], signatures[i])
                self.held.subtract([table[i]])
                self.held.update([page])
                table[i] = page
        return table

    @rule(table=consumes(tables))
    def end(self, table: list[int]) -> None:
        self.pool.release(table)
        self.held.subtract(table)

    @rule(target=copies, table=tables)
    def copy(self, table: list[int]) -> Copying:
        copy = Copying()
        self.copying.append((copy, table))
        self.pool.watch(copy, table)
        return copy

    @rule(copy=consumes(copies))
    def copied(self, copy: Copying) -> None:
        copy.done = True

    @rule()
    def poll(self) -> None:
        self.pool.poll()

    @rule()
    def clear(self) -> None:
        self.pool.clear()
        assert self.pool.idle == 0

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "pool"):
            assert self.pool.check() == []
            assert all(self.pool.references(page) == self.held[page] for page in range(self.pool.pages))


TestPool = PoolMachine.TestCase
