"""Record what commit 5e49391 writes: `python record_5e49391.py DIRECTORY`, run once in a checkout of that commit.

`redis-1.msgpack` holds keys and values of a Redis store, `handover-1.tar.xz` the table and slab that a daemon handed
over, `client-1.msgpack.xz` the messages between a client and a daemon. tests/daemon/test_upgrade.py reads them with
today's code. They are kept, because a file that today's code writes does not show what it can read.
"""

from __future__ import annotations

import io
import lzma
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
from tests.contract.caches import Engine
from tests.daemon.house import LAYOUT, House, bound_to, load, store
from tests.daemon.old_store import PROMPTS
from tests.peer.server import empty

import kvcache
from kvcache.daemon.wire import Wire


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


class Recorder:
    """Notes what each `Wire` of this process sends and receives, as [connection, call, content]."""

    CALLS = ("send", "receive", "send_bytes", "receive_bytes")

    def __init__(self) -> None:
        self.steps: list[tuple[int, str, Any]] = []
        self._wires: list[Wire] = []
        self._original = {call: getattr(Wire, call) for call in self.CALLS}
        self._sending = False  # over TCP, `send` calls `send_bytes`

    def __enter__(self) -> Recorder:
        for call in self.CALLS:
            setattr(Wire, call, self._noting(call))
        return self

    def __exit__(self, *error: object) -> None:
        for call, original in self._original.items():
            setattr(Wire, call, original)

    def _noting(self, call: str) -> Any:
        original = self._original[call]

        def noted(wire: Wire, *args: Any, **options: Any) -> Any:
            if self._sending:
                return original(wire, *args, **options)
            if wire not in self._wires:
                self._wires.append(wire)
            self._sending = call == "send"
            try:
                answer = original(wire, *args, **options)
            finally:
                self._sending = False
            content = answer[0] if call == "receive" else args[0]
            if call.endswith("bytes"):
                content = [bytes(part) for part in content]
            self.steps.append((self._wires.index(wire), call, content))
            return answer

        return noted


def client(file: Path) -> None:
    """One engine's session over TCP, where payloads are part of the messages: every op of the protocol but `heir`."""
    with tempfile.TemporaryDirectory(prefix="rec-") as name:
        house = House(Path(name), tcp=True).start()
        with Recorder() as recorder, house.open(threads=1, engine="engine") as cache:
            events = cache.changes(None, [])
            bound = bound_to(cache)
            for seed, tokens in PROMPTS.items():
                store(bound, tokens, seed)
                bound.computed(len(tokens), 0.01)
            assert cache.flush(60)
            for tokens in PROMPTS.values():
                load(bound, tokens)
            with bound.request(id="joined", agent="a", session="s", ttl_s=3600.0) as r:
                r.match([*PROMPTS[1], *range(8)])
                with bound.join("joined") as rank:
                    engine = Engine(LAYOUT)
                    assert len(rank.signatures) == 6
                    assert rank.load(4, engine.described, engine.ids([0, 1, 2, 3])).wait(60)
                r.extend(range(8, 12))
                r.admit()
            cache.changes(events.next, [bound])
            cache.stats()
            assert cache.check() == []
            assert bound.clear() == 12
        house.close()
        file.write_bytes(lzma.compress(msgpack.packb(recorder.steps)))


if __name__ == "__main__":
    to = Path(sys.argv[1])
    to.mkdir(parents=True, exist_ok=True)
    redis(to / "redis-1.msgpack")
    handover(to / "handover-1.tar.xz")
    client(to / "client-1.msgpack.xz")
