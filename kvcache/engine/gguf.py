"""Converts a GGUF file to a directory that `load_model` reads: safetensors, config.json, tokenizer.json.

Supports the `llama` architecture with a byte-level BPE vocabulary, the form of SmolLM2. Weights become float32, so
every quantised value is kept exactly.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcache.errors import ModelError

_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_CONTROL, _USER_DEFINED = 3, 4  # token types: matched whole in a text; control tokens are never shown


def convert(path: Path, directory: Path) -> None:
    """Write the model of `path` into `directory`, which exists and is empty; ModelError on failure."""
    import gguf
    from safetensors.numpy import save_file

    try:
        reader = gguf.GGUFReader(path)
        facts = {name: field.contents() for name, field in reader.fields.items()}
        config = _config(path, facts)
        tokenizer = _tokenizer(path, facts)
        tensors = dict(_tensors(path, reader, config))
    except (ValueError, KeyError, IndexError, OverflowError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: not a whole GGUF file of a llama model ({error!r}): fetch it again") from None
    config["vocab_size"] = len(tensors["model.embed_tokens.weight"])
    config["tie_word_embeddings"] = "lm_head.weight" not in tensors
    tokens = facts["tokenizer.ggml.tokens"]
    spoken = {
        f"{name}_token": tokens[facts[f"tokenizer.ggml.{name}_token_id"]]
        for name in ("bos", "eos")
        if f"tokenizer.ggml.{name}_token_id" in facts
    }
    spoken["chat_template"] = facts.get("tokenizer.chat_template", "")
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(directory / "tokenizer.json"))
    for name, contents in (("config.json", config), ("tokenizer_config.json", spoken)):
        (directory / name).write_text(json.dumps(contents, indent=1), encoding="utf-8")


def _config(path: Path, facts: dict[str, Any]) -> dict[str, Any]:
    if facts.get("general.architecture") != "llama":
        raise ModelError(f"{path}: architecture {facts.get('general.architecture')!r}: expected 'llama'; use that")
    heads = facts["llama.attention.head_count"]
    if any(name.startswith("llama.rope.scaling") for name in facts):
        raise ModelError(f"{path}: scaled rotary positions: use the model's safetensors instead")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": facts["llama.embedding_length"],
        "intermediate_size": facts["llama.feed_forward_length"],
        "num_hidden_layers": facts["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": facts.get("llama.attention.head_count_kv", heads),
        "head_dim": facts.get("llama.attention.key_length", facts["llama.embedding_length"] // heads),
        "max_position_embeddings": facts["llama.context_length"],
        # Stored as float32; the shortest decimal with the same value is the one the model was trained with.
        "rms_norm_eps": float(str(np.float32(facts["llama.attention.layer_norm_rms_epsilon"]))),
        "rope_theta": float(str(np.float32(facts.get("llama.rope.freq_base", 10000.0)))),
        "hidden_act": "silu",
        "bos_token_id": facts.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": facts.get("tokenizer.ggml.eos_token_id"),
        "torch_dtype": "float32",
    }


def _tensors(path: Path, reader: Any, config: dict[str, Any]) -> Iterator[tuple[str, NDArray[np.float32]]]:
    from gguf.quants import dequantize

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for tensor in reader.tensors:
        stem, _, kind = tensor.name.rpartition(".")
        block, _, part = stem.removeprefix("blk.").partition(".")
        name = _TOP.get(stem) or (f"model.layers.{block}.{_LAYER[part]}" if part in _LAYER else "")
        if not name or kind != "weight":
            raise ModelError(f"{path}: tensor {tensor.name!r}: not of a plain llama model; use its safetensors")
        values = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        yield f"{name}.weight", _halves(values, heads[part]) if part in heads else values


def _halves(values: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Reorder the rows of each head from adjacent pairs (GGUF) to pairs half a head apart."""
    pairs = values.reshape(heads, -1, 2, values.shape[-1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(values.shape))


def _tokenizer(path: Path, facts: dict[str, Any]) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind = facts.get("tokenizer.ggml.model"), facts.get("tokenizer.ggml.pre")
    if kind != ("gpt2", "smollm"):
        raise ModelError(f"{path}: tokenizer {kind}: expected ('gpt2', 'smollm'); use the model's tokenizer.json")
    tokens = facts["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in facts.get("tokenizer.ggml.merges", [])]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    # Split single digits first, then words as GPT-2 does.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    for token, type_ in zip(tokens, facts["tokenizer.ggml.token_type"], strict=True):
        if type_ in (_CONTROL, _USER_DEFINED):
            added = [AddedToken(token, normalized=False, special=type_ == _CONTROL)]
            (tokenizer.add_special_tokens if type_ == _CONTROL else tokenizer.add_tokens)(added)
    return tokenizer
