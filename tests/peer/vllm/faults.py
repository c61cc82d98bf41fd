"""Imported into a vLLM under test: each cache that is opened lets its engine down at random, by FAULTS.

FAULTS="7 none none damaged hung"     seed, and what may come, each as often as it stands there
FAULTS="7 none raising"               beside these, one call in ten of its whole face raises
"""

from __future__ import annotations

import os
import random
from collections import Counter
from typing import Any

import kvcache
from kvcache.cache.api import PageIds
from kvcache.testing.faulty_cache import FaultyCache, FaultyNamespace, FaultyRequest, RaisingProxy
from kvcache.transfer.cpu import ReferenceCopier
from kvcache.transfer.pages import Pages

_seed, *_faults = os.environ["FAULTS"].split()
_raises = "raising" in _faults
_faults = [fault for fault in _faults if fault != "raising"]
COUNTS: Counter[str] = Counter()


class Request(FaultyRequest):
    """Leaves numbers in the pages of what did not come: vLLM's attention multiplies what it masks by nought, which no
    NaN survives, and no cache that checks before it copies leaves one."""

    def load(self, blocks: int, pages: Pages, page_ids: PageIds, *, first_block: int = 0) -> Any:
        transfer = super().load(blocks, pages, page_ids, first_block=first_block)
        for there, ids in zip(pages, page_ids, strict=True):
            bad = list(ids[transfer.blocks :])
            ReferenceCopier().scatter(
                there, bad, [memoryview(b"\x00\x00\xe0\x40" * (there.block_bytes // 4))] * len(bad)
            )
        return transfer


class Random(FaultyCache):
    def __init__(self) -> None:
        self._random = random.Random(int(_seed))
        super().__init__()

    def namespace(self, *fields: Any, **named: Any) -> FaultyNamespace:
        handle = super().namespace(*fields, **named)
        handle.request = lambda name="", **_: Request(handle, name)  # type: ignore[method-assign]
        return handle

    @property
    def fault(self) -> Any:
        fault = self._random.choice(_faults)
        COUNTS[fault] += 1
        return fault

    @fault.setter
    def fault(self, value: str) -> None:
        pass


def _open(*_where: Any, **_settings: Any) -> Any:
    if not _raises:
        return Random()
    chance = random.Random(int(_seed))
    return RaisingProxy(Random(), lambda name: name not in {"stats", "close"} and chance.random() < 0.1)


kvcache.open = _open
