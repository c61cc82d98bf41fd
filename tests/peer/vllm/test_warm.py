"""`kvcache warm` beside two vLLM servers and one empty Redis: each prompt is computed once in all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.peer.redis_server import MISSING, RedisServer
from tests.peer.vllm.conftest import ROOT, WATCHDOG_S
from tests.peer.vllm.prompts import ids
from tests.peer.vllm.test_serve import TRANSFER, served

MESSAGES = [
    {"role": "system", "content": "You keep house. " * 30},
    {"role": "user", "content": "What is near when somebody asks for it?"},
]
PROMPTS: list[Any] = [
    "Rules of the house, which every conversation begins with. " * 12,
    ids(700, 1),
    {"messages": MESSAGES},
]
BLOCK = 32


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
def test_each_prompt_is_prefilled_once_in_the_fleet(models: Path, tmp_path: Path) -> None:
    server = RedisServer("--maxmemory", "512mb")
    settings = {"redis": {"enabled": True, "url": server.tcp, "timeout_s": 60}, "nvme": {"enabled": False}}
    settings["flow"] = {"lookup_timeout_s": 60, "deadline_s": 60}
    settings["plan"] = {"enabled": False}
    extra = {"settings": settings, "lookup_s": 60.0}
    transfer = json.dumps({**json.loads(TRANSFER), "kv_connector_extra_config": extra})
    flags = ("--no-enable-prefix-caching", "--block-size", str(BLOCK), "--kv-transfer-config", transfer)
    (tmp_path / "prompts.jsonl").write_text("".join(f"{json.dumps(prompt)}\n" for prompt in PROMPTS))
    (tmp_path / "kvcache.toml").write_text(f'[redis]\nenabled = true\nurl = "{server.tcp}"\n[warm]\nlease_s = 600\n')
    places = [tmp_path / "one", tmp_path / "other"]
    for place in places:
        place.mkdir(mode=0o700)
    try:
        with ExitStack() as stack:
            urls = [stack.enter_context(served(models / "tiny-llama", place, *flags)) for place in places]
            works = [warm(tmp_path, place, url) for place, url in zip(places, urls, strict=True)]
            rows = [json.loads(work.communicate(timeout=WATCHDOG_S)[0]) for work in works]
    finally:
        server.end()
    assert [work.returncode for work in works] == [0, 0], rows
    for steps in zip(*rows, strict=True):
        (tokens,) = {step["tokens"] for step in steps}
        assert sorted(step["what"] for step in steps) == ["computed", "fetched"], steps
        assert tokens > 4 * BLOCK
        assert sorted(step["cached"] for step in steps) == [0, (tokens - 1) // BLOCK * BLOCK], steps


def warm(files: Path, place: Path, url: str) -> subprocess.Popen[str]:
    """On a host of its own, as far as sockets tell."""
    command = [sys.executable, "-c", "from kvcache.cli.main import main; main()", "warm", str(files / "prompts.jsonl")]
    options = ["--engine", url, "--settings", str(files / "kvcache.toml"), "--json"]
    env = {**os.environ, "KVCACHE_DIR": str(place / "cache"), "XDG_RUNTIME_DIR": str(place), "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([*command, *options], env=env, stdout=subprocess.PIPE, text=True)
