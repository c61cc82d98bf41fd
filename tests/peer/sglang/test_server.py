"""SGLang's server with our storage backend: the same greedy tokens as without, and nothing computed twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.peer.sglang.sglang_server import (
    FETCHED,
    HICACHE,
    PAGE,
    PROMPTS,
    STORED,
    WATCHED,
    SGLangServer,
    extra,
    hicache,
    linker,
    ours,
)


def test_the_first_request_after_a_restart_hits_storage(model: str, answers: list[list[int]], tmp_path: Path) -> None:
    with SGLangServer(model, tmp_path, *hicache(**ours(tmp_path))) as first:
        assert [first.generate(prompt)[0] for prompt in PROMPTS] == answers
    with SGLangServer(model, tmp_path, *hicache(**ours(tmp_path))) as second:
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            tokens, cached = second.generate(prompt)
            assert tokens == answer
            assert cached["storage"] == 40 * PAGE, (cached, second.tail())


@pytest.mark.parametrize(("flags", "where"), [(hicache, "storage"), (linker, "host")], ids=["storage", "linker"])
def test_sliding_window_models_hit_after_a_restart(flags: Any, where: str, windowed: str, tmp_path: Path) -> None:
    """Two pools: a prefix ends where the window before its end was kept as well."""
    with SGLangServer(windowed, tmp_path, *flags(**ours(tmp_path))) as first:
        computed = [first.generate(prompt) for prompt in PROMPTS]
        assert not any(cached.get(where) for _, cached in computed)
    with SGLangServer(windowed, tmp_path, *flags(**ours(tmp_path, lookup_wait_s=4))) as second:
        for prompt, (answer, _) in zip(PROMPTS, computed, strict=True):
            tokens, cached = second.generate(prompt)
            assert tokens == answer
            assert cached[where] == 40 * PAGE, (cached, second.tail())


def test_two_ranks_share_an_autostarted_daemon(model: str, tmp_path: Path) -> None:
    """Each has its heads of every page; the tokens are those of two ranks, computed and then loaded."""
    flags = ("--tp-size", "2")
    env = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1", "XDG_RUNTIME_DIR": str(tmp_path)}
    with SGLangServer(model, tmp_path, *flags, *hicache(**ours(tmp_path)), env=env) as first:
        computed = [first.generate(prompt) for prompt in PROMPTS]
        assert all(not cached.get("storage") for _, cached in computed)
    with SGLangServer(model, tmp_path, *flags, *hicache(**ours(tmp_path)), env=env) as second:
        for prompt, (answer, _) in zip(PROMPTS, computed, strict=True):
            tokens, cached = second.generate(prompt)
            assert tokens == answer
            assert cached["storage"] == 40 * PAGE, (cached, second.tail())


def test_the_linker_hits_after_a_restart(model: str, answers: list[list[int]], tmp_path: Path) -> None:
    with SGLangServer(model, tmp_path, *linker(**ours(tmp_path))) as first:
        assert [first.generate(prompt)[0] for prompt in PROMPTS] == answers
    with SGLangServer(model, tmp_path, *linker(**ours(tmp_path, lookup_wait_s=4))) as second:
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            tokens, cached = second.generate(prompt)
            assert tokens == answer
            assert cached["host"] == 40 * PAGE, (cached, second.tail())


def test_an_operator_attaches_clears_and_detaches(model: str, answers: list[list[int]], tmp_path: Path) -> None:
    with SGLangServer(model, tmp_path, *HICACHE, *WATCHED) as server:

        def attach(revision: str) -> None:
            given = {"hicache_storage_backend": "dynamic", "hicache_storage_prefetch_policy": "wait_complete"}
            config = extra(**ours(tmp_path, revision=revision))
            server.retry_while_busy(
                "PUT", "/hicache/storage-backend", given | {"hicache_storage_backend_extra_config_json": config}
            )

        def all_of(storage: int) -> None:
            server.flush_cache()
            for prompt, answer in zip(PROMPTS, answers, strict=True):
                tokens, cached = server.generate(prompt)
                assert tokens == answer
                assert cached.get("storage", 0) == storage, (cached, server.tail())

        attach("1")
        all_of(0)
        server.wait(lambda: server.metric(STORED) >= 3 * 40 * PAGE)
        all_of(40 * PAGE)
        assert server.metric(FETCHED) == 3 * 40 * PAGE
        server.retry_while_busy("POST", "/hicache/storage-backend/clear")
        all_of(0)
        server.wait(lambda: server.metric(STORED) >= 2 * 3 * 40 * PAGE)
        all_of(40 * PAGE)
        server.retry_while_busy("DELETE", "/hicache/storage-backend")
        all_of(0)
        attach("2")  # other weights, an operator says
        all_of(0)


def test_a_killed_server_restarts_with_faults(model: str, answers: list[list[int]], tmp_path: Path) -> None:
    """What was stored before a kill is there; half of all calls failing late changes no token."""
    first = SGLangServer(model, tmp_path, *hicache(**ours(tmp_path)), *WATCHED)
    try:
        assert [first.generate(prompt)[0] for prompt in PROMPTS] == answers
        first.wait(lambda: first.metric(STORED) >= 3 * 40 * PAGE)
        first.wait(lambda: sum(file.stat().st_size for file in (tmp_path / "nvme").rglob("journal*")) > 120 * 32)
    finally:
        first.kill()
    faults = {
        "SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": "0.5",
        "SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY": "0.05",
    }
    with SGLangServer(model, tmp_path, *hicache(**ours(tmp_path)), *WATCHED, env=faults) as second:
        for _ in range(4):
            for prompt, answer in zip(PROMPTS, answers, strict=True):
                assert second.generate(prompt)[0] == answer
            second.flush_cache()
        assert second.metric(FETCHED) > 0, "what was on the drive before the kill"
