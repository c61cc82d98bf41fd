"""SGLang's server with our storage backend: the same greedy tokens as without, and nothing computed twice."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.peer.sglang.serving import PAGE, Server, hicache, linker


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    from tests.engine import tiny

    return tiny.make(tmp_path_factory.mktemp("model"), "llama", max_position_embeddings=2048)


PROMPTS = [[random.randrange(3, 250) for _ in range(40 * PAGE + 7)] for random in map(Random, range(3))]

pytestmark = pytest.mark.timeout(1800)  # a server takes a minute or two to start


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
