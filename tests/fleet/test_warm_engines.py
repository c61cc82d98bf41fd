"""Three real engines and one empty Redis: `kvcache warm` beside each, and each prompt is computed once in all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcache.daemon.client.control import send_command
from tests.engine import tiny_model
from tests.peer.redis_server import MISSING, RedisServer
from tests.peer.redis_topology import until

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-c", "from kvcache.cli.main import main; main()"]
TEXT = "Rules of the house, which every conversation begins with. " * 4  # one token a byte
IDS = list(range(5, 5 + 10 * 16))
MESSAGES = [
    {"role": "system", "content": "You keep house. " * 8},
    {"role": "user", "content": "What is near when somebody asks for it?"},
]
BOOT = "What is near when a node begins. " * 6


class Node:
    """`kvcache serve` of the tiny model, with a directory of sockets of its own, as a host would have."""

    def __init__(self, model: str, server: RedisServer, place: Path, warm: Path) -> None:
        place.mkdir(mode=0o700)
        self.settings = place / "kvcache.toml"
        self.settings.write_text(f"""
            [host]
            capacity_bytes = "16MiB"
            [nvme]
            enabled = false
            [redis]
            enabled = true
            url = "{server.tcp}"
            timeout_s = 60
            [flow]
            lookup_timeout_s = 60
            deadline_s = 60
            [plan]
            enabled = false
            [log]
            format = "text"
            level = "info"
            [warm]
            file = "{warm}"
            before_ready = true
            lease_s = 120
        """)
        self.environment = {**os.environ, "KVCACHE_DIR": str(place), "XDG_RUNTIME_DIR": str(place)}
        self.environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            [*COMMAND, "serve", model, "--port", "0", "--cache", str(self.settings), "--pages", "60"],
            cwd=ROOT,
            env=self.environment,
            stdout=subprocess.PIPE,
            text=True,
        )

    @property
    def url(self) -> str:
        if not hasattr(self, "_url"):
            assert self.process.stdout is not None
            self._url = self.process.stdout.readline().split(" at ")[1].split(",")[0]
        return self._url

    def warm(self, *arguments: str) -> subprocess.Popen[str]:
        command = [*COMMAND, "warm", *arguments, "--settings", str(self.settings), "--json"]
        return subprocess.Popen(command, cwd=ROOT, env=self.environment, stdout=subprocess.PIPE, text=True)

    def end(self) -> None:
        try:
            self.process.communicate(timeout=60)
        finally:
            self.process.kill()


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    server = RedisServer("--maxmemory", "256mb")
    yield server
    server.end()


@pytest.fixture(scope="module")
def nodes(server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Node]]:
    """Three that boot at once, each to be ready when the same prefix is near."""
    place = tmp_path_factory.mktemp("fleet")
    model = tiny_model.make(place / "model")
    (place / "warm.jsonl").write_text(f"{json.dumps(BOOT)}\n")
    started: list[Node] = []
    try:
        for i in range(3):
            started.append(Node(model, server, place / f"n{i}", place / "warm.jsonl"))  # noqa: PERF401  to be ended
        yield started
    finally:
        for node in started:
            node.process.send_signal(signal.SIGTERM)
        for node in started:
            node.end()


def stored(node: Node) -> int:
    """Blocks that its engine stored, as its cache tells over the control socket."""
    (path,) = (node.settings.parent / "kvcache").glob("*.sock")
    return int(send_command(path, "stats", timeout_s=60)["counters"].get("stored_blocks", 0))


def answers(node: Node, path: str) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(node.url + path, timeout=60) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


@pytest.fixture(scope="module")
def booted(nodes: list[Node], server: RedisServer) -> tuple[int, list[int]]:
    """How many blocks the server has, and how many each node stored, when all are ready and no request has come yet."""
    for node in nodes:
        until(lambda node=node: answers(node, "/readyz") == (200, {"ready": True}), "it is ready", 120)
    return len(server.client.keys("kvcache:k1*:0:*")), [stored(node) for node in nodes]


def test_booting_nodes_are_ready_after_prefetching(booted: tuple[int, list[int]]) -> None:
    there, computed = booted
    assert there == len(BOOT) // 16, "one copy of the prompt"
    assert [blocks for blocks in computed if blocks] == [len(BOOT) // 16], "one node computed it"


@pytest.mark.usefixtures("booted")
def test_each_prompt_is_prefilled_once_in_the_fleet(nodes: list[Node], tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    prompts = [TEXT, IDS, {"messages": MESSAGES}]
    file.write_text("".join(f"{json.dumps(prompt)}\n" for prompt in prompts))
    works = [node.warm(str(file), "--engine", node.url) for node in nodes]
    rows = [json.loads(work.communicate(timeout=120)[0]) for work in works]
    assert [work.returncode for work in works] == [0, 0, 0]
    for steps in zip(*rows, strict=True):
        assert sorted(step["what"] for step in steps) == ["computed", "fetched", "fetched"], steps
        (tokens,) = {step["tokens"] for step in steps}
        whole = (tokens - 1) // 16 * 16  # at least the last token is computed anew
        assert whole >= 128
        assert sorted(step["cached"] for step in steps) == [0, whole, whole], steps
    assert [step["tokens"] for step in rows[0][:2]] == [len(TEXT), len(IDS)]
