"""Each cache that there is, one after the other; audited at the end of every test."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kvcache
from kvcache.hierarchy.naive import NaiveCache
from tests.contract.caches import MiB
from tests.peer.server import MISSING, empty


def served(directory: Path) -> tuple[Any, Callable[[], None]]:
    """A client of a daemon in this process, and what ends the daemon."""
    from kvcache.config import load
    from kvcache.daemon.address import Claim
    from kvcache.daemon.server import Daemon, start
    from kvcache.hierarchy.cache import Cache

    own = Cache(load(None, host={"capacity_bytes": 8 * MiB}, nvme={"enabled": False}), shared=True)
    stop = start(Daemon(own, Claim(directory / "daemon", 0o600)))

    def end() -> None:
        stop()
        own.close()

    return kvcache.open(f"unix:{directory / 'daemon'}", patience_s=30.0), end


@pytest.fixture(
    params=[
        "naive",
        "host",
        "host+nvme",
        pytest.param("daemon", marks=pytest.mark.skipif(sys.platform != "linux", reason="files in memory are Linux's")),
        "host+object",
        pytest.param("host+redis", marks=pytest.mark.skipif(bool(MISSING), reason=MISSING)),
    ]
)
def cache(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    end = None
    if request.param == "naive":
        made: Any = NaiveCache()
    elif request.param == "daemon":
        made, end = served(tmp_path)
    else:
        made = kvcache.open(
            host={"capacity_bytes": 8 * MiB},
            nvme={
                "enabled": request.param == "host+nvme",
                "path": tmp_path / "nvme",
                "capacity_bytes": 64 * MiB,
                "free_floor_bytes": 0,
            },
            redis={"enabled": True, "url": empty(tmp_path).unix} if request.param == "host+redis" else {},
            object={"enabled": True, "url": f"file://{tmp_path}/objects"} if request.param == "host+object" else {},
        )
    yield made
    assert made.flush(30)
    assert made.check() == []
    made.close()
    if end is not None:
        end()
