"""A real SGLang server on a processor and on loopback, with a tiny model whose answers depend on all that it reads."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from kvcache.block.record import MAGIC
from tests.peer.ports import free_port

ROOT = Path(__file__).parents[3]
PAGE = 16
READY_S = 600.0
PATIENCE_S = 400.0
"""For an answer: two ranks of a server on a busy machine wait for each other hundreds of times a request."""
KEY = "test-admin"
WATCHED = ("--enable-metrics", "--admin-api-key", KEY)
STORED = "sglang:backuped_tokens_total"
FETCHED = "sglang:prefetched_tokens_total"
PROMPTS = [[random.randrange(3, 250) for _ in range(40 * PAGE + 7)] for random in map(Random, range(3))]


def ours(place: Path, **more: Any) -> dict[str, Any]:
    """Settings of the cache: host memory, and a drive at `place`."""
    nvme = {"path": str(place / "nvme"), "capacity_bytes": 256 << 20, "min_free_bytes": 0}
    return {"host": {"capacity_bytes": 64 << 20}, "nvme": nvme, "control": {"enabled": False}} | more


def extra(**ours: Any) -> str:
    """The extra configuration of our storage backend; `extra` among `ours` goes beside "kvcache"."""
    beside = ours.pop("extra", {})
    backend = {"backend_name": "kvcache", "module_path": "kvcache.connector.sglang", "class_name": "KVCacheStorage"}
    return json.dumps({**backend, "interface_v1": 1, "prefetch_threshold": 32, **beside, "kvcache": ours})


HICACHE = ("--enable-hierarchical-cache", "--hicache-ratio", "2", "--hicache-storage-prefetch-policy", "wait_complete")


def hicache(**ours: Any) -> list[str]:
    """SGLang's flags for our storage backend."""
    given = ("--hicache-storage-backend", "dynamic", "--hicache-storage-backend-extra-config", extra(**ours))
    return [*HICACHE, *given]


def linker(**ours: Any) -> list[str]:
    config = {
        "linker": "KVCacheLinker",
        "linker_module_path": "kvcache.connector.sglang",
        "linker_extra_config": {"kvcache": ours},
    }
    return [
        "--enable-unified-cache-external-linker",
        *("--unified-cache-external-linker-backend", "dynamic"),
        *("--unified-cache-external-linker-config", json.dumps(config)),
    ]


def owner(path: Path) -> int:
    """The process that listens there."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.connect(os.fspath(path))
        return int(struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0])


def damage(place: Path, every: int = 3) -> int:
    """Turn a byte in every so many records of the segments there; how many."""
    turned = 0
    for file in place.rglob("*"):
        if not file.is_file() or file.stat().st_size <= 1 << 20:
            continue
        held, at, number = bytearray(file.read_bytes()), 0, 0
        while (at := held.find(MAGIC, at)) >= 0:
            number += 1
            if not number % every:
                held[at + 4096 + 100] ^= 0x55
            at += 4096
        file.write_bytes(held)
        turned += number // every
    return turned


class SGLangServer:
    def __init__(self, model: str, place: Path, *flags: str, env: Mapping[str, str] | None = None) -> None:
        self.port = free_port()
        place.mkdir(parents=True, exist_ok=True)
        self.log = place / f"server-{self.port}.log"
        environment = {
            **os.environ,
            "PYTHONPATH": f"{Path(__file__).parent / 'cpu'}{os.pathsep}{ROOT}",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "SGLANG_USE_CPU_ENGINE": "1",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            **(env or {}),
        }
        command = [
            *(sys.executable, "-m", "sglang.launch_server", "--model-path", model, "--device", "cpu"),
            *("--host", "127.0.0.1", "--port", str(self.port), "--attention-backend", "torch_native"),
            *("--sampling-backend", "pytorch", "--grammar-backend", "none", "--disable-cuda-graph"),
            *("--disable-overlap-schedule", "--mem-fraction-static", "0.5", "--max-total-tokens", "8192"),
            *("--page-size", str(PAGE), "--context-length", "2048", "--skip-server-warmup", "--enable-cache-report"),
            *flags,
        ]
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
        try:
            self._await()
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> SGLangServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _await(self) -> None:
        end = time.monotonic() + READY_S
        while True:
            try:
                self.ask("GET", "/health")
                return
            except (OSError, urllib.error.URLError):
                assert self.process.poll() is None, f"the server ended: {self.tail()}"
                assert time.monotonic() < end, f"the server is not ready: {self.tail()}"
                time.sleep(0.2)

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]

    def ask(self, method: str, path: str, body: Any = None, timeout_s: float = PATIENCE_S) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"},
        )
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            said = answer.read()
        try:
            return json.loads(said)
        except ValueError:
            return said.decode()

    def generate(self, prompt: Sequence[int], tokens: int = 12) -> tuple[list[int], dict[str, Any]]:
        """Greedily; the tokens and where SGLang says that the prompt's came from."""
        parameters = {"max_new_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
        made = self.ask("POST", "/generate", {"input_ids": list(prompt), "sampling_params": parameters})
        return made["output_ids"], made["meta_info"].get("cached_tokens_details") or {}

    def metric(self, name: str) -> float:
        """The sum over labels of what /metrics says."""
        lines = str(self.ask("GET", "/metrics")).splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))

    def wait(self, until: Callable[[], Any], seconds: float = PATIENCE_S) -> None:
        end = time.monotonic() + seconds
        while not until():
            assert time.monotonic() < end, self.tail()
            time.sleep(0.1)

    def flush_cache(self) -> None:
        """What it holds itself, on device and host."""
        self.retry_while_busy("POST", "/flush_cache")

    def retry_while_busy(self, method: str, path: str, body: Any = None) -> None:
        """Something that SGLang refuses while it is busy, which it is for a little after an answer."""

        def done() -> bool:
            try:
                self.ask(method, path, body)
            except urllib.error.HTTPError as error:
                if error.code != 400:
                    raise
                return False
            return True

        self.wait(done)

    def close(self) -> None:
        """As an operator stops it."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(60)
        self.kill()

    def kill(self) -> None:
        """All of its processes, at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
