"""LMCache's CUDA copies, timed in its own environment: one line of JSON, GB/s by direction.

The shape is that of gpu_copy.py: 32 layers, 8 KV heads of 128, bf16, pages of 16 tokens in vLLM's layout. 256 MiB are
moved in LMCache's chunks of 256 tokens, each to pinned memory of its own, over pages in random order. As its connector
for vLLM does: the kernel takes pages of all layers by their addresses, and writes to mapped pinned memory.
"""

from __future__ import annotations

import json
import os
from statistics import median

os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")

import torch
from lmcache import device_ops, lmcache_native

LAYERS, HEADS, HEAD_DIM, PAGE_TOKENS, CHUNK_TOKENS = 32, 8, 128, 16, 256
PAGES, CHUNKS, RUNS = 512, 8, 10


def rates() -> dict[str, float]:
    device, hidden = torch.device("cuda", 0), HEADS * HEAD_DIM
    layers = [
        torch.randn(2, PAGES, PAGE_TOKENS, HEADS, HEAD_DIM, device=device).to(torch.bfloat16) for _ in range(LAYERS)
    ]
    pointers = torch.tensor([layer.data_ptr() for layer in layers], dtype=torch.int64, device=device)
    chunks = [torch.empty(2, LAYERS, CHUNK_TOKENS, hidden, dtype=torch.bfloat16).pin_memory() for _ in range(CHUNKS)]
    pages = torch.randperm(PAGES, device=device)[: CHUNKS * CHUNK_TOKENS // PAGE_TOKENS]
    slots = (pages[:, None] * PAGE_TOKENS + torch.arange(PAGE_TOKENS, device=device)).flatten()
    moved = CHUNKS * chunks[0].nbytes

    def once(direction: object) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for i, chunk in enumerate(chunks):
            device_ops.multi_layer_kv_transfer(
                chunk,
                pointers,
                slots[i * CHUNK_TOKENS : (i + 1) * CHUNK_TOKENS],
                device,
                PAGES * PAGE_TOKENS,
                direction,
                lmcache_native.EngineKVFormat.NL_X_TWO_NB_BS_NH_HS,
                block_size=PAGE_TOKENS,
                head_size=HEAD_DIM,
            )
        end.record()
        end.synchronize()
        return moved / begin.elapsed_time(end) / 1e6

    ways = {
        "gather": lmcache_native.TransferDirection.D2H,
        "scatter": lmcache_native.TransferDirection.H2D,
    }
    measured = {}
    for name, direction in ways.items():
        once(direction)
        measured[name] = median(once(direction) for _ in range(RUNS))
    first = slots[:CHUNK_TOKENS]
    expected = torch.stack([layer.view(2, -1, hidden)[:, first] for layer in layers], dim=1)
    if not torch.equal(chunks[0].to(device), expected):
        raise SystemExit("LMCache's copy is not what the pages hold: the layout is told wrongly, nothing was measured")
    return measured


if __name__ == "__main__":
    print(json.dumps(rates()))
