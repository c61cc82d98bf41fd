"""The reference engine: serves requests in continuous batches, one flat batch a step, with the cache behind its pages.

    engine = Engine(load_model("smollm2"), kvcache.open(), EngineConfig(pages=512))
    [result] = engine.generate([prompt_ids], SamplingParams(max_tokens=32))
    result.token_ids, result.reused, result.ttft_s

The engine shows authors of connectors what an engine has to do to use the cache, and is what the cache is tested with.
Its answers without a cache are the reference: every prompt is computed whole, and greedy answers with a cache have to
equal them.

One step:

1. `Scheduler.schedule` plans which tokens of which sequences to compute (scheduler.py). It begins loads and ends those
   that are done.
2. `Runner.forward` computes the batch and writes the new keys and values into the pages (model.py).
3. `sample_tokens` chooses the next token of each sequence without missing tokens (sampling.py).
4. `PrefixCache.publish_and_store` publishes full blocks in the pool and stores them in the cache (prefix.py). This
   follows the choice of tokens, so that a first token does not wait for stores.
5. Sequences that reached a stop or their limit finish, and release their pages.

Alternatives. A production engine (vLLM, SGLang) is faster, and its versions change; the connectors cover those engines.
This engine is plain torch and runs on a CPU, so that tests need no other engine. Batches are flat, not padded: a row's
logits must not depend on its neighbours, or answers with and without a cache could not be compared (layers.py).

Invariants:

- A cached block and a computed block are interchangeable. At least one token of a prompt is always computed, because
  the cache holds no logits.
- A cache fault never fails a request. A lookup or load that exceeds `patience_s` is abandoned, and its blocks are
  computed.
- A page is not allocated again while a transfer reads or writes it (pool.py).
- The request that arrived first is never preempted, so there is always progress.
- `check` audits pages, references and queues.

Threads. All work runs on the calling thread, without locks. `loop.EngineLoop` gives an engine its own thread. Transfers
of the cache run elsewhere and keep the memory that they use alive. The canary, where the cache has one, calls
`Recompute` on another thread, which only reads the model.

To change it: the constructor accepts one group of multi-head attention. Several groups or latents need pages for each
group, in `PagePool`, `PrefixCache` and the layout of `kv`. Another model or device needs another `Runner`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from typing import Any

import torch

from kvcache.block.chain import tokens as checked_tokens
from kvcache.block.shared_namespace import shared_identity, shared_layout
from kvcache.cache.api import KVCache, SupportsCanary
from kvcache.engine.model import Runner
from kvcache.engine.pool import PagePool
from kvcache.engine.prefix import PrefixCache
from kvcache.engine.sampling import Sampler, SamplingParams, sample_tokens
from kvcache.engine.scheduler import Batch, Scheduler, Span, StepPlan
from kvcache.engine.sequence import FinishReason, RequestOutput, Sequence, SequenceState
from kvcache.errors import ConfigError, LayoutError, TokenError
from kvcache.os_env import Clock, SystemClock
from kvcache.transfer.cpu import CpuCopier
from kvcache.transfer.pages import GroupPages

_TICK_S = 0.002  # how long a step without work waits for a load, a lookup or a store


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Limits and identity of an engine."""

    pages: int
    """Blocks of device memory."""
    name: str = "model"
    """The model's name in the namespace and in answers."""
    max_batch_tokens: int = 2048
    """Most rows of a step."""
    max_sequences: int = 64
    """Most requests of a step."""
    patience_s: float = 10.0
    """Longest wait for a lookup or a load of the cache; then its blocks are computed."""
    share_across_engines: bool = False
    """Whether to name model and blocks as other engines do, so that they share blocks."""


class Engine:
    """An engine over one model, with or without a cache.

    Args:
        decode: turns the tokens of an answer into text, for stop strings.

    Thread safety: not thread-safe; see `loop.EngineLoop`.
    """

    def __init__(
        self,
        model: Runner,
        cache: KVCache | None,
        config: EngineConfig,
        *,
        decode: Callable[[list[int]], str] | None = None,
        clock: Clock | None = None,
    ) -> None:
        layout = model.layout
        if len(layout.groups) != 1 or layout.groups[0].kind != "mha":
            raise LayoutError(f"{len(layout.groups)} groups, {layout.groups[0].kind}: this engine runs one mha group")
        group = layout.groups[0]
        self.model = model
        self.name = config.name
        self.pool = PagePool(config.pages)
        self.max_tokens = min(model.max_tokens, config.pages * layout.block_tokens)
        self._decode = decode
        self._clock = clock or SystemClock()
        self._arrivals = itertools.count()
        self._kv = torch.zeros(
            (group.layers, 2, config.pages, layout.block_tokens, group.kv_heads, group.head_dim),
            dtype=model.dtype,
            device=model.device,
        )
        described = GroupPages.from_tensors(layout, list(self._kv), axes=("kv", "page", "token", "head", "dim"))
        handle = None
        if cache is not None:
            if config.share_across_engines:
                same = shared_identity(
                    model.directory, revision=model.revision, dtype=str(model.dtype).removeprefix("torch.")
                )
                handle = cache.namespace(
                    shared_layout(layout), model=same.model, revision=same.revision, facts=same.facts
                )
            else:
                handle = cache.namespace(layout, model=config.name, revision=model.revision, facts=model.facts)
            if (
                isinstance(handle, SupportsCanary) and not config.share_across_engines
            ):  # a digest of another engine does not give the tokens
                handle.canary(Recompute(model, config.max_batch_tokens))
        prefix = PrefixCache(
            self.pool,
            handle,
            [described],
            block_tokens=layout.block_tokens,
            clock=self._clock,
            patience_s=config.patience_s,
            shared=config.share_across_engines,
        )
        self._scheduler = Scheduler(
            self.pool, prefix, max_batch_tokens=config.max_batch_tokens, max_sequences=config.max_sequences
        )
        self._prefix = prefix

    @property
    def unfinished(self) -> int:
        """Number of requests that wait or run. Call `step` while it is positive."""
        return len(self._scheduler.waiting) + len(self._scheduler.active)

    def add(self, prompt_ids: Any, params: SamplingParams | None = None, id: str | None = None) -> Sequence:
        """Queue a request.

        Raises:
            TokenError: the prompt cannot be run.
            ConfigError: a parameter cannot be served.
        """
        params = params or SamplingParams()
        prompt = self._checked(prompt_ids)
        if params.stop and self._decode is None:
            raise ConfigError("stop: this engine has no decoder; pass Engine(..., decode=tokenizer.decode)")
        arrival = next(self._arrivals)
        sequence = Sequence(
            id=id or f"request-{arrival}",
            arrival=arrival,
            prompt_tokens=len(prompt),
            tokens=prompt,
            end_tokens=min(self.max_tokens, len(prompt) + params.max_tokens),
            params=params,
            sampler=Sampler(params),
            added_s=self._clock.now(),
        )
        self._scheduler.add(sequence)
        return sequence

    def _checked(self, prompt_ids: Any) -> list[int]:
        prompt: list[int] = checked_tokens(prompt_ids).tolist()
        if not prompt:
            raise TokenError("an empty prompt: give at least one token")
        if len(prompt) >= self.max_tokens:
            limit_name = "the model's context"
            if self.max_tokens < self.model.max_tokens:
                limit_name = "the capacity of the page pool (give the engine more pages)"
            raise TokenError(f"a prompt of {len(prompt)} tokens: {self.max_tokens}, answer included, is {limit_name}")
        if max(prompt) >= self.model.vocab_size:
            raise TokenError(f"token id {max(prompt)}: the model's vocabulary ends at {self.model.vocab_size - 1}")
        return prompt

    def step(self) -> list[Sequence]:
        """Compute one batch; return the sequences that got a token, including those that finished.

        Without a batch to compute, waits up to 2 ms for the loads and stores that block it.
        """
        plan = self._scheduler.schedule()
        if not plan:
            self._wait()
            return []
        batch = self._batch(plan)
        begun = self._clock.now()
        logits = self.model.forward(batch, self._kv)
        for sequence, length in plan.items():
            sequence.computed += length
        updated = [sequence for sequence in plan if not sequence.missing]
        tokens = sample_tokens(logits, [s.sampler for s in updated])
        self._prefix.computed(sum(plan.values()), self._clock.now() - begun)
        for sequence, token in zip(updated, tokens, strict=True):
            if not sequence.answer:
                sequence.ttft_s = self._clock.now() - sequence.added_s
            sequence.tokens.append(token)
        for sequence in plan:  # after sampling: a first token need not wait for the stores
            self._prefix.publish_and_store(sequence)
        for sequence in updated:
            self._finish_where_ended(sequence)
        return updated

    def _batch(self, plan: StepPlan) -> Batch:
        token_ids: list[int] = []
        positions: list[int] = []
        spans: list[Span] = []
        wanted: list[int] = []
        for sequence, length in plan.items():
            end = sequence.computed + length
            spans.append(Span(len(token_ids), length, sequence.computed, sequence.pages))
            token_ids += sequence.tokens[sequence.computed : end]
            positions += range(sequence.computed, end)
            if length == sequence.missing:
                wanted.append(len(token_ids) - 1)
        return Batch(self._tensor(token_ids), self._tensor(positions), spans, self._tensor(wanted))

    def _tensor(self, numbers: list[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self.model.device)

    def _finish_where_ended(self, sequence: Sequence) -> None:
        if self._stopped(sequence):
            self._finish(sequence, "stop")
        elif len(sequence.tokens) >= sequence.end_tokens:
            self._finish(sequence, "length")

    def _stopped(self, sequence: Sequence) -> bool:
        params = sequence.params
        if sequence.tokens[-1] in self.model.eos_token_ids and not params.ignore_eos:
            return True
        if not params.stop or self._decode is None:
            return False
        text = self._decode(sequence.answer)
        return any(stop in text for stop in params.stop)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        self._scheduler.finish(sequence, reason)
        sequence.total_s = self._clock.now() - sequence.added_s

    def _wait(self) -> None:
        loading = next((s.transfer for s in self._scheduler.active if s.transfer is not None), None)
        if loading is not None:
            loading.wait(_TICK_S)
        elif self.unfinished:
            time.sleep(_TICK_S)

    def abort(self, sequence: Sequence) -> None:
        """End a request now and release its pages. No effect on a finished request."""
        if sequence.state is not SequenceState.FINISHED:
            self._finish(sequence, "abort")

    def generate(
        self, prompts: Ordered[Any], params: SamplingParams | Ordered[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Run these prompts together until all have finished; return results in their order. If one is refused, none
        runs."""
        each = [params] * len(prompts) if params is None or isinstance(params, SamplingParams) else params
        sequences: list[Sequence] = []
        try:
            for prompt, wish in zip(prompts, each, strict=True):
                sequences.append(self.add(prompt, wish))
            while any(s.state is not SequenceState.FINISHED for s in sequences):
                self.step()
        finally:
            for sequence in sequences:
                self.abort(sequence)
        return [sequence.result() for sequence in sequences]

    def check(self) -> list[str]:
        """Audit the engine; return one line for each fault."""
        faults = self._scheduler.check()
        if not self.unfinished and self.pool.held:
            faults.append(f"{self.pool.held} pages without an owner")
        return faults

    def close(self) -> None:
        """Abort unfinished requests. Running transfers keep the memory that they use alive. The cache stays open."""
        for sequence in [*self._scheduler.waiting, *self._scheduler.active]:
            self.abort(sequence)


class Recompute:
    """Computes the last block of some tokens again, outside the pool and any cache, for the canary to compare.

    Thread safety: called from another thread than the engine's; it only reads the model.
    """

    def __init__(self, model: Runner, rows: int) -> None:
        """`rows` is the number of tokens of a step."""
        self._model, self._rows = model, rows

    def __call__(self, tokens: Ordered[int]) -> list[bytes]:
        model, layout = self._model, self._model.layout
        group, pages = layout.groups[0], len(tokens) // layout.block_tokens
        shape = (group.layers, 2, pages, layout.block_tokens, group.kv_heads, group.head_dim)
        kv = torch.zeros(shape, dtype=model.dtype, device=model.device)
        for first in range(0, len(tokens), self._rows):
            part = tokens[first : first + self._rows]
            span = Span(0, len(part), first, list(range(pages)))
            positions = range(first, first + len(part))
            model.forward(Batch(self._tensor(part), self._tensor(positions), [span], self._tensor([len(part) - 1])), kv)
        last = list(kv[:, :, -1:].cpu().contiguous())
        described = GroupPages.from_tensors(layout, last, axes=("kv", "page", "token", "head", "dim"))
        payload = bytearray(described.block_bytes)
        CpuCopier().gather(described, [0], [memoryview(payload)]).wait()
        return [bytes(payload)]

    def _tensor(self, numbers: Ordered[int]) -> torch.Tensor:
        return torch.tensor(list(numbers), dtype=torch.int64, device=self._model.device)
