"""Parses one call of transformers' `generate`: its prompt, or the reason why the call runs without the cache.

transformers resolves the configuration and names the mode. So a setting counts from any source: the call, its
`generation_config`, or the model's. An argument is served only if it is listed here, since a later transformers may add
one that changes the keys of a prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin

CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")
"""Names of a cache among the arguments of `generate`, in every transformers since 4.56."""

_SIGNATURE = signature(GenerationMixin.generate)
_MODES = ("greedy_search", "sample")
_NAMED = frozenset({
    "self", "inputs", "generation_config", "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn",
    "synced_gpus", "streamer", "negative_prompt_ids", "negative_prompt_attention_mask", "use_model_defaults",
})  # fmt: skip
"""Parameters of `generate` that do not change the keys and values of the prompt."""
_FREE = frozenset({"input_ids", "attention_mask", "tokenizer", "trust_remote_code"})
"""The same among its keywords, beside those of the configuration."""
_SETTINGS = {
    "cache_implementation": "the call selects another cache implementation",
    "output_hidden_states": "a loaded prefix has no hidden states",
    "output_attentions": "a loaded prefix has no attentions",
    "prefill_chunk_size": "chunks count from the first token of the prompt",
    "token_healing": "it changes the prompt",
    "is_assistant": "the model is the draft model of another call",
    "return_legacy_cache": "the call returns the cache as tuples",
}
"""Settings of the configuration that decline a call, with the reason."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids (rows, tokens), and for each row the number of padding tokens on its left."""

    ids: torch.Tensor
    starts: list[int]


def parse_call(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Prompt | str:
    """Return the prompt of `model.generate(*args, **kwargs)`, or the reason why the call has to run without the
    cache."""
    bare = model.get_base_model() if hasattr(model, "get_base_model") else model  # PEFT wraps the model
    if getattr(bare.generate, "__func__", None) is not GenerationMixin.generate:
        return f"{type(bare).__name__} overrides generate: expected the method of transformers"
    try:
        named = _SIGNATURE.bind(bare, *args, **kwargs).arguments
        free = named.pop("kwargs", {})
        defaults = {name: named[name] for name in ("use_model_defaults",) if name in named}
        config, unused = bare._prepare_generation_config(named.get("generation_config"), **defaults, **free)  # noqa: SLF001  no public name
        mode = config.get_generation_mode(named.get("assistant_model"))
    except Exception as error:  # noqa: BLE001  boundary to foreign code: `generate` resolves it again and raises the same to its caller
        return f"{type(error).__name__}: {error}"
    more = {name: value for name, value in named.items() if name not in _NAMED}
    more |= {name: value for name, value in unused.items() if name not in _FREE}
    return _uncached_reason(bare, config, mode, free) or _unsupported_argument(more) or _prompt(named, free, config)


def starts(ids: Any, mask: Any, config: GenerationConfig) -> list[int] | str:
    """Return the number of padding tokens on the left of each row, or the reason why these rows have no cached
    prefix."""
    if not isinstance(ids, torch.Tensor):
        return f"input_ids of type {type(ids).__name__}: expected a tensor (rows, tokens)"
    if ids.ndim != 2 or not ids.numel() or ids.dtype not in (torch.int64, torch.int32):
        return f"input_ids of {ids.dtype}, shape {tuple(ids.shape)}: expected integers (rows, tokens)"
    if mask is None:
        return "padding without attention_mask" if _infers_padding(ids, config) else [0] * len(ids)
    if not isinstance(mask, torch.Tensor) or mask.shape != ids.shape:
        found = f"shape {tuple(mask.shape)}" if isinstance(mask, torch.Tensor) else f"type {type(mask).__name__}"
        return f"attention_mask of {found}: expected that of input_ids, {tuple(ids.shape)}"
    mask = mask.cpu()
    shown = mask == 1
    if not torch.equal(shown, mask != 0):
        return "attention_mask has values other than 0 and 1"
    if not bool(shown.any(1).all()):
        return "a row has only padding"
    if bool((shown[:, :-1] & ~shown[:, 1:]).any()):
        return "expected padding on the left"
    return [int(count) for count in (~shown).sum(1)]


def _uncached_reason(model: Any, config: GenerationConfig, mode: str, free: Mapping[str, Any]) -> str:
    """Return why a call of this configuration is declined; empty where it is served."""
    if mode not in _MODES:
        return f"generation mode {getattr(mode, 'value', mode)}: expected {' or '.join(_MODES)}"
    off = model.config.get_text_config(decoder=True).use_cache is False and free.get("use_cache") is not True
    if off or not config.use_cache:
        return "use_cache is False"
    if (config.num_return_sequences or 1) > 1:
        return "num_return_sequences above 1"
    for name, why in _SETTINGS.items():
        value = getattr(config, name, None)
        if value:
            return f"{name} is {value!r}: {why}"
    return ""


def _unsupported_argument(more: Mapping[str, Any]) -> str:
    """Return the reason for the first argument that belongs neither to the prompt nor to the configuration."""
    for name, value in more.items():
        if value is not None:
            return f"{name} given" + (
                ": token ids are required to identify blocks" if isinstance(value, torch.Tensor) else ""
            )
    return ""


def _prompt(named: Mapping[str, Any], free: Mapping[str, Any], config: GenerationConfig) -> Prompt | str:
    given = [ids for ids in (named.get("inputs"), free.get("input_ids")) if ids is not None]
    if len(given) != 1:
        return f"{len(given)} of inputs and input_ids given: expected one"
    rows = starts(given[0], free.get("attention_mask"), config)
    return rows if isinstance(rows, str) else Prompt(given[0], rows)


def _infers_padding(ids: torch.Tensor, config: GenerationConfig) -> bool:
    """Return whether `generate` takes tokens of these rows for padding. It does, unless its end token is the same."""
    if config.pad_token_id is None:
        return False
    pad = torch.as_tensor(config.pad_token_id, device=ids.device)
    ends = config.eos_token_id
    if ends is not None and bool(torch.isin(torch.as_tensor(ends, device=ids.device), pad).any()):
        return False
    return bool(torch.isin(ids, pad).any())
