"""`kvcache serve` as a process: it answers, ends in order, and finds its blocks again."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from kvcache.block.layout import KVLayout
from kvcache.cli.serve import bind_listener, default_pages, serve
from kvcache.errors import ConfigError, ModelError
from tests.engine import tiny_model

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-c", "from kvcache.cli.main import main; main()", "serve"]


def environment(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "KVCACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}


def served(model: str, settings: Path, tmp_path: Path, body: dict[str, Any]) -> Any:
    """One answer of a server that is started for it and ended with SIGTERM."""
    process = subprocess.Popen(
        [*COMMAND, model, "--port", "0", "--cache", str(settings), "--pages", "40"],
        cwd=ROOT,
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        assert "40 pages" in said, said
        where = said.split(" at ")[1].split(",")[0]
        request = urllib.request.Request(
            f"{where}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)
    finally:
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=60)
        assert (process.returncode, rest) == (0, "")


def test_serve_answers_and_hits_after_a_restart(tmp_path: Path) -> None:
    model = tiny_model.make(tmp_path / "model")
    settings = tmp_path / "kvcache.toml"
    settings.write_text(f"""
        [host]
        capacity_bytes = "16MiB"
        [nvme]
        path = "{tmp_path / "nvme"}"
        capacity_bytes = "32MiB"
    """)
    body = {"model": "model", "prompt": "Tell me about the sea. " * 4, "max_tokens": 5, "temperature": 0}
    first, second = (served(model, settings, tmp_path, body) for _ in range(2))
    assert second["choices"] == first["choices"]
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 80


def test_an_invalid_argument_exits_with_2_and_one_line(tmp_path: Path) -> None:
    ended = subprocess.run(
        [*COMMAND, "any", "--cache", "/no.toml"],
        check=False,
        cwd=ROOT,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 2
    assert "/no.toml" in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_a_missing_model_is_reported() -> None:
    with pytest.raises(ModelError, match="/nowhere"):
        serve("/nowhere", port=0)


def test_an_occupied_port_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port {port}.*--port 0"):
            bind_listener("127.0.0.1", port)


def test_default_pages_fit_two_contexts_or_a_quarter() -> None:
    small = KVLayout.mha(layers=2, kv_heads=1, head_dim=8)
    assert default_pages(KVLayout(small.groups, max_tokens=100)) == 13
    huge = KVLayout.mha(layers=1000, kv_heads=64, head_dim=1024)
    assert 1 <= default_pages(KVLayout(huge.groups, max_tokens=10**9)) < 10**6


def test_warm_prompts_are_read_before_the_model(tmp_path: Path) -> None:
    settings = tmp_path / "kvcache.toml"
    settings.write_text(f'[warm]\nfile = "{tmp_path / "none"}"\n')
    with pytest.raises(ConfigError, match="No such file"):
        serve("/nowhere", port=0, cache=settings)
