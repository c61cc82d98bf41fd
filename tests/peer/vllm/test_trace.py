"""vLLM's KV events, written down a batch a line by vLLM's own encoder, are read as a trace."""

from __future__ import annotations

import subprocess
from pathlib import Path

from kvcache.trace.formats import read_trace
from tests.peer.vllm.conftest import PYTHON, WATCHDOG_S

WRITE = """
import sys
import msgspec
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

def stored(parent, *hashes, medium="GPU"):
    return BlockStored(block_hashes=list(hashes), parent_block_hash=parent, token_ids=[7] * (16 * len(hashes)),
                       block_size=16, lora_id=None, medium=medium, lora_name=None)

a, b, c = (bytes([i]) * 32 for i in (1, 2, 3))
batches = [
    KVEventBatch(ts=10.0, events=[stored(None, a, b), stored(None, a, medium="CPU")], data_parallel_rank=0),
    KVEventBatch(ts=11.5, events=[BlockRemoved(block_hashes=[b], medium="GPU"), stored(a, c)]),
    KVEventBatch(ts=12.0, events=[AllBlocksCleared()]),
]
for batch in batches:
    sys.stdout.write(msgspec.json.encode(batch).decode() + "\\n")
"""


def test_published_events_are_read_as_a_trace(tmp_path: Path) -> None:
    assert PYTHON is not None
    done = subprocess.run([PYTHON, "-c", WRITE], capture_output=True, text=True, timeout=WATCHDOG_S, check=False)
    assert done.returncode == 0, done.stderr
    path = tmp_path / "events.jsonl"
    path.write_text(done.stdout)
    trace = read_trace(path)
    assert [chain.tolist() for chain in trace] == [[0, 1], [0, 2]]
    assert (trace.block_tokens, trace.times_s.tolist()) == (16, [10.0, 11.5])
