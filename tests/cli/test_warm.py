"""`kvcache warm` as an operator runs it: by an engine, by a running cache, and when that makes no sense."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

import kvcache
from kvcache.cli.warm import wait_settled
from kvcache.daemon.client.control import find_caches
from tests.contract.fake_engine import FULL, Engine, bind, store
from tests.fleet.test_engine_client import USED, Spoken, spoken
from tests.peer.redis_server import MISSING, RedisServer, empty
from tests.peer.redis_topology import until

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)

__all__ = ["spoken"]


@pytest.fixture(autouse=True)
def here(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")


@pytest.fixture
def server(tmp_path: Path) -> RedisServer:
    return empty(tmp_path)


@pytest.fixture
def settings(tmp_path: Path, server: RedisServer) -> Path:
    made = tmp_path / "kvcache.toml"
    made.write_text(f'[redis]\nenabled = true\nurl = "{server.tcp}"\n[nvme]\nenabled = false\n')
    return made


@pytest.fixture
def cache(settings: Path) -> Iterator[Any]:
    with closing(kvcache.open(settings, host__capacity_bytes="1MiB", warm__popularity_interval_s=0.02)) as opened:
        yield opened


def test_warm_reads_prompts_from_a_file(kv: Any, cache: Any, settings: Path, spoken: Spoken, tmp_path: Path) -> None:
    spoken.say["/v1/completions"] = (200, USED)
    file = tmp_path / "prompts.jsonl"
    file.write_text('"one"\n[1, 2]\n{"messages": [{"role": "user", "content": "x"}]}\n')
    code, out, err = kv("warm", str(file), "--engine", spoken.url, "--settings", str(settings))
    assert code == 1, "the engine has no chat"
    assert [line.split()[1] for line in out.splitlines()[1:]] == ["computed", "computed", "failed"]
    assert "1/3 computed: 40 tokens, 32 of them cached" in err
    code, out, _ = kv("warm", str(file), "--engine", spoken.url, "--settings", str(settings), "--json")
    assert [row["what"] for row in json.loads(out)] == ["fetched", "fetched", "failed"]
    spoken.say["/v1/chat/completions"] = (200, USED)
    code, out, _ = kv("warm", str(file), "--engine", spoken.url, "--settings", str(settings), "--json")
    assert code == 0
    assert json.loads(out)[2] == {"prompt": 3, "what": "computed", "tokens": 40, "cached": 32, "why": ""}


def test_warm_without_a_cache_reports_no_stores(kv: Any, settings: Path, spoken: Spoken, tmp_path: Path) -> None:
    spoken.say["/v1/completions"] = (200, USED)
    file = tmp_path / "prompts.jsonl"
    file.write_text('"one"\n')
    for _ in range(2):
        code, out, _ = kv("warm", str(file), "--engine", spoken.url, "--settings", str(settings), "--json")
        (row,) = json.loads(out)
        assert (code, row["what"]) == (0, "computed")
        assert "did not reach the fleet" in row["why"]


def test_warm_without_redis_computes_every_prompt(kv: Any, spoken: Spoken, tmp_path: Path) -> None:
    spoken.say["/v1/completions"] = (200, USED)
    file = tmp_path / "prompts.jsonl"
    file.write_text('"one"\n')
    code, out, err = kv("warm", str(file), "--engine", spoken.url, "--max-bytes", "1GiB")
    assert code == 0
    assert "alone" in out
    assert "no Redis" in err


def test_warm_hot_loads_the_fleets_most_used_prefixes(kv: Any, cache: Any, server: RedisServer, settings: Path) -> None:
    handle, engine = bind(cache), Engine(FULL)
    tokens = list(range(32))
    store(handle, engine, tokens, list(range(8)))
    with handle.request() as r:
        r.match(tokens)
        r.admit()
    assert cache.flush(30)
    until(lambda: server.client.keys("*:heat"), "the fleet was told")
    cache.close()
    with closing(kvcache.open(settings, host__capacity_bytes="1MiB")) as another:
        bind(another)
        code, out, _ = kv("warm", "--hot", "3", "--json")
        (row,) = json.loads(out)
        assert code == 0
        assert {name: row[name] for name in ("done", "chains", "whole", "blocks")} == {
            "done": True,
            "chains": 1,
            "whole": 1,
            "blocks": 8,
        }
        assert another.stats()["tiers"]["host"]["records"] == 8
        code, out, _ = kv("warm", "--hot", "3", "--max-bytes", "1")
        assert (code, "chains" in out) == (0, True)


def test_invalid_arguments_are_refused(kv: Any, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('"one"\n')
    for arguments, wanted in (
        ((), "one of them"),
        ((str(file), "--hot", "3"), "one of them"),
        ((str(file),), "--engine"),
        ((str(file), "--engine", "nowhere"), "--engine"),
        ((str(tmp_path / "none"), "--engine", "http://127.0.0.1:1"), "none"),
        ((str(file), "--engine", "http://127.0.0.1:1", "--max-bytes", "much"), "--max-bytes"),
    ):
        code, _, err = kv("warm", *arguments)
        assert (code, wanted in err, err.count("\n")) == (2, True, 1), err
    code, _, err = kv("warm", str(file), "--engine", "http://127.0.0.1:1")
    assert (code, "is an engine serving" in err) == (3, True)
    code, _, err = kv("warm", "--hot", "3")
    assert (code, "no running cache of this user" in err) == (3, True)


def test_warm_reports_no_stores_of_a_silent_cache(
    cache: Any,
) -> None:
    """Whichever of those that run here is the engine's; another one's word is not enough."""
    mine = next(find_caches()).path
    assert wait_settled(None, 0)
    assert wait_settled(mine, 0)
    silent = mine.with_stem("1-1")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(silent))
        listener.listen(8)
        asked = threading.Event()

        def hang_up() -> None:
            while not asked.is_set():
                with suppress(OSError):
                    listener.accept()[0].close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        try:
            assert not wait_settled(None, 0)
            assert not wait_settled(silent, 0)
            assert wait_settled(mine, 0)
        finally:
            asked.set()
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
    cache.close()
    assert not wait_settled(None, 60)
