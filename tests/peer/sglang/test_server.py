"""SGLang's server with our storage backend: the same greedy tokens as without, and nothing computed twice."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.peer.sglang.serving import HICACHE, KEY, PAGE, Server, extra, hicache, linker


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    from tests.engine import tiny

    return tiny.make(tmp_path_factory.mktemp("model"), "llama", max_position_embeddings=2048)


PROMPTS = [[random.randrange(3, 250) for _ in range(40 * PAGE + 7)] for random in map(Random, range(3))]


@pytest.fixture(scope="session")
def answers(model: str, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """Without any cache of ours."""
    with Server(model, tmp_path_factory.mktemp("plain")) as server:
        return [server.generate(prompt)[0] for prompt in PROMPTS]


def ours(place: Path, **more: Any) -> dict[str, Any]:
    nvme = {"path": str(place / "nvme"), "capacity_bytes": 256 << 20, "free_floor_bytes": 0}
    return {"host": {"capacity_bytes": 64 << 20}, "nvme": nvme, "control": {"enabled": False}} | more


def test_the_first_request_after_a_restart_hits_storage(model: str, answers: list[list[int]], tmp_path: Path) -> None:
    with Server(model, tmp_path, *hicache(**ours(tmp_path))) as first:
        assert [first.generate(prompt)[0] for prompt in PROMPTS] == answers
    with Server(model, tmp_path, *hicache(**ours(tmp_path))) as second:
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            tokens, cached = second.generate(prompt)
            assert tokens == answer
            assert cached["storage"] == 40 * PAGE, (cached, second.tail())


def test_two_ranks_share_a_daemon_of_their_own(model: str, tmp_path: Path) -> None:
    """Each has its heads of every page; the tokens are those of two ranks, computed and then loaded."""
    flags = ("--tp-size", "2")
    env = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1", "XDG_RUNTIME_DIR": str(tmp_path)}
    with Server(model, tmp_path, *flags, *hicache(**ours(tmp_path)), env=env) as first:
        computed = [first.generate(prompt) for prompt in PROMPTS]
        assert all(not cached.get("storage") for _, cached in computed)
    with Server(model, tmp_path, *flags, *hicache(**ours(tmp_path)), env=env) as second:
        for prompt, (answer, _) in zip(PROMPTS, computed, strict=True):
            tokens, cached = second.generate(prompt)
            assert tokens == answer
            assert cached["storage"] == 40 * PAGE, (cached, second.tail())


def test_the_linker_across_a_restart(model: str, answers: list[list[int]], tmp_path: Path) -> None:
    with Server(model, tmp_path, *linker(**ours(tmp_path))) as first:
        assert [first.generate(prompt)[0] for prompt in PROMPTS] == answers
    with Server(model, tmp_path, *linker(**ours(tmp_path, lookup_wait_s=5))) as second:
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            tokens, cached = second.generate(prompt)
            assert tokens == answer
            assert cached["host"] == 40 * PAGE, (cached, second.tail())


STORED = "sglang:backuped_tokens_total"
FETCHED = "sglang:prefetched_tokens_total"
WATCHED = ("--enable-metrics", "--admin-api-key", KEY)


def test_an_operator_attaches_clears_and_detaches(model: str, answers: list[list[int]], tmp_path: Path) -> None:
    with Server(model, tmp_path, *HICACHE, *WATCHED) as server:

        def attach(revision: str) -> None:
            given = {"hicache_storage_backend": "dynamic", "hicache_storage_prefetch_policy": "wait_complete"}
            config = extra(**ours(tmp_path, revision=revision))
            server.ask("PUT", "/hicache/storage-backend", given | {"hicache_storage_backend_extra_config_json": config})

        def all_of(storage: int) -> None:
            server.forget()
            for prompt, answer in zip(PROMPTS, answers, strict=True):
                tokens, cached = server.generate(prompt)
                assert tokens == answer
                assert cached.get("storage", 0) == storage, (cached, server.tail())

        attach("1")
        all_of(0)
        server.wait(lambda: server.metric(STORED) >= 3 * 40 * PAGE)
        all_of(40 * PAGE)
        assert server.metric(FETCHED) == 3 * 40 * PAGE
        server.ask("POST", "/hicache/storage-backend/clear")
        all_of(0)
        server.wait(lambda: server.metric(STORED) >= 2 * 3 * 40 * PAGE)
        all_of(40 * PAGE)
        server.ask("DELETE", "/hicache/storage-backend")
        all_of(0)
        attach("2")  # other weights, an operator says
        all_of(0)


def test_killed_and_then_with_faults(model: str, answers: list[list[int]], tmp_path: Path) -> None:
    """What was stored before a kill is there; half of all calls failing late changes no token."""
    first = Server(model, tmp_path, *hicache(**ours(tmp_path)), *WATCHED)
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
    with Server(model, tmp_path, *hicache(**ours(tmp_path)), *WATCHED, env=faults) as second:
        for _ in range(4):
            for prompt, answer in zip(PROMPTS, answers, strict=True):
                assert second.generate(prompt)[0] == answer
            second.forget()
        assert second.metric(FETCHED) > 0, "what was on the drive before the kill"
