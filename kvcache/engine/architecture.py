"""Reads a `config.json`: sizes, biases, norms, windows, rotary settings.

Supports Llama-family decoders, whose differences `_FAMILIES` lists. Any other configuration is refused, since a model
that runs slightly wrong is worse than one that does not run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvcache.errors import ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """The defaults of a family for absent fields. `None` for a bias: the config's `attention_bias` decides."""

    qkv_bias: bool | None
    o_bias: bool | None
    mlp_bias: bool = False  # whether the config's `mlp_bias` is read
    qk_norm: bool = False
    head_dim: int = 0  # 0: hidden size over heads
    window_tokens: int = 0


_FAMILIES: Mapping[str, _Family] = {
    "llama": _Family(qkv_bias=None, o_bias=None, mlp_bias=True),  # SmolLM2 too
    "mistral": _Family(qkv_bias=False, o_bias=False, window_tokens=4096),
    "qwen2": _Family(qkv_bias=True, o_bias=False),
    "qwen3": _Family(qkv_bias=None, o_bias=None, qk_norm=True, head_dim=128),
}
_ROPES: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "dynamic": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
}
"""Ways to scale rotary positions, each with its required settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    family: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    norm_eps: float
    windows: tuple[int, ...]  # by layer: how many tokens a row sees, itself included; 0 for all
    rope: Mapping[str, Any]  # with `rope_type`, `rope_theta` and the settings of the type
    max_tokens: int
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied: bool  # the output matrix is the embedding
    eos_token_ids: frozenset[int]

    @classmethod
    def read(cls, directory: str) -> Architecture:
        """Read `config.json` of a model's directory, and `generation_config.json` for the end tokens; ModelError on
        failure."""
        fields = _Fields(os.path.join(directory, "config.json"))
        kind = fields.of("model_type", str)
        if kind not in _FAMILIES:
            raise ModelError(f"{fields.path}: model_type {kind!r}: expected one of {', '.join(_FAMILIES)}")
        family = _FAMILIES[kind]
        for name, expected in (
            ("hidden_act", "silu"),
            ("quantization_config", None),
            ("partial_rotary_factor", 1.0),
        ):
            if fields.values.get(name) not in (expected, None):
                raise ModelError(f"{fields.path}: {name} = {fields.values[name]!r}: expected {expected!r}")
        hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
        layers = fields.count("num_hidden_layers")
        attention_bias = fields.of("attention_bias", bool, False)
        architecture = cls(
            family=kind,
            layers=layers,
            hidden=hidden,
            intermediate=fields.count("intermediate_size"),
            heads=heads,
            kv_heads=fields.count("num_key_value_heads", heads),
            head_dim=fields.count("head_dim", family.head_dim or hidden // heads),
            vocab=fields.count("vocab_size"),
            norm_eps=fields.of("rms_norm_eps", float, 1e-6),
            windows=_windows(fields, family, layers),
            rope=_rope(fields),
            max_tokens=fields.count("max_position_embeddings"),
            qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
            o_bias=attention_bias if family.o_bias is None else family.o_bias,
            mlp_bias=family.mlp_bias and fields.of("mlp_bias", bool, False),
            qk_norm=family.qk_norm,
            tied=fields.of("tie_word_embeddings", bool, False),
            eos_token_ids=_ends(directory, fields),
        )
        if architecture.heads % architecture.kv_heads:
            raise ModelError(f"{fields.path}: {heads} heads over {architecture.kv_heads} KV heads: expected a multiple")
        if architecture.head_dim % 2:
            raise ModelError(f"{fields.path}: head_dim = {architecture.head_dim}: expected an even number")
        return architecture

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor of the checkpoint, by name."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab, self.hidden),
            "model.norm.weight": (self.hidden,),
        }
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab, self.hidden)
        for i in range(self.layers):
            at = f"model.layers.{i}."
            shapes[at + "input_layernorm.weight"] = shapes[at + "post_attention_layernorm.weight"] = (self.hidden,)
            for name, rows, columns, bias in (
                ("self_attn.q_proj", q, self.hidden, self.qkv_bias),
                ("self_attn.k_proj", kv, self.hidden, self.qkv_bias),
                ("self_attn.v_proj", kv, self.hidden, self.qkv_bias),
                ("self_attn.o_proj", self.hidden, q, self.o_bias),
                ("mlp.gate_proj", self.intermediate, self.hidden, self.mlp_bias),
                ("mlp.up_proj", self.intermediate, self.hidden, self.mlp_bias),
                ("mlp.down_proj", self.hidden, self.intermediate, self.mlp_bias),
            ):
                shapes[f"{at}{name}.weight"] = (rows, columns)
                if bias:
                    shapes[f"{at}{name}.bias"] = (rows,)
            if self.qk_norm:
                shapes[at + "self_attn.q_norm.weight"] = shapes[at + "self_attn.k_norm.weight"] = (self.head_dim,)
        return shapes


def _windows(fields: _Fields, family: _Family, layers: int) -> tuple[int, ...]:
    if family.window_tokens:  # Mistral: every layer, and an absent field is not null
        absent = 0 if "sliding_window" in fields.values else family.window_tokens
        return (fields.of("sliding_window", int, absent),) * layers
    if not fields.of("use_sliding_window", bool, False):
        return (0,) * layers
    tokens = fields.of("sliding_window", int, 0 if "sliding_window" in fields.values else 4096)
    full = fields.of("max_window_layers", int, 28)
    default = ["full_attention" if i < full else "sliding_attention" for i in range(layers)]
    kinds = fields.of("layer_types", list, default)
    if len(kinds) != layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise ModelError(f"{fields.path}: layer_types: expected {layers} of full_attention or sliding_attention")
    return tuple(tokens if kind == "sliding_attention" else 0 for kind in kinds)


def _rope(fields: _Fields) -> Mapping[str, Any]:
    """Return one form for both of the config's: `rope_parameters`, or `rope_theta` beside `rope_scaling`."""
    rope: dict[str, Any] = {"rope_theta": fields.of("rope_theta", float, 10000.0)}
    for name in ("rope_scaling", "rope_parameters"):
        rope.update((key, value) for key, value in fields.of(name, dict, {}).items() if value is not None)
    kind = rope.pop("type", "default")
    rope.setdefault("rope_type", kind)
    if "original_max_position_embeddings" in fields.values:
        rope["original_max_position_embeddings"] = fields.count("original_max_position_embeddings")
    for name, value in rope.items():
        if name != "rope_type" and not isinstance(value, (int, float)):
            raise ModelError(f"{fields.path}: rotary setting {name} = {value!r}: expected a number")
    kind = rope["rope_type"]
    if kind not in _ROPES:
        raise ModelError(f"{fields.path}: rope type {kind!r}: expected one of {', '.join(_ROPES)}")
    missing = [name for name in _ROPES[kind] if name not in rope]
    if missing:
        raise ModelError(f"{fields.path}: rope type {kind!r} without {', '.join(missing)}: complete the config")
    return rope


def _ends(directory: str, fields: _Fields) -> frozenset[int]:
    ends = fields.of("eos_token_id", object, None)
    generation = os.path.join(directory, "generation_config.json")
    if os.path.exists(generation):
        ends = _Fields(generation).of("eos_token_id", object, ends)
    ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if not all(type(end) is int for end in ends):
        raise ModelError(f"{fields.path}: eos_token_id = {ends}: expected integers")
    return frozenset(ends)


class _Fields:
    """A JSON object on disk. A missing field, or one of another type, is a ModelError that names file and field."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            with open(path, encoding="utf-8") as file:
                self.values = json.load(file)
        except FileNotFoundError:
            raise ModelError(f"{path}: no such file: expected a directory with config.json and safetensors") from None
        except (OSError, ValueError) as error:
            raise ModelError(f"{path}: not readable as JSON ({error}): fetch the model again") from None
        if not isinstance(self.values, dict):
            raise ModelError(f"{path}: expected a JSON object: fetch the model again")

    def of(self, name: str, kind: type, *default: Any) -> Any:
        """Return the field, or the default where it is absent or null."""
        value = self.values.get(name)
        if value is None and default:
            return default[0]
        if kind is float and type(value) is int:
            return float(value)
        if isinstance(value, kind) and not (kind is int and type(value) is bool):
            return value
        raise ModelError(f"{self.path}: {name} = {value!r}: expected {kind.__name__}")

    def count(self, name: str, *default: int) -> int:
        value: int = self.of(name, int, *default)
        if value < 1:
            raise ModelError(f"{self.path}: {name} = {value}: expected at least 1")
        return value
