"""SGLang's own controller over our backend: what comes back after a restart is what was computed, byte for byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.peer.sglang.stack import PAGE, Stack

LAYOUTS = (
    ("layer_first", "direct"),
    ("layer_first", "kernel"),
    ("page_first", "kernel"),
    ("page_first_direct", "direct"),
    ("page_head", "kernel"),
)
PROMPT = list(range(2, 2 + 40 * PAGE))

pytestmark = pytest.mark.usefixtures("sglang_here")


def equal(left: Any, right: Any) -> bool:
    return all(torch.equal(a, b) for pair in zip(left, right, strict=True) for a, b in zip(*pair, strict=True))


@pytest.mark.parametrize("v1", [0, 1], ids=["v0", "v1"])
@pytest.mark.parametrize(("layout", "io"), LAYOUTS, ids=[" ".join(pair) for pair in LAYOUTS])
def test_what_comes_back_after_a_restart_is_what_was_computed(layout: str, io: str, v1: int, tmp_path: Path) -> None:
    first = Stack(tmp_path, layout=layout, io=io, v1=v1)
    computed = first.compute(PROMPT)
    first.stored(40)
    first.close()
    second = Stack(tmp_path, layout=layout, io=io, v1=v1)
    assert second.match(PROMPT).host_hit_length == 0
    assert second.prefetch_of(PROMPT) == len(PROMPT)
    assert equal(second.bring_back(PROMPT), computed)
    assert second.backend.cache.check() == []
    second.close()
