"""A client of a daemon with a GPU: it pins what it maps, and moves records between its pages and that memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest

from tests.gpu.gpu_pages import cupy

daemon_process = pytest.importorskip(
    "tests.daemon.daemon_process", exc_type=ImportError
)  # where only the copies' own needs are there
fake_engine = pytest.importorskip("tests.contract.fake_engine", exc_type=ImportError)

pytestmark = pytest.mark.gpu

TOKENS = list(range(4 * 32))
BLOCKS = list(range(32))


def test_a_gpu_client_stores_and_loads_through_a_daemon() -> None:
    e = fake_engine.Engine(daemon_process.LAYOUT)
    e.fill(7, BLOCKS)
    there = [cupy.asarray(layer) for layer in e.memory[0]]
    bases = [[on.data.ptr + kv * on.strides[0] for kv in range(2)] for on in there]
    pages = [replace(e.described[0], bases=np.array(bases, np.uint64), device="cuda:0", owner=there)]
    with TemporaryDirectory(prefix="kv-") as place:
        daemon = daemon_process.DaemonProcess(Path(place)).start()
        try:
            with daemon.open() as cache:
                handle = daemon_process.bound_to(cache)
                for _ in range(2):  # at first what is mapped may not be pinned yet, then it is
                    with handle.request() as r:
                        r.match(TOKENS)
                        assert r.store(pages, [BLOCKS]).wait(60)
                    for layer in there:
                        layer.fill(np.nan)
                    with handle.request() as r:
                        hit = r.match(TOKENS)
                        r.admit()
                        assert r.load(hit.blocks, pages, [BLOCKS]).wait(60)
                    for layer, on in zip(e.memory[0], there, strict=True):
                        np.testing.assert_array_equal(cupy.asnumpy(on)[:, BLOCKS], layer[:, BLOCKS])
        finally:
            daemon.close()
