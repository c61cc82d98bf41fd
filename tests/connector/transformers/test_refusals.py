"""Models of which a prefix cannot be kept as blocks are refused when the store is made, with the reason."""

from __future__ import annotations

from functools import wraps
from typing import Any

import pytest
import torch
import transformers

from kvcache.connector.transformers import PrefixStore
from kvcache.errors import LayoutError, ModelError
from kvcache.testing.naive_cache import NaiveCache

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def llama(**fields: Any) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES | fields))


def mamba() -> Any:
    sizes = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}
    return transformers.MambaForCausalLM(transformers.MambaConfig(**sizes))


def qwen3_next() -> Any:
    fields = {
        "head_dim": 16,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
    }
    return transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**SIZES | fields))


def deepseek() -> Any:
    fields = {
        "q_lora_rank": 8,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": 2,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 8,
        "first_k_dense_replace": 2,
    }
    return transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**SIZES | fields))


def t5() -> Any:
    sizes = {"vocab_size": 40, "d_model": 16, "d_ff": 16, "d_kv": 8, "num_layers": 1, "num_heads": 2}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))


class Shard(transformers.LlamaForCausalLM):  # type: ignore[misc]
    tp_size = 2


class PromptTuned(transformers.LlamaForCausalLM):  # type: ignore[misc]
    """Puts three tokens of its own before what it is given, as prompt tuning does."""

    @wraps(transformers.LlamaForCausalLM.forward)
    def forward(self, input_ids: Any = None, **named: Any) -> Any:
        return super().forward(torch.cat((input_ids.new_ones(1, 3), input_ids), 1), **named)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (mamba, "MambaForCausalLM has "),
        (qwen3_next, "linear_attention"),
        (t5, "encoder"),
        (deepseek, "torch.float32 keys of (1, "),
        (lambda: llama(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}), "dynamic"),
        (lambda: llama().to(torch.float64), "torch.float64"),
        (lambda: Shard(llama().config), "one of 2 tensor-parallel shards"),
        (lambda: PromptTuned(llama().config), "caches 4 tokens for one"),
    ],
    ids=["mamba", "qwen3-next", "t5", "deepseek", "dynamic rope", "float64", "tensor parallel", "prompt tuning"],
)
def test_a_model_with_other_layer_state_is_refused(make: Any, why: str) -> None:
    with pytest.raises(LayoutError) as refused:
        PrefixStore(NaiveCache(), make().eval(), revision="1")
    assert why in str(refused.value)


def test_weights_without_a_revision_are_refused() -> None:
    with pytest.raises(ModelError, match="give revision="):
        PrefixStore(NaiveCache(), llama())


def test_adapters_without_a_name_are_refused() -> None:
    model = llama()
    model.peft_config = {"default": object()}
    with pytest.raises(ModelError, match="give adapter="):
        PrefixStore(NaiveCache(), model, revision="1")
    PrefixStore(NaiveCache(), model, revision="1", adapter="mine, of today")
