"""The layout of a Hugging Face model, and what of its configuration the namespace has to name.

Reads `config.json` alone: no weights, no transformers. Only families listed here are taken, since a model that caches
something else (a recurrent state, shared layers, an indexer) may well have all the same keys in its configuration.
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
    """What the family's configuration class in transformers takes where `config.json` leaves a key out."""

    heads: int = 32
    kv_heads: int = 0  # as many as heads
    head_dim: int = 0  # hidden size / heads
    sliding: bool = True  # whether `sliding_window` counts without `use_sliding_window`
    full_attention_every: int = 0  # with a window: each layer whose number this divides has none, counted from 1
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
    """The canonical layout of the model. `config`: its directory, `config.json`, or the contents, also as an object
    with `to_dict`. `dtype`, ours or torch's name, overrides the configuration's.

    ModelError where there is nothing to read, LayoutError for a family or values that this cannot lay out.
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
    """What of a configuration changes keys and values beside weights and layout, for `Namespace.facts`.

    Rope and quantisation settings as they stand, overrides included where the caller has merged them; the maximal
    length only where the rope scaling depends on it.
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
    """The contents of a configuration given as a directory, a file, a mapping or an object with `to_dict`."""
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
    """The decoder's part of a configuration that nests it."""
    text = outer.get("text_config")
    return text if isinstance(text, Mapping) else outer


def _sliding(text: Mapping[str, Any], family: ModelFamily, layers: int) -> tuple[int, int]:
    """The window in tokens, and how many of the layers have it."""
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
    """Every rope type named anywhere in these settings; transformers nests them by kind of layer, or does not."""
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
