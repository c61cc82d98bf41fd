"""Reads a Hugging Face model's layout, and the facts of its configuration that the namespace must name.

Reads `config.json` only: no weights, no transformers. Only the listed families are accepted. A model that caches other
things (a recurrent state, shared layers, an indexer) may have the same keys in its configuration.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcache.block.layout import DTYPE_BYTES, Group, KVLayout
from kvcache.errors import LayoutError, ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """The defaults of the family's configuration class in transformers, where `config.json` lacks a key."""

    heads: int = 32
    kv_heads: int = 0  # 0: as many as heads
    head_dim: int = 0  # 0: hidden size / heads
    sliding: bool = True  # whether `sliding_window` counts without `use_sliding_window`
    # with a window: the layers whose number, counted from 1, is a multiple of this have none
    full_attention_every: int = 0
    mla: bool = False


FAMILIES: Mapping[str, ModelFamily] = {
    "llama": ModelFamily(),
    "mistral": ModelFamily(kv_heads=8),
    "mixtral": ModelFamily(kv_heads=8),
    "phi3": ModelFamily(),
    "qwen2": ModelFamily(kv_heads=32, sliding=False),
    "qwen3": ModelFamily(kv_heads=32, head_dim=128, sliding=False),
    "qwen3_moe": ModelFamily(kv_heads=4, head_dim=128, sliding=False),
    "gemma": ModelFamily(heads=16, kv_heads=16, head_dim=256),
    "gemma2": ModelFamily(heads=8, kv_heads=4, head_dim=256, full_attention_every=2),
    "gemma3_text": ModelFamily(heads=8, kv_heads=4, head_dim=256, full_attention_every=6),
    "deepseek_v2": ModelFamily(mla=True),
    "deepseek_v3": ModelFamily(mla=True),
}
_DTYPES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "float8_e4m3fn": "fp8_e4m3",
    "float8_e5m2": "fp8_e5m2",
}
_ROPE_FACTS = (
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "rope_local_base_freq",
    "rope_interleave",
    "partial_rotary_factor",
    "original_max_position_embeddings",
    "no_rope_layers",
)
_QUANTISATION_FACTS = ("quantization_config", "compression_config")
_LENGTH_DEPENDENT = frozenset({"dynamic", "yarn", "longrope", "su"})


def layout_from_hf(config: Any, dtype: str | None = None, block_tokens: int = 16) -> KVLayout:
    """Return the canonical layout of a model.

    Args:
        config: the model's directory, its `config.json`, or the contents, also as an object with `to_dict`.
        dtype: overrides the configuration's; this project's name or torch's.

    Raises:
        ModelError: there is nothing to read.
        LayoutError: the family or its values are not supported.
    """
    outer = read_config(config)
    text = _text(outer)
    name = text.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise LayoutError(
            f"model_type {name!r}: expected one of {', '.join(FAMILIES)}; describe other models with KVLayout(...)"
        )
    family = FAMILIES[name]
    layers = _count(text, "num_hidden_layers")
    dtype = _dtype(
        dtype or text.get("dtype") or text.get("torch_dtype") or outer.get("dtype") or outer.get("torch_dtype")
    )
    longest = _count(text, "max_position_embeddings", 0)
    if family.mla:
        latent = _count(text, "kv_lora_rank") + _count(text, "qk_rope_head_dim")
        return KVLayout((Group(kind="mla", layers=layers, head_dim=latent, dtype=dtype),), block_tokens, longest)
    heads = _count(text, "num_attention_heads", family.heads)
    kv_heads = _count(text, "num_key_value_heads", family.kv_heads or heads)
    head_dim = _count(text, "head_dim", family.head_dim) or _divide(text, heads)
    window, sliding = _sliding(text, family, layers)
    groups = []
    if layers > sliding:
        groups.append(Group(layers=layers - sliding, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype))
    if sliding:
        windowed = Group(
            name="window",
            layers=sliding,
            kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            rule="window",
            window_tokens=window,
        )
        groups.append(windowed)
    return KVLayout(tuple(groups), block_tokens, longest)


def engine_facts(config: Any) -> dict[str, Any]:
    """Return the settings, besides weights and layout, that change keys and values, for `Namespace.facts`.

    They are the rope and quantisation settings as configured, with overrides where the caller has merged them. The
    maximal length is included only where the rope scaling depends on it.
    """
    outer = read_config(config)
    text = _text(outer)
    facts = {name: text[name] for name in _ROPE_FACTS if text.get(name) is not None}
    for name in _QUANTISATION_FACTS:
        found = text.get(name, outer.get(name))
        if found is not None:
            facts[name] = found
    if rope_types(facts) & _LENGTH_DEPENDENT and "max_position_embeddings" in text:
        facts["max_position_embeddings"] = text["max_position_embeddings"]
    return facts


def read_config(config: Any) -> dict[str, Any]:
    """Return the contents of a configuration given as a directory, a file, a mapping or an object with `to_dict`."""
    if isinstance(config, Mapping):
        return dict(config)
    if hasattr(config, "to_dict"):
        return dict(config.to_dict())
    if not isinstance(config, str | os.PathLike):
        raise ModelError(f"a {type(config).__name__}; expected a model's directory, its config.json, or what is in it")
    path = Path(config)
    path = path / "config.json" if path.is_dir() else path
    try:
        contents = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}; expected the directory of a model, or its config.json") from None
    except (ValueError, RecursionError):
        raise ModelError(f"{path}: no JSON; expected a model's config.json") from None
    if not isinstance(contents, dict):
        raise ModelError(f"{path}: a JSON {type(contents).__name__}; expected a model's config.json")
    return contents


def _text(outer: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the decoder's part of a nested configuration."""
    text = outer.get("text_config")
    return text if isinstance(text, Mapping) else outer


def _sliding(text: Mapping[str, Any], family: ModelFamily, layers: int) -> tuple[int, int]:
    """Return the window in tokens, and the number of layers that have it."""
    used = text.get("use_sliding_window", family.sliding) and text.get("sliding_window")
    window = _count(text, "sliding_window") if used else 0
    kinds = text.get("layer_types")
    if kinds is None:
        if not window:
            return 0, 0
        if family.full_attention_every:
            return window, layers - layers // _count(text, "sliding_window_pattern", family.full_attention_every)
        return window, layers if family.sliding else max(0, layers - _count(text, "max_window_layers", 28, least=0))
    other = set(kinds) - {"full_attention", "sliding_attention"}
    if other or len(kinds) != layers:
        found = f"{len(kinds)} layer_types of {layers} layers" if not other else f"layer_types with {sorted(other)}"
        raise LayoutError(f"{found}: expected full_attention or sliding_attention for each layer")
    sliding = kinds.count("sliding_attention")
    if sliding and not window:
        raise LayoutError("layer_types has sliding_attention, sliding_window is missing: give its tokens")
    return window, sliding


def rope_types(value: Any) -> set[str]:
    """Return all rope types in these settings; transformers may nest them by kind of layer."""
    if not isinstance(value, Mapping):
        return set()
    found = {value[name] for name in ("rope_type", "type") if isinstance(value.get(name), str)}
    return found.union(*map(rope_types, value.values()))


def _count(config: Mapping[str, Any], name: str, default: int | None = None, *, least: int = 1) -> int:
    value = config.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        found = "is missing" if value is None else f"= {value!r}"
        raise LayoutError(f"{name} {found}: expected an integer of at least {least} in the model's configuration")
    return value


def _divide(config: Mapping[str, Any], heads: int) -> int:
    hidden = _count(config, "hidden_size")
    if hidden % heads:
        raise LayoutError(f"hidden_size = {hidden} and {heads} heads: expected a multiple, or head_dim")
    return hidden // heads


def _dtype(name: Any) -> str:
    short = str(name).removeprefix("torch.")
    found = _DTYPES.get(short, short)
    if found not in DTYPE_BYTES:
        raise LayoutError(f"dtype {name!r}: expected one of {', '.join(DTYPE_BYTES)}; give dtype=")
    return found
