"""What engines of several makes share: one namespace, computed by each from the model alone, and one order of bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvcache.block.chain import page_digests
from kvcache.block.layout import Group, KVLayout
from kvcache.block.shared_namespace import shared_identity, shared_layout
from kvcache.connector.sglang.config import Options as SGLangOptions
from kvcache.connector.sglang.config import identify_model
from kvcache.connector.sglang.host_pools import PoolLayout, Ranks, describe_pool
from kvcache.connector.vllm.config import Options
from kvcache.connector.vllm.identity import BlockDigests
from kvcache.connector.vllm.kv_layout import ModelIdentity, combine_ranks, pages_of
from kvcache.connector.vllm.kv_layout import describe_layers as describe_vllm
from kvcache.connector.vllm.namespaces import share_model
from kvcache.engine.engine import Engine, EngineConfig
from kvcache.engine.model import load_model
from kvcache.errors import LayoutError, ModelError
from kvcache.testing.naive_cache import NaiveCache
from kvcache.transfer.cpu import CpuCopier
from tests.connector.sglang.fake_host_pools import MHATokenToKVPoolHost
from tests.connector.vllm.test_kv_layout import Elsewhere
from tests.engine import tiny_model

LAYERS, HEADS, DIM, PAGE, PAGES = 4, 2, 32, 16, 6
SIZES = {"num_hidden_layers": LAYERS, "num_key_value_heads": HEADS, "head_dim": DIM}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model.make(tmp_path_factory.mktemp("model"), "llama", **SIZES)


def sglang(path: str, layout: str = "page_first", **served: Any) -> tuple[bytes, PoolLayout]:
    """The namespace's id, and the pool."""
    identity = identify_model(
        SimpleNamespace(model_path=path, **served),
        None,
        SGLangOptions.read({"kvcache": {"share_across_engines": True}}),
    )
    pool = MHATokenToKVPoolHost(
        layout, pages=PAGES, page=PAGE, layers=LAYERS, heads=HEADS, dim=DIM, dtype=torch.float32
    )
    pool.fill(1)
    described = describe_pool(pool, Ranks(), canonical=True)
    handle = NaiveCache().namespace(
        described.layout, model=identity.model, revision=identity.revision, facts=identity.facts_of("kv", "")
    )
    return handle.id, described


def caches(seed: int = 1) -> dict[str, torch.Tensor]:
    """As vLLM has them on a GPU."""
    made = torch.Generator().manual_seed(seed)
    return {f"layer{i}": torch.randn((PAGES, HEADS, PAGE, 2 * DIM), generator=made) for i in range(LAYERS)}


def vllm_group(names: list[str]) -> Any:
    class FullAttentionSpec:
        block_size, num_kv_heads, head_size, prefix_cacheable = PAGE, HEADS, DIM, True

    return SimpleNamespace(layer_names=names, kv_cache_spec=FullAttentionSpec())


def vllm(path: str, tensors: dict[str, Any] | None = None, **served: Any) -> tuple[bytes, ModelIdentity, Any]:
    given = tensors or {name: Elsewhere(tensor) for name, tensor in caches().items()}
    [shape] = describe_vllm(given, [vllm_group(list(given))], PAGES, packing="amx")
    layout, shards, of, _ = combine_ranks({(0, 0): (shape,)})
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            **{"model": path, "revision": None, "quantization": None, "max_model_len": 512, "hf_overrides": {}} | served
        )
    )
    made = share_model(config, Options(share_across_engines=True), ModelIdentity("", "", {}, layout, shards, of))
    handle = NaiveCache().namespace(made.layout, model=made.name, revision=made.revision, facts=made.facts)
    return handle.id, made, shape


def reference(path: str) -> bytes:
    engine = Engine(
        load_model(path), NaiveCache(), EngineConfig(pages=8, name="as it is served", share_across_engines=True)
    )
    handle = engine._prefix._handle
    assert handle is not None
    return handle.id


def test_all_engines_give_one_model_the_same_id(model: str) -> None:
    assert sglang(model)[0] == vllm(model)[0] == reference(model)


def test_every_page_order_gives_the_same_payload(model: str) -> None:
    """What vLLM gathers is what SGLang scatters, whatever each of them has in its own memory."""
    tensors = caches()
    _, made, shape = vllm(model)
    pages = pages_of(shape, tensors, PAGES, made.layout, 0, made.shards[0, 0][0])
    payload = memoryview(bytearray(pages.block_bytes))
    CpuCopier().gather(pages, [2], [payload])
    told = np.frombuffer(payload, np.float32).reshape(LAYERS, 2, PAGE, HEADS, DIM)
    for i, tensor in enumerate(tensors.values()):
        keys, values = tensor[2].transpose(0, 1).split(DIM, -1)
        assert np.array_equal(told[i], np.stack([keys.numpy(), values.numpy()]))
    for layout in ("layer_first", "page_first", "page_first_direct", "page_head"):
        _, described = sglang(model, layout)
        CpuCopier().scatter(described.pages[0], [4], [payload])
        assert np.array_equal(described.owner.page(4).numpy(), told)


def test_all_engines_give_blocks_the_same_names() -> None:
    tokens = [(7 * i + i * i) % 250 for i in range(5 * PAGE + 3)]
    digests = BlockDigests(SimpleNamespace(all_token_ids=tokens, num_tokens=len(tokens)), "pages", PAGE, PAGE)
    digests.up_to(2)
    assert list(digests.up_to(9)) == page_digests(tokens, PAGE)


@pytest.mark.parametrize(
    "changed",
    [{"json_model_override_args": '{"rope_theta": 5}'}, {"quantization": "fp8"}, {"load_format": "dummy"}],
    ids=lambda changed: next(iter(changed)),
)
def test_sglang_options_that_change_results_change_the_id(model: str, changed: dict[str, Any]) -> None:
    assert sglang(model, **changed)[0] not in {sglang(model)[0], reference(model)}


@pytest.mark.parametrize("changed", [{"hf_overrides": {"rope_theta": 5}}, {"quantization": "fp8"}])
def test_vllm_options_that_change_results_change_the_id(model: str, changed: dict[str, Any]) -> None:
    assert vllm(model, **changed)[0] != reference(model)


def test_other_weights_or_settings_change_the_id(model: str, tmp_path: Path) -> None:
    told = [shared_identity(tiny_model.make(tmp_path / str(i), family, seed=seed, **SIZES))
            for i, (family, seed) in enumerate([("llama", 0), ("llama", 1), ("llama-rope-linear", 0),
                                                ("mistral-window", 0), ("mistral", 0)])]  # fmt: skip
    layout = KVLayout.mha(layers=LAYERS, kv_heads=HEADS, head_dim=DIM, dtype="fp32")
    cache = NaiveCache()
    ids = {cache.namespace(layout, model=t.model, revision=t.revision, facts=t.facts).id for t in told}
    assert len(ids) == len(told)


def test_a_layout_that_others_cannot_read_is_refused(model: str) -> None:
    with pytest.raises(LayoutError, match=r"opaque.*share_across_engines = false"):
        vllm(model, dict(caches()))  # on a processor
    one = Group(layers=2, kv_heads=2, head_dim=8)
    for layout in (KVLayout((one, one)), KVLayout((replace(one, rule="window", window_tokens=8),))):
        with pytest.raises(LayoutError, match="share_across_engines = false"):
            shared_layout(layout)
    identity = identify_model(
        SimpleNamespace(model_path=model), None, SGLangOptions.read({"kvcache": {"share_across_engines": True}})
    )
    with pytest.raises(ModelError, match="swa"):
        identity.facts_of("swa", "")
