"""Records the requests of a running cache as a trace: time and names of blocks, no content.

The file has one line of JSON for each request, as in Mooncake's traces, so readers of those can read it:

    {"timestamp": 1764417802123, "input_length": 2048, "output_length": 0, "hash_ids": [6755399441055744, ...],
     "block_tokens": 16, "namespace": "ab12cd34", "found_tokens": 1024, "agent": "planner", "session": "7"}

`timestamp` is the time of admission in ms since 1970. `input_length` counts full blocks. `agent` and `session` are
present where the request named them. A hash id is the first 53 bits of a block's key, which identifies the whole
prefix.

Files are bounded: a full file becomes `PATH.1` and replaces the one before. The engine's thread only appends to a
bounded queue. Rows that find the queue full are counted and dropped.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

import aiofiles
import numpy as np

from kvcache.block.chain import SIGNATURE_BYTES
from kvcache.cache.cache import Cache
from kvcache.log import log_faults, logger
from kvcache.observe.recent_requests import RecentRequest

MAX_QUEUED_ROWS = 4096
"""Limit of requests not yet written."""
HASH_ID_BITS = 53
_POLL_S = 0.5

_log = logger("kvcache.trace")

Row = tuple[float, bytes, int, int, bytes, str, str]
"""Time, namespace, tokens of a block, blocks found, signatures, agent, session."""


class TraceRecorder:
    """Writes the trace of a cache.

    Thread safety: the thread that admits a request calls `on_request`; a separate thread writes.
    """

    def __init__(self, path: Path, file_bytes: int) -> None:
        self.path, self._file_bytes = path, file_bytes
        self.dropped_rows = 0
        self._rows: deque[Row] = deque()
        self._wake = threading.Event()
        self._closed = False
        path.parent.mkdir(parents=True, exist_ok=True)
        self._thread = threading.Thread(target=self._run, name="kvcache-trace", daemon=True)
        self._thread.start()

    def on_request(self, request: RecentRequest) -> None:
        if self._closed or len(self._rows) >= MAX_QUEUED_ROWS:
            self.dropped_rows += 1
            return
        row = (
            request.time,
            request.namespace,
            request.block_tokens,
            request.hit_blocks,
            request.packed,
            request.agent,
            request.session,
        )
        self._rows.append(row)
        self._wake.set()

    def close(self) -> None:
        """Write the queued rows and end the thread. Idempotent."""
        self._closed = True
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        with log_faults(_log, "stopped recording the trace: %s", self.path):
            asyncio.run(self._write())
        self._closed = True

    async def _write(self) -> None:
        while not (self._closed and not self._rows):
            self._wake.clear()
            if not self._rows:
                await asyncio.to_thread(self._wake.wait, _POLL_S)
                continue
            async with aiofiles.open(self.path, "a", encoding="ascii") as file:
                size = await file.tell()
                while self._rows and size < self._file_bytes:
                    text = format_row(self._rows.popleft())
                    size += len(text)
                    await file.write(text)
            if size >= self._file_bytes:
                await asyncio.to_thread(os.replace, self.path, f"{self.path}.1")


def format_row(row: Row) -> str:
    time, namespace, block_tokens, found, packed, *named = row
    words = np.frombuffer(packed, np.uint8).reshape(-1, SIGNATURE_BYTES)[:, :8].copy().view(">u8")[:, 0]
    document = {
        "timestamp": int(1000 * time),
        "input_length": len(words) * block_tokens,
        "output_length": 0,
        "hash_ids": (words >> np.uint64(64 - HASH_ID_BITS)).tolist(),
        "block_tokens": block_tokens,
        "namespace": namespace[:4].hex(),
        "found_tokens": found * block_tokens,
        **{name: value for name, value in zip(("agent", "session"), named, strict=True) if value},
    }
    return json.dumps(document, separators=(",", ":")) + "\n"


def start_recording(cache: Cache) -> Callable[[], None] | None:
    """Start recording where the settings name a file; the cache calls the returned function when it closes."""
    settings = cache.settings.trace
    if not settings.path:
        return None
    recorder = TraceRecorder(Path(settings.path).expanduser(), settings.file_bytes)
    cache.miss_explainer.subscribe(recorder.on_request)
    cache.on_close.append(recorder.close)
    return recorder.close
