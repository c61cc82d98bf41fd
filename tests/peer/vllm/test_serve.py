"""`vllm serve` with the documented command and nothing else: prefixes are found again, and outlive the server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.peer.port import free_port
from tests.peer.vllm.conftest import PYTHON, ROOT, WATCHDOG_S
from tests.peer.vllm.prompts import ids

TRANSFER = '{"kv_connector":"KVCacheConnector","kv_connector_module_path":"kvcache.connector.vllm","kv_role":"kv_both"}'
PROMPT = ids(1400, 1)


@contextmanager
def served(model: Path, place: Path, *more: str) -> Iterator[str]:
    """The address of a server whose cache is at a place."""
    assert PYTHON is not None
    port = free_port()
    log = place / f"serve-{port}.log"
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "KVCACHE_DIR": str(place / "cache"),
        "KVCACHE_HOST__CAPACITY_BYTES": "128MiB",
        "KVCACHE_NVME__CAPACITY_BYTES": "512MiB",
        "KVCACHE_NVME__FREE_FLOOR_BYTES": "0",
        "KVCACHE_PLAN__ENABLED": "false",
    }
    words = ["serve", str(model), "--kv-transfer-config", TRANSFER, "--host", "127.0.0.1", "--port", str(port)]
    fitting = ["--enforce-eager", "--dtype", "float32", "--max-model-len", "2048", "--enable-prompt-tokens-details"]
    with log.open("wb") as stream:
        server = subprocess.Popen(
            [PYTHON, "-m", "vllm.entrypoints.cli.main", *words, *fitting, *more],
            env=env, stdout=stream, stderr=stream, start_new_session=True,
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + WATCHDOG_S
        while True:
            try:
                with urllib.request.urlopen(f"{url}/health", timeout=5):
                    break
            except (urllib.error.URLError, OSError):
                assert server.poll() is None, log.read_text(errors="replace")[-4000:]
                assert time.monotonic() < end, log.read_text(errors="replace")[-4000:]
                time.sleep(0.5)
        yield url
    finally:
        server.send_signal(signal.SIGINT)
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def complete(url: str, prompt: list[int], rank: int | None = None, **more: Any) -> tuple[str, int]:
    """The answer's text, and how many tokens of the prompt were cached. `rank`: by which replica."""
    with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as answer:
        model = json.load(answer)["data"][0]["id"]
    body = {"model": model, "prompt": prompt, "max_tokens": 8, "temperature": 0, "return_token_ids": True, **more}
    request = urllib.request.Request(
        f"{url}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json", **({} if rank is None else {"X-data-parallel-rank": str(rank)})},
    )
    with urllib.request.urlopen(request, timeout=WATCHDOG_S) as answer:
        found = json.load(answer)
    details = found["usage"]["prompt_tokens_details"] or {}
    return str(found["choices"][0].get("token_ids") or found["choices"][0]["text"]), details.get("cached_tokens") or 0


def again(url: str, prompt: list[int], rank: int | None = None) -> tuple[str, int]:
    """Ask until the blocks of an earlier request are there: they are stored beside the engine's work."""
    for _ in range(50):
        answer, cached = complete(url, prompt, rank)
        if cached:
            break
    return answer, cached


def test_the_documented_command_and_a_restart(models: Path, tmp_path: Path) -> None:
    with served(models / "tiny-llama", tmp_path, "--no-enable-prefix-caching") as url:
        first, cached = complete(url, PROMPT)
        assert cached == 0
        assert again(url, PROMPT) == (first, 1280)  # blocks of 128 tokens, as vLLM chooses on a processor
        assert complete(url, PROMPT, kv_transfer_params={"kvcache.skip_load": True}) == (first, 0)
        for _ in range(50):  # sampled once a second, and told with a step
            complete(url, PROMPT[:10])
            with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
                metrics = answer.read().decode().splitlines()
            loaded = [float(m.split()[-1]) for m in metrics if m.startswith("kvcache_loaded_blocks_total{")]
            if sum(loaded):
                break
        assert sum(loaded) == 10
    with served(models / "tiny-llama", tmp_path, "--no-enable-prefix-caching") as url:
        assert complete(url, PROMPT) == (first, 1280)


def test_two_ranks(models: Path, tmp_path: Path) -> None:
    """Each rank has its heads of a block; a prefix counts where both have theirs."""
    flags = ("--no-enable-prefix-caching", "--tensor-parallel-size", "2", "--block-size", "32")
    with served(models / "tiny-llama", tmp_path, *flags) as url:
        first, cached = complete(url, PROMPT)
        assert cached == 0
        assert again(url, PROMPT) == (first, 1376)
    with served(models / "tiny-llama", tmp_path, *flags) as url:
        assert complete(url, PROMPT) == (first, 1376)


def test_two_replicas_share_one_cache(models: Path, tmp_path: Path) -> None:
    """One daemon of the engine's own for both: what one computed the other finds."""
    flags = ("--no-enable-prefix-caching", "--data-parallel-size", "2", "--block-size", "32")
    with served(models / "tiny-llama", tmp_path, *flags) as url:
        first, cached = complete(url, PROMPT, rank=0)
        assert cached == 0
        assert again(url, PROMPT, rank=1) == (first, 1376)
        assert again(url, PROMPT, rank=0) == (first, 1376)
