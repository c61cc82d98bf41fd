"""Prefix caching for Hugging Face transformers: `generate` computes only tokens that no earlier call has computed.

    store = PrefixStore(kvcache.open(), model)
    out = store.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=64)
or, where other code calls `generate`, `past_key_values=store.past_key_values(input_ids)`.

Keys and values move directly between the cache and the tensors of a `DynamicCache`. That cache keeps every token of
sliding layers too: tokens outside a window are zeros behind the mask. For a model on a device, copies pass through host
memory.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from kvcache.block.checkpoint import config_digest
from kvcache.block.hf import engine_facts
from kvcache.cache.api import KVCache, Request
from kvcache.connector.guard import recover
from kvcache.connector.transformers import generate_call as transformers_call
from kvcache.connector.transformers.kv_layout import Tensors, cache_argument, cache_layout
from kvcache.connector.transformers.revision import tensors_revision
from kvcache.errors import ModelError
from kvcache.settings.sources import Settings, load_identity

_POLL_S = 0.001

_log = logging.getLogger("kvcache.transformers")


class PrefixCache(DynamicCache):  # type: ignore[misc]  # transformers is imported without its types
    """A `DynamicCache` that begins with the longest cached prefix of its prompt, and stores the prompt once
    computed."""

    def __init__(self, store: PrefixStore, ids: torch.Tensor, starts: Sequence[int]) -> None:
        super().__init__()
        self.reused = 0
        """Tokens that every row began with, padding included."""
        self._store, self._prompt, self._starts = store, ids, starts
        self._kept = False

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *more: Any, **kw: Any
    ) -> Any:
        if self._kept:
            return super().update(key_states, value_states, layer_idx, *more, **kw)
        if self.reused and self.layers[layer_idx].keys.device != key_states.device:  # the model is on several devices
            layer = self.layers[layer_idx]
            layer.keys, layer.values = layer.keys.to(key_states.device), layer.values.to(key_states.device)
        brought = super().update(key_states, value_states, layer_idx, *more, **kw)
        if layer_idx == self._store.caching.count - 1 and self.get_seq_length(layer_idx) >= self._prompt.shape[1]:
            self.keep(self._prompt)
        return brought

    def keep(self, sequences: torch.Tensor) -> None:
        """Store the computed blocks of these sequences (rows, tokens): the prompt, and the tokens generated behind
        it."""
        self._kept = True
        self._store.keep(self, sequences, self._starts)

    def returned(self) -> DynamicCache:
        """Return the cache that `generate` itself would return: its sliding layers hold only their window."""
        made = DynamicCache(config=self._store.model.config.get_text_config(decoder=True))
        if len(made.layers) != len(self.layers):
            return _plain_cache(self.layers)
        for i, layer in enumerate(self.layers):
            if type(made.layers[i]) is type(layer):
                made.layers[i] = layer
            else:
                made.update(layer.keys, layer.values, i)
        return made

    def __reduce__(self) -> Any:
        """Copy the keys and values, without the store and its model."""
        return _plain_cache, (self.layers,)


def _plain_cache(layers: list[Any]) -> DynamicCache:
    made = DynamicCache()
    made.layers = layers
    return made


class PrefixStore:
    """One model in this process over one cache.

    Args:
        revision: names the weights; by default a sample of the model's tensors, taken when the store is made.
        patience_s: longest time that a call waits for the cache.

    Raises:
        LayoutError: the model's layers hold something else than keys and values.
        ModelError: the weights have no name.
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
            raise ModelError("the model has adapters: give adapter=, the name and revision of the active adapters")
        self.model = model
        self._cache_argument, self._dtype = cache_argument(model), model.dtype
        self.caching = cache_layout(model, block_tokens)
        self.reused = 0
        """Tokens of each row that the last call did not compute."""
        self.declined = ""
        """Why the last call ran without the cache; empty where it used it."""
        self._patience_s = patience_s
        self._handle = cache.namespace(
            self.caching.layout,
            model=_model_name(config),
            revision=revision or _revision(model, cache),
            adapter=adapter,
            tenant=tenant,
            cache_salt=cache_salt,
            facts={"engine": "transformers", "config": config_digest(config), **engine_facts(config)},
        )

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Call `model.generate` with the same arguments, load the longest cached prefix, and store new blocks.

        Only greedy search and sampling of token ids use the cache. Any other call is passed to `model.generate`
        unchanged; `declined` has the reason.
        """
        prompt = transformers_call.parse_call(self.model, args, kwargs)
        self.reused, self.declined = 0, prompt if isinstance(prompt, str) else self._unlike()
        if isinstance(prompt, str) or self.declined:
            return self.model.generate(*args, **kwargs)
        past = self._begin(prompt.ids, prompt.starts)
        given = {name: value for name, value in kwargs.items() if name not in transformers_call.CACHE_ARGUMENTS}
        made = self.model.generate(*args, **given, **{self._cache_argument: past})
        if isinstance(made, torch.Tensor):
            past.keep(made)
            return made
        past.keep(made.sequences)
        for name in transformers_call.CACHE_ARGUMENTS:
            if made.get(name) is past:
                made[name] = past.returned()
        return made

    def past_key_values(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> DynamicCache:
        """Return the argument `past_key_values` of `generate` for these rows (rows, tokens), padded on the left or not
        at all.

        The prompt is stored once it is computed. Call `keep` of the returned cache to store the answer too.
        """
        self.reused, self.declined = 0, self._unlike()
        starts = transformers_call.starts(input_ids, attention_mask, self.model.generation_config)
        if isinstance(starts, str) or self.declined:
            self.declined = self.declined or str(starts)
            return DynamicCache()
        return self._begin(input_ids, starts)

    def _begin(self, ids: torch.Tensor, starts: list[int]) -> PrefixCache:
        """Return a cache of these rows with their longest cached prefix."""
        past = PrefixCache(self, ids, starts)
        loaded = self._safely(lambda: self._load(ids.cpu().numpy(), starts))
        if loaded is not None:
            tensors, reach = loaded
            for i, pair in enumerate(tensors):
                keys, values = (t[:, :, :reach].to(self._device) for t in pair)
                DynamicCache.update(past, keys, values, i)
            self.reused = past.reused = reach
        return past

    @property
    def _device(self) -> torch.device:
        """The device of the model's first input; the CPU where its weights are offloaded."""
        device: torch.device = self.model.device
        return torch.device("cpu") if device.type == "meta" else device

    def _unlike(self) -> str:
        """Return why the model now computes other keys than those in its namespace; empty where it does not."""
        if self.model.training:
            return "the model is in training: its keys may have dropout"
        if torch.is_autocast_enabled(self._device.type):
            return "autocast is on: keys would have another dtype than the layout"
        if self.model.dtype != self._dtype:
            return f"the model has dtype {self.model.dtype}: expected {self._dtype}, as when the store was created"
        return ""

    def keep(self, past: PrefixCache, sequences: torch.Tensor, starts: Sequence[int]) -> None:
        """Store the full blocks of `past` for these sequences, without the loaded ones."""
        self._safely(lambda: self._store(past, sequences.cpu().numpy(), starts))

    def _load(self, ids: np.ndarray, starts: Sequence[int]) -> tuple[Tensors, int] | None:
        """Load the longest prefix that all rows have, each from its own chain."""
        size, until = self.caching.layout.block_tokens, time.monotonic() + self._patience_s
        with ExitStack() as stack:
            requests = [stack.enter_context(self._handle.request(deadline_s=self._patience_s)) for _ in starts]
            ends = [
                start + size * _match_blocks(request, row[start:], until)
                for request, row, start in zip(requests, ids, starts, strict=True)
            ]
            reach = min(ids.shape[1] - 1, *ends)
            for request in requests:
                request.admit()
            while reach > min(starts):  # shorter each time, until all blocks arrived
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
        self.caching.check(tensors, len(starts))
        end = min(tensors[0][0].shape[2], ids.shape[1])
        for row, start in enumerate(starts):
            first, last = max(0, past.reused - start) // size, max(0, end - start) // size
            if first < last:
                with self._handle.request() as request:
                    request.match(ids[row, start:end])
                    pages = self.caching.pages(tensors, row, start)
                    request.store(pages, self._ids(first, last), first_block=first)

    def _ids(self, first: int, end: int) -> list[list[int]]:
        return [list(range(first, end))] * len(self.caching.layout.groups)

    def _safely(self, work: Callable[[], Any]) -> Any:
        def declined(error: Exception) -> None:
            self.declined = f"{type(error).__name__}: {error}"
            _log.exception("cache call failed; the model computes all tokens")

        return recover(work, declined)


def _model_name(config: Any) -> str:
    """Return a path's last part, since the revision identifies the weights; a name on the hub unchanged."""
    name = str(config.name_or_path or config.model_type)
    return Path(name).name if Path(name).exists() else name


def _revision(model: Any, cache: KVCache) -> str:
    """Return the digest of the tensors, preceded by the commit where transformers recorded one."""
    config = model.config
    if not config.name_or_path:
        raise ModelError("the model was not loaded from files: give revision=, a name that changes with its weights")
    settings = getattr(cache, "settings", None)
    identity = settings.identity if isinstance(settings, Settings) else load_identity()
    commit = getattr(config, "_commit_hash", None)
    digest = tensors_revision(model.state_dict(), read_every_byte=identity.read_every_byte)
    return f"{commit}+{digest}" if commit else digest


def _match_blocks(request: Request, ids: np.ndarray, until: float) -> int:
    """Return the blocks of the prefix, once all tiers have answered or the deadline has passed."""
    hit = request.match(ids)
    while hit.pending and time.monotonic() < until:
        time.sleep(_POLL_S)
        hit = request.match()
    return hit.blocks
