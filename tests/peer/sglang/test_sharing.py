"""SGLang and the reference engine over one store: each finds what the other has computed, and answers by it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import kvcache
from tests.engine import tiny_model
from tests.peer.redis_server import BINARY, MISSING, RedisServer
from tests.peer.sglang import sglang_server
from tests.peer.sglang.cache_stack import HiCacheStack
from tests.peer.sglang.device_pools import PAGE
from tests.peer.sglang.sglang_server import hicache

pytestmark = [pytest.mark.usefixtures("sglang_in_process"), pytest.mark.skipif(not BINARY, reason=MISSING)]
PROMPT = [3 + (7 * i + i * i) % 240 for i in range(20 * PAGE + 5)]


def settings(url: str) -> dict[str, Any]:
    shared = {"redis": {"enabled": True, "url": url}, "nvme": {"enabled": False}, "control": {"enabled": False}}
    return shared | {"host": {"capacity_bytes": 64 << 20}}


def engine(path: str, cache: kvcache.KVCache | None) -> Any:
    from kvcache.engine.engine import Engine, EngineConfig
    from kvcache.engine.model import load_model

    return Engine(load_model(path), cache, EngineConfig(pages=64, share_across_engines=True))


def answer(engine: Any) -> Any:
    from kvcache.engine.sampling import SamplingParams

    [result] = engine.generate([PROMPT], SamplingParams(max_tokens=8, ignore_eos=True))
    return result


@pytest.fixture
def model(tmp_path: Path) -> str:
    """With as many layers and heads as SGLang's pools have here."""
    sizes = {"num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 32}
    return tiny_model.make(tmp_path / "model", "llama", max_position_embeddings=2048, **sizes)


def sglang(place: Path, model: str, url: str) -> HiCacheStack:
    ours = {"share_across_engines": True, "revision": None, **settings(url)}
    return HiCacheStack(place, layout="page_first", io="kernel", dtype=torch.float32, ours=ours, model=model)


def test_sglang_and_the_reference_engine_share_blocks(model: str, tmp_path: Path) -> None:
    whole = PROMPT[: 20 * PAGE]
    plain = answer(engine(model, None))
    ones, others = RedisServer(), RedisServer()
    try:
        with kvcache.open(**settings(ones.tcp)) as cache:
            first = answer(engine(model, cache))
            assert (first.token_ids, first.reused_tokens) == (plain.token_ids, 0)
            assert cache.flush(30)
        stack = sglang(tmp_path, model, ones.tcp)
        assert stack.run_prefetch(whole) == len(whole)
        computed = torch.stack([torch.stack(pair) for pair in stack.load_back(whole)])
        stack.close()

        stack = sglang(tmp_path, model, others.tcp)
        stack.put(whole, computed)
        stack.stored(20)
        stack.close()
        with kvcache.open(**settings(others.tcp)) as cache:
            second = answer(engine(model, cache))
            assert second.reused_tokens == len(whole)
            assert second.token_ids == plain.token_ids, "by keys and values that went through SGLang and back"
    finally:
        ones.end()
        others.end()


def test_other_weights_share_nothing(model: str, tmp_path: Path) -> None:
    server = RedisServer()
    try:
        with kvcache.open(**settings(server.tcp)) as cache:
            answer(engine(model, cache))
            assert cache.flush(30)
        sizes = {"num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 32}
        other = tiny_model.make(tmp_path / "other", "llama", seed=1, max_position_embeddings=2048, **sizes)
        stack = sglang(tmp_path, other, server.tcp)
        assert stack.run_prefetch(PROMPT[: 20 * PAGE]) == 0
        stack.close()
    finally:
        server.end()


def test_a_server_hits_blocks_of_the_reference_engine(model: str, tmp_path: Path) -> None:
    redis = RedisServer()
    try:
        with kvcache.open(**settings(redis.tcp)) as cache:
            first = answer(engine(model, cache))
            assert cache.flush(30)
        flags = hicache(share_across_engines=True, **settings(redis.tcp))
        with sglang_server.SGLangServer(model, tmp_path, "--dtype", "float32", *flags) as server:
            tokens, cached = server.generate(PROMPT, 8)
            assert cached.get("storage", 0) == 20 * PAGE, (cached, server.tail())
            assert tokens == first.token_ids
    finally:
        redis.end()
