"""What of a copy is put on a stream between two events: a run of layers, which the payload holds in one piece."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvcache.transfer.cpu import Axes
from kvcache.transfer.kernels import Direction, Launch, launches
from kvcache.transfer.pages import GroupPages
from kvcache.transfer.quantised import Quantised
from kvcache.transfer.walk import Plan, plan


@dataclass(frozen=True, slots=True)
class Part:
    plan: Plan | None  # none where the payload is not the elements as they are
    launches: Callable[[Direction, Sequence[int], NDArray[np.int64], int], Iterator[Launch]]
    end: int  # layer, excluded
    start: int  # in bytes of the payload
    size_bytes: int
    alignment: int = 1  # that kernels want of payloads


def parts(pages: GroupPages, form: Quantised | None, blocks: int, run_bytes: int | None) -> list[Part]:
    """One; or runs of layers of `run_bytes` and more in all blocks together, where the layout has layers outermost."""
    layers, size = pages.shard.layers, pages.block_bytes
    if form is not None:
        return [Part(None, form.launches, layers, 0, form.payload_bytes, 4)]
    count = 1
    if run_bytes is not None and Axes.of(pages).payload[0] * layers == size:
        count = min(layers, max(1, size * blocks // run_bytes))
    made = []
    for i in range(count):
        first, end = layers * i // count, layers * (i + 1) // count
        run = plan(pages, (first, end))
        start, stop = size * first // layers, size * end // layers
        made.append(Part(run, partial(launches, run), end, start, stop - start))
    return made
