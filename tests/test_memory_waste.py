"""`benchmarks/memory_waste.py`: its counts equal examples worked out by hand and a count of every page."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def memory_waste() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        import memory_waste

        yield memory_waste


def test_paging_wastes_only_the_last_page(memory_waste: Any) -> None:
    """20 tokens of a prompt, 8 of an answer: two pages, 12 tokens of the second empty, then 4."""
    found = memory_waste.simulate(
        [memory_waste.Request(0.0, 20, 8), memory_waste.Request(0.5, 16, 8)], memory_waste.Paged(64)
    )
    assert (found.held, found.internal, found.external) == (32 + 16, 12 + 0, 0)


def test_a_hole_is_external_waste_for_a_larger_request(memory_waste: Any) -> None:
    memory = memory_waste.Contiguous(100, lambda request: request.tokens)
    first, second, third = (
        memory_waste.Request(0.0, 30, 10),
        memory_waste.Request(0.0, 30, 10),
        memory_waste.Request(0.0, 40, 20),
    )
    assert memory.admit(first, 30)
    assert memory.admit(second, 30)
    memory.free(first)
    assert not memory.admit(third, 40)
    assert memory.lost_tokens(third) == 60
    assert memory.lost_tokens(memory_waste.Request(0.0, 60, 10)) == 0, (
        "there would not have been enough in one piece either"
    )
    memory.free(second)
    assert memory.admit(third, 40)


def test_shared_instructions_are_counted_once_if_shared(memory_waste: Any) -> None:
    blocks = [b"a", b"b"]
    for share, duplicate, held in ((True, 0, 4), (False, 32, 6)):
        memory = memory_waste.Paged(1024, share=share)
        requests = [memory_waste.Request(0.0, 40, 4, blocks) for _ in range(2)]
        for request in requests:
            assert memory.admit(request, 40)
        assert (memory.duplicate_tokens, memory.held_tokens) == (duplicate, held * 16)
        memory.free(requests[0])
        assert memory.duplicate_tokens == 0
        memory.free(requests[1])
        assert (memory.duplicate_tokens, memory.held_tokens) == (0, 0)


@given(data=st.data(), share=st.booleans())
def test_page_counts_equal_a_count_of_every_page(memory_waste: Any, data: Any, share: bool) -> None:
    memory, running = memory_waste.Paged(16 * 40, share=share), []
    for i in range(data.draw(st.integers(1, 20))):
        if running and data.draw(st.booleans()):
            memory.free(running.pop(data.draw(st.integers(0, len(running) - 1))))
        else:
            common = data.draw(st.integers(0, 4))
            blocks = [b"%d" % n for n in range(common)] + [b"%d of %d" % (n, i) for n in range(2)]
            request = memory_waste.Request(0.0, 16 * len(blocks) + 3, 5, blocks)
            if memory.admit(request, request.prompt_tokens):
                running.append(request)
        assert memory.pool.check() == []
        pages = {page for request in running for page in request.pages}
        assert memory.held_tokens == 16 * len(pages)
        contents = {(page, content) for r in running for page, content in zip(r.pages, r.blocks, strict=False)}
        copies = Counter(content for _, content in contents)
        assert memory.duplicate_tokens == 16 * sum(count - 1 for count in copies.values())


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(0, 5)), max_size=40))
def test_pieces_never_overlap_and_holes_are_joined(memory_waste: Any, steps: list[tuple[int, int]]) -> None:
    memory, running = memory_waste.Contiguous(100, lambda request: request.tokens), []
    for size, which in steps:
        request = memory_waste.Request(0.0, size, 1)
        if which < len(running):
            memory.free(running.pop(which))
        elif memory.admit(request, size):
            running.append(request)
        parts = sorted([*memory._holes, *memory._pieces.values()])
        assert [at for at, _ in parts] == [sum(length for _, length in parts[:i]) for i in range(len(parts))]
        assert sum(length for _, length in parts) == 100
        holes = memory._holes
        assert all(sum(one) < other[0] for one, other in pairwise(holes))


def test_paging_wastes_less_than_four_percent(tmp_path: Path) -> None:
    target = tmp_path / "waste.json"
    command = [sys.executable, ROOT / "benchmarks" / "memory_waste.py", "--quick", "--json", target]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": str(ROOT)})
    rows = {row["id"]: row for row in json.loads(target.read_text())["rows"]}
    assert {"waste/paged", "waste/contiguous", "waste/duplicate"} <= rows.keys()
    for name, row in rows.items():
        assert 0 <= row["value"] < 100
        if name.endswith("paged"):
            assert row["value"] < 4
            assert row["vs_peer"] > 4
