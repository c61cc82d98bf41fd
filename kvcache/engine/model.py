"""The reference model: one step of a Llama-family decoder, in plain torch.

A flat batch and pages are the input; logits are the output, and the new keys and values are written into the pages. The
model knows no requests and no caches.

In float32 a row's logits depend on its own tokens, except for rounding. Every product keeps its order of summation for
any batch (`Linear`). Attention runs one sequence at a time (`attention`). Norms and activations work on single rows.
Only the cut of a prompt into steps changes last bits, within attention.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch.nn import functional

from kvcache.block.checkpoint import checkpoint_digest
from kvcache.block.hf import engine_facts
from kvcache.block.layout import KVLayout
from kvcache.block.revision import model_revision
from kvcache.engine.architecture import Architecture
from kvcache.engine.checkpoint import Layer, Weights, resolve_model
from kvcache.engine.layers import KeyRange, RotaryEmbedding, apply_rotary, attention
from kvcache.engine.scheduler import Batch, Span
from kvcache.errors import ModelError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Runner(Protocol):
    """The interface of a model; `kvcache.engine.model.Model` implements it."""

    layout: KVLayout
    max_tokens: int
    vocab_size: int
    directory: str
    revision: str
    dtype: torch.dtype
    device: torch.device

    @property
    def eos_token_ids(self) -> Collection[int]: ...
    @property
    def facts(self) -> Mapping[str, Any]: ...
    def forward(self, batch: Batch, kv: torch.Tensor) -> torch.Tensor:
        """Return logits, (R, vocab) float32, of the rows `batch.logits_at`.

        Writes the keys and values of the batch's rows into the pages of `kv`, (layers, 2, pages, block_tokens,
        kv_heads, head_dim).
        """


class Model:
    """Weights and the step over them, without state between steps.

    Thread safety: two threads may not use one `kv` at once.
    """

    def __init__(
        self,
        architecture: Architecture,
        weights: Weights,
        *,
        layout: KVLayout,
        directory: str = "",
        revision: str = "",
        facts: dict[str, Any] | None = None,
    ) -> None:
        self.architecture = architecture
        self.layout = layout
        self.directory = directory  # the tokenizer's directory too
        self.revision = revision
        self.facts = facts or {}
        self.eos_token_ids = architecture.eos_token_ids
        self.max_tokens = architecture.max_tokens
        self.vocab_size = architecture.vocab
        self.dtype = weights.embedding.dtype
        self.device = weights.embedding.device
        self._weights = weights
        self._rope = RotaryEmbedding(
            architecture.rope,
            head_dim=architecture.head_dim,
            max_tokens=architecture.max_tokens,
            device=str(self.device),
        )

    @torch.inference_mode()
    def forward(self, batch: Batch, kv: torch.Tensor) -> torch.Tensor:
        """Return logits (R, vocab) in float32, of the rows in `batch.logits_at`.

        `kv` (layers, 2, pages, block_tokens, kv_heads, head_dim) is contiguous, of the model's dtype and device. The
        batch's keys and values are written into it.
        """
        a, w = self.architecture, self._weights
        x = w.embedding[batch.token_ids.to(self.device)]
        angles = self._rope.angles(batch.positions.to(self.device), self.dtype)
        slots = _slots(batch.spans, self.layout.block_tokens).to(self.device)
        reaches = {
            window: [KeyRange.of(s, window=window, block_tokens=self.layout.block_tokens, like=x) for s in batch.spans]
            for window in set(a.windows)
        }
        for layer, pages, window in zip(w.layers, kv, a.windows, strict=True):
            x = x + self._attention(layer, self._norm(x, layer.input_norm), angles, slots, reaches[window], pages)
            gate, up = layer.gate_up(self._norm(x, layer.mlp_norm)).chunk(2, -1)
            x = x + layer.down(functional.silu(gate) * up)
        return w.head(self._norm(x[batch.logits_at.to(self.device)], w.norm)).float()

    def _attention(
        self,
        layer: Layer,
        x: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        slots: torch.Tensor,
        reaches: Sequence[KeyRange],
        pages: torch.Tensor,
    ) -> torch.Tensor:
        a = self.architecture
        heads = layer.qkv(x).view(len(x), -1, a.head_dim)
        q, k, v = torch.split(heads, [a.heads, a.kv_heads, a.kv_heads], 1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self._norm(q, layer.q_norm), self._norm(k, layer.k_norm)
        q, k = apply_rotary(q, *angles), apply_rotary(k, *angles)
        keys, values = pages.view(2, -1, a.kv_heads, a.head_dim)
        keys.index_copy_(0, slots, k)
        values.index_copy_(0, slots, v)
        return layer.out(attention(q, k, v, reaches, pages).flatten(1))

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, weight.shape, weight, self.architecture.norm_eps)


def load_model(
    path: str,
    *,
    dtype: str = "fp32",
    block_tokens: int = 16,
    device: str = "cpu",
    read_every_byte: bool = False,
) -> Model:
    """Load a model from a directory, a GGUF file, or a name that `resolve_model` knows; ModelError otherwise.

    `read_every_byte`: the revision covers all bytes of the weights instead of a sample.
    """
    if dtype not in DTYPES:
        raise ModelError(f"dtype {dtype!r}: expected one of {', '.join(DTYPES)}")
    directory = resolve_model(path, read_every_byte=read_every_byte)
    architecture = Architecture.read(directory)
    revision = model_revision(directory, read_every_byte=read_every_byte)
    checkpoint = checkpoint_digest(directory)
    weights = Weights.read(directory, architecture, dtype=DTYPES[dtype], device=device)
    if revision != model_revision(directory, read_every_byte=read_every_byte):
        raise ModelError(f"{directory}: the weights changed while they were read; start again")
    layout = KVLayout.mha(
        layers=architecture.layers,
        kv_heads=architecture.kv_heads,
        head_dim=architecture.head_dim,
        dtype=dtype,
        block_tokens=block_tokens,
    )
    return Model(
        architecture,
        weights,
        layout=replace(layout, max_tokens=architecture.max_tokens),
        directory=directory,
        revision=revision,
        # The weights' revision does not cover these, and they change keys and values.
        facts={
            **engine_facts(directory),
            "checkpoint": checkpoint,
            "rms_norm_eps": architecture.norm_eps,
            "windows": list(architecture.windows) if any(architecture.windows) else None,
        },
    )


def _slots(spans: Sequence[Span], block_tokens: int) -> torch.Tensor:
    """Return the slot of each row's key and value: page times block_tokens plus offset in the page, (T,) int64."""
    slots = []
    for span in spans:
        at = torch.arange(span.context, span.context + span.length)
        slots.append(torch.tensor(span.page_ids)[at // block_tokens] * block_tokens + at % block_tokens)
    return torch.cat(slots)
