"""Hugging Face transformers: `generate` computes only what no earlier call has.

    store = PrefixStore(kvcache.open(), model)
    out = store.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=64)

or, where something else calls `generate`, `past_key_values=store.past_key_values(input_ids)`.

Keys and values move straight between the cache and the tensors of a `DynamicCache`, which here keeps every token of
sliding layers too: what left a window is zeros behind the mask. A model on a device is copied by way of host memory.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from kvcache.block.hf import engine_facts, rope_types
from kvcache.block.layout import Group, KVLayout
from kvcache.block.revision import model_revision
from kvcache.errors import LayoutError, ModelError
from kvcache.hierarchy.face import KVCache, Request
from kvcache.transfer.pages import GroupPages

_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_LAYERS = ("DynamicLayer", "DynamicSlidingWindowLayer")
_KINDS = frozenset({"full_attention", "sliding_attention"})
_MOVING_ROPES = frozenset({"dynamic", "longrope", "su"})
_POLL_S = 0.001

_log = logging.getLogger("kvcache.transformers")

Tensors = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values by layer, each (rows, heads, tokens, dim)."""


@dataclass(frozen=True, slots=True)
class Caching:
    """What a model caches: the layout, and by group which of the model's layers it holds."""

    layout: KVLayout
    layers: tuple[tuple[int, ...], ...]

    @property
    def count(self) -> int:
        return sum(map(len, self.layers))

    def pages(self, tensors: Tensors, row: int, first: int) -> list[GroupPages]:
        """One row's tokens from `first` on as pages of one block each."""
        described = []
        for g, layers in enumerate(self.layers):
            pairs = [tensors[i] for i in layers]
            keys, item = pairs[0][0], pairs[0][0].element_size()
            _, heads, tokens, _ = (item * step for step in keys.stride())
            at = row * item * keys.stride(0) + first * tokens
            described.append(
                GroupPages(
                    layout=self.layout,
                    group=g,
                    shard=self.layout.groups[g].whole,
                    bases=np.array([[k.data_ptr() + at, v.data_ptr() + at] for k, v in pairs], np.uint64),
                    pages=(keys.shape[2] - first) // self.layout.block_tokens,
                    page_stride=tokens * self.layout.block_tokens,
                    token_stride=tokens,
                    head_stride=heads,
                    owner=pairs,
                )
            )
        return described

    def zeros(self, rows: int, tokens: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Zeros, since what the mask hides is multiplied all the same."""
        made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for group, layers in zip(self.layout.groups, self.layers, strict=True):
            dtype = next(kind for kind, name in _DTYPES.items() if name == group.dtype)
            shape = (rows, group.kv_heads, tokens, group.head_dim)
            made |= {i: (torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)) for i in layers}
        return [made[i] for i in range(self.count)]


class PrefixCache(DynamicCache):  # type: ignore[misc]  # transformers is imported without its types
    """A `DynamicCache` that begins with the longest known prefix of its prompt, and stores the prompt once computed."""

    def __init__(self, store: PrefixStore, ids: torch.Tensor, starts: Sequence[int]) -> None:
        super().__init__()
        self.reused = 0
        """Tokens that every row began with, padding included."""
        self._store, self._prompt, self._starts = store, ids, starts
        self._kept = False

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *more: Any, **kw: Any
    ) -> Any:
        brought = super().update(key_states, value_states, layer_idx, *more, **kw)
        whole = layer_idx == self._store.caching.count - 1 and self.get_seq_length(layer_idx) >= self._prompt.shape[1]
        if whole and not self._kept:
            self.keep(self._prompt)
        return brought

    def keep(self, sequences: torch.Tensor) -> None:
        """Store what is computed of these sequences (rows, tokens): the prompt, and what was generated behind it."""
        self._kept = True
        self._store.keep(self, sequences, self._starts)


class PrefixStore:
    """One model, in this process, over one cache.

    `revision` names the weights; the hub's commit or a digest of the model's directory where it is not given.
    LayoutError for a model whose layers hold something else than keys and values; ModelError for weights without a
    name. `patience_s` bounds what a call waits for the cache, whatever happens there.
    """

    def __init__(
        self,
        cache: KVCache,
        model: Any,
        *,
        revision: str | None = None,
        adapter: str | None = None,
        tenant: str = "default",
        cache_salt: str = "",
        block_tokens: int = 16,
        patience_s: float = 5.0,
    ) -> None:
        config = model.config
        if adapter is None and getattr(model, "peft_config", None):
            raise ModelError("the model has adapters: give adapter=, the name and revision of what is active")
        self.model = model
        self._word = _word(model)
        self.caching = caching(model, block_tokens)
        self.reused = 0
        """Tokens of each row that the last call did not compute."""
        self.declined = ""
        """Why the last call went without the cache; empty where it did not."""
        self._patience_s = patience_s
        self._bound = cache.namespace(
            self.caching.layout,
            model=config.name_or_path or config.model_type,
            revision=revision or _revision(config),
            adapter=adapter,
            tenant=tenant,
            cache_salt=cache_salt,
            facts={"engine": "transformers", **engine_facts(config)},
        )

    def generate(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        """`model.generate`, with the longest known prefix loaded and what is new stored."""
        self.reused, self.declined = 0, _declines(self.model, kwargs)
        if self.declined:
            return self.model.generate(input_ids, **kwargs)
        past = self.past_key_values(input_ids, kwargs.get("attention_mask"))
        made = self.model.generate(input_ids, **{self._word: past}, **kwargs)
        if isinstance(past, PrefixCache):
            past.keep(getattr(made, "sequences", made))
        return made

    def past_key_values(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> DynamicCache:
        """What `generate` takes under this name, for these rows (rows, tokens), padded on the left or not at all.

        The prompt is stored once it is computed; `keep` of what this returns stores the answer too.
        """
        self.reused, self.declined = 0, ""
        starts = _starts(input_ids, attention_mask, self.model.generation_config.pad_token_id)
        if isinstance(starts, str):
            self.declined = starts
            return DynamicCache()
        past = PrefixCache(self, input_ids, starts)
        loaded = self._safely(lambda: self._load(input_ids.cpu().numpy(), starts))
        if loaded is not None:
            tensors, reach = loaded
            for i, pair in enumerate(tensors):
                keys, values = (t[:, :, :reach].to(self.model.device) for t in pair)
                DynamicCache.update(past, keys, values, i)
            self.reused = past.reused = reach
        return past

    def keep(self, past: PrefixCache, sequences: torch.Tensor, starts: Sequence[int]) -> None:
        """Store full blocks of what `past` holds of these sequences, but for the loaded ones."""
        self._safely(lambda: self._store(past, sequences.cpu().numpy(), starts))

    def _load(self, ids: np.ndarray, starts: Sequence[int]) -> tuple[Tensors, int] | None:
        """The tokens that every row has from its own chain, so far as all rows have them."""
        size, until = self.caching.layout.block_tokens, time.monotonic() + self._patience_s
        with ExitStack() as stack:
            requests = [stack.enter_context(self._bound.request(deadline_s=self._patience_s)) for _ in starts]
            ends = [
                start + size * _found(request, row[start:], until)
                for request, row, start in zip(requests, ids, starts, strict=True)
            ]
            reach = min(ids.shape[1] - 1, *ends)
            for request in requests:
                request.admit()
            while reach > min(starts):  # shorter each time, until all of it came
                blocks = [-(-max(0, reach - start) // size) for start in starts]
                tensors = self.caching.zeros(
                    len(starts), max(start + size * count for start, count in zip(starts, blocks, strict=True))
                )
                transfers = [
                    request.load(count, self.caching.pages(tensors, row, start), self._ids(0, count))
                    for row, (request, count, start) in enumerate(zip(requests, blocks, starts, strict=True))
                ]
                for transfer in transfers:
                    if not transfer.wait(max(0.0, until - time.monotonic())):
                        for late in transfers:
                            late.cancel()
                        return None
                short = [
                    start + size * transfer.blocks
                    for transfer, count, start in zip(transfers, blocks, starts, strict=True)
                    if transfer.blocks < count
                ]
                if not short:
                    return tensors, reach
                reach = min(short)
        return None

    def _store(self, past: PrefixCache, ids: np.ndarray, starts: Sequence[int]) -> None:
        size = self.caching.layout.block_tokens
        tensors = [(layer.keys.cpu().contiguous(), layer.values.cpu().contiguous()) for layer in past.layers]
        end = min(tensors[0][0].shape[2], ids.shape[1])
        for row, start in enumerate(starts):
            first, last = max(0, past.reused - start) // size, max(0, end - start) // size
            if first < last:
                with self._bound.request() as request:
                    request.match(ids[row, start:end])
                    pages = self.caching.pages(tensors, row, start)
                    request.store(pages, self._ids(first, last), first_block=first)

    def _ids(self, first: int, end: int) -> list[list[int]]:
        return [list(range(first, end))] * len(self.caching.layout.groups)

    def _safely(self, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except Exception as error:  # noqa: BLE001  law: never in the way
            self.declined = f"{type(error).__name__}: {error}"
            _log.exception("the cache failed; the model computes everything")
            return None


def caching(model: Any, block_tokens: int) -> Caching:
    """What the model caches, as it does so for one token; LayoutError, with the reason, for what is no prefix."""
    config = model.config.get_text_config(decoder=True)
    other = set(getattr(config, "layer_types", None) or ()) - _KINDS
    if model.config.is_encoder_decoder or getattr(model, "_is_stateful", False) or other:
        held = f"layers of {sorted(other)}" if other else "an encoder or a recurrent state"
        raise LayoutError(f"{type(model).__name__} has {held}: expected full or sliding attention in every layer")
    moving = rope_types(engine_facts(model.config)) & _MOVING_ROPES
    if moving:
        raise LayoutError(f"rope of type {', '.join(sorted(moving))}: keys depend on how long their prompt was")
    expected = DynamicCache(config=model.config).layers
    for i, layer in enumerate(expected):
        if type(layer).__name__ not in _LAYERS:
            raise LayoutError(f"layer {i} is cached as {type(layer).__name__}: expected one of {', '.join(_LAYERS)}")
    probe = DynamicCache()
    with torch.no_grad():
        token = torch.zeros((1, 1), dtype=torch.long, device=model.device)
        model(input_ids=token, use_cache=True, **{_word(model): probe})
    groups: dict[Group, list[int]] = {}
    for i, layer in enumerate(probe.layers):
        groups.setdefault(_group(i, layer, expected[i] if i < len(expected) else None, block_tokens), []).append(i)
    if not groups:
        raise LayoutError(
            f"{type(model).__name__} cached nothing for a token: expected keys and values; is it in training?"
        )
    laid = tuple(replace(group, layers=len(layers)) for group, layers in groups.items())
    return Caching(KVLayout(laid, block_tokens), tuple(map(tuple, groups.values())))


def _word(model: Any) -> str:
    """What the model calls its cache: another name since transformers 5.24."""
    return "cache" if "cache" in signature(type(model).forward).parameters else "past_key_values"


def _group(i: int, layer: Any, expected: Any, block_tokens: int) -> Group:
    keys, values = layer.keys, layer.values
    if not isinstance(keys, torch.Tensor) or keys.shape != values.shape or keys.dtype not in _DTYPES:
        found = "nothing"
        if isinstance(keys, torch.Tensor):
            found = f"{keys.dtype} keys of {tuple(keys.shape)} and values of {tuple(values.shape)}"
        raise LayoutError(f"layer {i} caches {found}: expected one shape, in {', '.join(_DTYPES.values())}")
    group = Group(layers=1, kv_heads=keys.shape[1], head_dim=keys.shape[3], dtype=_DTYPES[keys.dtype])
    if not getattr(expected, "is_sliding", False):
        return group
    # A prefix may end within its last block, and must have a whole window even then.
    return replace(group, name="window", rule="window", window_tokens=expected.sliding_window + block_tokens - 1)


def _revision(config: Any) -> str:
    commit = getattr(config, "_commit_hash", None)
    if commit:
        return str(commit)
    if config.name_or_path and Path(config.name_or_path).is_dir():
        return model_revision(config.name_or_path)
    raise ModelError(
        "the model comes from no directory and no commit of the hub: give revision=, a name of its weights"
    )


def _starts(ids: torch.Tensor, mask: torch.Tensor | None, pad: Any) -> list[int] | str:
    """By row the number of paddings on its left, or why that cannot be told."""
    if ids.ndim != 2 or not ids.shape[1]:
        return f"input_ids of shape {tuple(ids.shape)}: expected (rows, tokens)"
    if mask is None:
        return "padding without attention_mask" if pad is not None and bool((ids == pad).any()) else [0] * len(ids)
    if mask.shape != ids.shape:
        return f"attention_mask of shape {tuple(mask.shape)}: expected that of input_ids, {tuple(ids.shape)}"
    starts = [int(row) for row in (mask == 0).sum(1)]
    if any(bool((mask[i, start:] == 0).any()) for i, start in enumerate(starts)):
        return "padding that is not on the left"
    return starts


def _declines(model: Any, kwargs: dict[str, Any]) -> str:
    """Why this call has to go without the cache."""
    given = [name for name in ("past_key_values", "cache") if kwargs.get(name) is not None]
    if given:
        return f"{given[0]} given"
    other = [name for name, value in kwargs.items() if isinstance(value, torch.Tensor) and name != "attention_mask"]
    if other:
        return f"{other[0]} given: only token ids name a block"
    asked = kwargs.get("generation_config") or model.generation_config
    for name in ("num_beams", "num_return_sequences"):
        if (kwargs.get(name) or getattr(asked, name, 1) or 1) > 1:
            return f"{name} above 1"
    if kwargs.get("use_cache", True) is False:
        return "use_cache is False"
    return ""


def _found(request: Request, ids: np.ndarray, until: float) -> int:
    """Blocks of the prefix, once all tiers have answered or the time is over."""
    hit = request.match(ids)
    while hit.pending and time.monotonic() < until:
        time.sleep(_POLL_S)
        hit = request.match()
    return hit.blocks
