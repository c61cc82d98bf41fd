"""Small models of random weights, of each family: python models.py FOLDER.

The weights are large, so that an answer depends on every token before it and not only on the last.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

COMMON = {
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny-llama": ("Llama", {"head_dim": 32}),
    "tiny-qwen2": ("Qwen2", {}),
    "tiny-qwen3": ("Qwen3", {"head_dim": 32}),
    "tiny-gemma3": (
        "Gemma3",
        {
            "num_hidden_layers": 6,
            "head_dim": 32,
            "sliding_window": 256,
            "query_pre_attn_scalar": 32,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        },
    ),
    "tiny-mla": (
        "DeepseekV2",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 128,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 4,
            "q_lora_rank": None,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "topk_method": "greedy",
            "n_group": 1,
            "topk_group": 1,
        },
    ),
}


def make(family: str, place: Path) -> None:
    name, own = FAMILIES[family]
    configs = [getattr(transformers, f"{name}{kind}Config", None) for kind in ("Text", "")]
    config = next(kind for kind in configs if kind is not None)(**{**COMMON, **own})
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.08)
    model.to(torch.bfloat16).save_pretrained(place)
    words = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    fast.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "
    fast.save_pretrained(place)


if __name__ == "__main__":
    for family in FAMILIES:
        if not Path(sys.argv[1], family, "tokenizer.json").exists():
            make(family, Path(sys.argv[1], family))
