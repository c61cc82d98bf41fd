"""`vllm serve` with the documented command and nothing else: prefixes are found again, and outlive the server."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvcache.daemon.discovery import make_socket_directory
from kvcache.observe.exporter import PREFIX
from kvcache.observe.metrics import METRICS
from tests.peer.ports import free_port
from tests.peer.vllm.conftest import HERE, PYTHON, ROOT, WATCHDOG_S
from tests.peer.vllm.prompts import ids

TRANSFER = '{"kv_connector":"KVCacheConnector","kv_connector_module_path":"kvcache.connector.vllm","kv_role":"kv_both"}'
PROMPT = ids(1400, 1)
TRACED = ("--no-enforce-eager", "--compilation-config", '{"mode":2,"backend":"eager"}')
"""Takes the way of a compiled model, and no compiler."""


def at(place: Path) -> dict[str, str]:
    """The settings of a cache at a place: where it stores, and where it can be asked."""
    return {"KVCACHE_DIR": str(place / "cache"), "XDG_RUNTIME_DIR": str(place)}


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
        **at(place),
        "KVCACHE_HOST__CAPACITY_BYTES": "128MiB",
        "KVCACHE_NVME__CAPACITY_BYTES": "512MiB",
        "KVCACHE_NVME__MIN_FREE_BYTES": "0",
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


def by_client(url: str, *prompts: list[int]) -> list[tuple[str, int]]:
    """The same, as OpenAI's own client has it: text, and tokens that were cached."""
    assert PYTHON is not None
    asked = subprocess.run(
        [PYTHON, HERE / "openai_client.py", url], input=json.dumps(prompts), capture_output=True, text=True, check=True,
        timeout=WATCHDOG_S,
    )  # fmt: skip
    return [(text, cached) for text, cached in map(json.loads, asked.stdout.splitlines())]


def metrics(url: str) -> dict[str, float]:
    """By name, over all labels; `name/value` of a label of ours as well."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        return parsed(answer.read().decode())


def parsed(page: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for line in (line.removeprefix("# TYPE ") for line in page.splitlines()):
        if line.startswith("kvcache_") and "_created" not in line:
            name, _, labels = line.partition("{")
            if not labels:  # a family, perhaps without rows
                found.setdefault(name.split()[0], 0.0)
                continue
            for key in (name, *(f"{name}/{value}" for value in re.findall(r'="([^"]*)"', labels))):
                found[key] = found.get(key, 0.0) + float(line.split()[-1])
    return found


def until(url: str, name: str, least: float) -> dict[str, float]:
    """They are sampled once a second, and told with a step."""
    for _ in range(50):
        complete(url, PROMPT[:10])
        told = metrics(url)
        if told.get(name, 0.0) >= least:
            break
    return told


def command(place: Path, *words: str) -> Any:
    """`kvcache WORDS --json`, at the running cache of a server; others may run on this machine."""

    env = {**os.environ, "PYTHONPATH": str(ROOT), **at(place)}

    def said(*words: str) -> Any:
        whole = (sys.executable, "-m", "kvcache.cli.main", *words, "--json")
        ended = subprocess.run(whole, capture_output=True, text=True, env=env, timeout=WATCHDOG_S, check=False)
        assert ended.returncode == 0, (words, ended.stderr)
        return json.loads(ended.stdout)

    (mine,) = [row["address"] for row in said("ps") if str(row.get("nvme_path")).startswith(str(place))]
    return said(*words, "--address", mine)


def daemons(place: Path) -> set[Path]:
    """The sockets of engines' own daemons: each is there for a while after its engine."""
    return set(make_socket_directory(at(place)).glob("engine-*.socket"))


def damage(place: Path) -> int:
    """Some bytes of every other page of what lies on the drive; how many places."""
    places = 0
    for segment in sorted(place.rglob("*segment*")):
        if segment.is_file():
            with segment.open("r+b") as file:
                for at in range(1 << 12, segment.stat().st_size, 1 << 13):
                    file.seek(at)
                    file.write(b"\xff" * 64)
                    places += 1
    return places


def test_the_documented_command_serves_hits(models: Path, tmp_path: Path) -> None:
    with served(models / "tiny-llama", tmp_path, "--no-enable-prefix-caching") as url:
        first, cached = complete(url, PROMPT)
        assert cached == 0
        assert again(url, PROMPT) == (first, 1280)  # blocks of 128 tokens, as vLLM chooses on a processor
        assert complete(url, PROMPT, kv_transfer_params={"kvcache.skip_load": True}) == (first, 0)
        told = until(url, "kvcache_loaded_blocks_total", 1)
        assert told["kvcache_loaded_blocks_total/host"] == 10
        assert told["kvcache_hit_tokens_total/host"] == 1280
        assert told["kvcache_stored_blocks_total"] == 10
        assert {name.removesuffix("_total") for name in told if "/" not in name} == {PREFIX + m for m in METRICS}
        assert command(tmp_path, "bypass", "loads")[0]["mode"] == "loads"
        assert complete(url, PROMPT) == (first, 0)
        assert until(url, "kvcache_bypass/loads", 1)["kvcache_bypass/loads"] == 1
        command(tmp_path, "bypass", "off")
        named = {"kvcache.agent": "planner", "kvcache.session": "one"}
        assert complete(url, PROMPT, kv_transfer_params=named) == (first, 1280)
        loaded = [event for event in command(tmp_path, "events") if event["kind"] == "loaded"][-1]
        assert (loaded["agent"], loaded["session"]) == ("planner", "one")
        assert complete(url, PROMPT + ids(200, 2), kv_transfer_params=named)[1] == 1280
        story = command(tmp_path, "explain")[0]
        assert (story["agent"], story["session"], story["found_blocks"]) == ("planner", "one", 10), story["reason"]
        (planner,) = command(tmp_path, "top")["agents"]
        assert (planner["agent"], planner["hit_tokens"]) == ("planner", {"host": 2 * 1280})
        assert [cached for _, cached in by_client(url, PROMPT)] == [1280]


def test_a_restart_over_a_damaged_drive_answers_the_same(models: Path, tmp_path: Path) -> None:
    """The documented command: what was there before is found; what does not come as it was stored is computed."""
    llama, alone = models / "tiny-llama", "--no-enable-prefix-caching"
    others = [PROMPT[:n] + ids(200, n) for n in (300, 700, 1100)]
    before, end = daemons(tmp_path), time.monotonic() + WATCHDOG_S
    with served(llama, tmp_path, alone) as url:
        first = [complete(url, prompt)[0] for prompt in (PROMPT, *others)]
        assert again(url, PROMPT) == (first[0], 1280)
    while daemons(tmp_path) - before:  # with what it has in host memory
        assert time.monotonic() < end
        time.sleep(0.2)
    with served(llama, tmp_path, alone) as url:
        assert [cached for _, cached in by_client(url, PROMPT)] == [1280]
        assert damage(tmp_path / "cache") > 10
        assert [complete(url, prompt)[0] for prompt in (PROMPT, *others)] == first
        assert until(url, "kvcache_load_failures_total", 1)["kvcache_load_failures_total"] > 0
        assert [complete(url, prompt)[0] for prompt in (PROMPT, *others)] == first


def test_two_tensor_ranks_hit(models: Path, tmp_path: Path) -> None:
    """Each rank has its heads of a block; a prefix counts where both have theirs."""
    flags = ("--no-enable-prefix-caching", "--tensor-parallel-size", "2", "--block-size", "32")
    with served(models / "tiny-llama", tmp_path, *flags) as url:
        first, cached = complete(url, PROMPT)
        assert cached == 0
        assert again(url, PROMPT) == (first, 1376)
    with served(models / "tiny-llama", tmp_path, *flags) as url:
        assert complete(url, PROMPT) == (first, 1376)


def test_two_pipeline_stages_hit(models: Path, tmp_path: Path) -> None:
    """Each stage has its layers of a block; a prefix counts where both have theirs. Not eager: vLLM 0.32 makes the room
    for what a stage receives as it warms up, which it leaves out on a processor where nothing is compiled."""
    flags = ("--no-enable-prefix-caching", "--pipeline-parallel-size", "2", "--block-size", "32", *TRACED)
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
