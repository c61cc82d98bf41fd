"""Real SGLang on a processor: scripts/test-peers sglang. Skipped where it is not installed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.peer)
            item.add_marker(pytest.mark.filterwarnings("default"))
            item.add_marker(pytest.mark.timeout(1800))  # its first import alone takes minutes on a busy machine
            if find_spec("sglang") is None:
                item.add_marker(pytest.mark.skip(reason="SGLang is not installed: scripts/test-peers sglang"))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    from tests.engine import tiny_model

    return tiny_model.make(tmp_path_factory.mktemp("model"), "llama", max_position_embeddings=2048)


@pytest.fixture(scope="session")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Layers of sliding and of full attention in turn, which SGLang keeps in two pools."""
    from tests.engine import tiny_model

    rope = {"rope_type": "default", "rope_theta": 10000.0}
    return tiny_model.make(
        tmp_path_factory.mktemp("windowed"),
        "mellum",
        max_position_embeddings=2048,
        num_hidden_layers=4,
        head_dim=32,
        sliding_window=100,
        layer_types=["sliding_attention", "full_attention"] * 2,
        mlp_layer_types=["dense"] * 4,
        num_experts=1,
        rope_parameters={"sliding_attention": rope, "full_attention": rope},
    )


@pytest.fixture(scope="session")
def answers(model: str, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """Of a server without any cache of ours."""
    from tests.peer.sglang.sglang_server import PROMPTS, SGLangServer

    with SGLangServer(model, tmp_path_factory.mktemp("plain")) as server:
        return [server.generate(prompt)[0] for prompt in PROMPTS]


@pytest.fixture(scope="session")
def sglang_in_process(tmp_path_factory: pytest.TempPathFactory) -> None:
    """SGLang in this process, with host pools that copy by torch."""
    from tests.peer.sglang.in_process import init_in_process

    init_in_process(0, 1, tmp_path_factory.mktemp("group") / "store")
