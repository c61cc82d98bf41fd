"""Tiny random models of every family, as directories that `load_model` and transformers both read.

All weights are random, biases and norms too, and large enough that the answers wander: a model with small weights
repeats one token whatever its cache holds. The vocabulary is bytes and three special tokens, so any text encodes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB = 256 + len(SPECIAL)
EOS = VOCAB - 1
MAX_TOKENS = 512
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
_QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}

FAMILIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-bias": ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    "llama-rope-llama3": ("llama", {"rope": _LLAMA3}),
    "llama-rope-linear": ("llama", {"rope": {"rope_type": "linear", "factor": 4.0}}),
    "llama-rope-dynamic": ("llama", {"rope": {"rope_type": "dynamic", "factor": 4.0}}),
    "llama-rope-yarn": ("llama", {"rope": _YARN}),
    "smollm2": ("llama", {"tie_word_embeddings": True, "num_attention_heads": 3, "num_key_value_heads": 1}),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 24}),
    "mistral-window": ("mistral", {"sliding_window": 21}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": ("qwen2", _QWEN_WINDOW),
    "qwen3": ("qwen3", {"head_dim": 24, "tie_word_embeddings": True}),
}
"""Name: what transformers calls it, and what of its configuration is not `_SIZES`."""

_SIZES: Mapping[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_TOKENS,
    "eos_token_id": EOS,
    "bos_token_id": VOCAB - 2,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}


def make(directory: str | Path, family: str = "llama", *, seed: int = 0, **changes: Any) -> str:
    """Write a model into `directory`, made where it is not there; its path. `changes` are configuration fields.
    `family`: one of these, or what transformers calls a kind that the reference engine does not run."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, fields = FAMILIES.get(family, (family, {}))
    merged = {**_SIZES, **fields, **changes}
    rope = {"rope_type": "default", "rope_theta": 10000.0, **merged.pop("rope", {})}
    merged.setdefault("rope_parameters", rope)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **merged), dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                weight.normal_(0, 1.5 / weight.shape[1] ** 0.5)
            else:
                weight.normal_(0, 0.2).add_(1.0 if "norm" in name else 0.0)
    model.save_pretrained(directory)
    tokenizer(directory)
    return str(directory)


def tokenizer(directory: str | Path) -> None:
    """Byte-level without merges: one token a byte, in the alphabet's order, then the special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    assert made.get_vocab_size() == VOCAB
    made.save(str(Path(directory) / "tokenizer.json"))
    spoken = {"bos_token": SPECIAL[1], "eos_token": SPECIAL[2], "chat_template": CHATML}
    (Path(directory) / "tokenizer_config.json").write_text(json.dumps(spoken))
