"""Record what commit 5e49391 writes: `python record_5e49391.py DIRECTORY`, run once in a checkout of that commit.

`redis-1.msgpack` holds keys and values of a Redis store, `handover-1.tar.xz` the table and slab that a daemon handed
over. tests/daemon/test_upgrade.py reads both with today's code. They are kept, because a file that today's code writes
does not show what it can read.
"""

from __future__ import annotations

import io
import os
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import msgpack
from kvcache.config import load as load_settings
from kvcache.hierarchy.cache import Cache
from kvcache.hierarchy.legacy import leave
from tests.daemon.house import bound_to, store
from tests.daemon.old_store import PROMPTS
from tests.peer.server import empty

import kvcache


def redis(file: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="rec-") as name:
        server = empty(Path(name))
        settings: dict[str, Any] = {"enabled": True, "url": server.unix}
        with kvcache.open(
            host={"capacity_bytes": "1MiB"}, nvme__enabled=False, redis=settings, control={"enabled": False}
        ) as cache:
            for seed, tokens in PROMPTS.items():
                store(bound_to(cache), tokens, seed)
            assert cache.flush(60)
        import redis as client

        connection = client.Redis.from_url(server.unix)
        file.write_bytes(msgpack.packb({key: connection.get(key) for key in sorted(connection.scan_iter())}))


def handover(file: Path) -> None:
    settings = load_settings(None, host={"capacity_bytes": "768KiB", "extent_bytes": "192KiB"}, nvme__enabled=False)
    with Cache(settings, shared=True) as cache:
        for seed, tokens in PROMPTS.items():
            store(bound_to(cache), tokens, seed)
        table, descriptors = leave(cache, 10)
        with tarfile.open(file, "w:xz") as archive:
            slabs = [os.pread(descriptor, os.fstat(descriptor).st_size, 0) for descriptor in descriptors]
            for part, data in [("table", table), *((f"slab-{i}", slab) for i, slab in enumerate(slabs))]:
                info = tarfile.TarInfo(part)
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))


if __name__ == "__main__":
    to = Path(sys.argv[1])
    to.mkdir(parents=True, exist_ok=True)
    redis(to / "redis-1.msgpack")
    handover(to / "handover-1.tar.xz")
