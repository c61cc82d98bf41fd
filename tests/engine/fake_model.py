"""A model whose answers depend on every byte in the pages it reads, and a cache that answers late, partly or not.

The keys and values of a token are a digest of those of the token before it, as they stand in the pages, and of its id;
the logits are a digest of all keys and values so far. One wrong byte anywhere gives other answers.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import torch

from kvcache.block.layout import KVLayout
from kvcache.cache.api import Extras, Hit
from kvcache.engine.scheduler import Batch
from kvcache.testing.naive_cache import NaiveCache, NaiveNamespace, NaiveRequest
from kvcache.tier.tier import Outcome
from kvcache.transfer.pages import Pages

BLOCK = 4
VOCAB = 13
EOS = 12


def digest(data: bytes, size_bytes: int) -> np.ndarray:
    return np.frombuffer(hashlib.shake_128(data).digest(size_bytes), np.uint32).astype(np.float32)


class FakeModel:
    """Deterministic to the bit, whatever the chunks, the batch and the pages."""

    revision = "fake-1"
    facts: Mapping[str, Any] = {}
    eos_token_ids = frozenset({EOS})
    vocab_size = VOCAB
    dtype, device = torch.float32, torch.device("cpu")

    def __init__(self, max_tokens: int = 64) -> None:
        self.layout = KVLayout.mha(layers=2, kv_heads=1, head_dim=3, dtype="fp32", block_tokens=BLOCK)
        self.max_tokens = max_tokens
        self.rows = 0  # computed so far

    def forward(self, batch: Batch, kv: torch.Tensor) -> torch.Tensor:
        there = kv.numpy()
        wanted = set(batch.logits_at.tolist())
        logits = []
        self.rows += len(batch.token_ids)
        assert [span.start for span in batch.spans] == _starts([span.length for span in batch.spans])
        for span in batch.spans:
            for i in range(span.length):
                position, row = span.context + i, span.start + i
                assert batch.positions[row] == position
                before = _token(there, span.page_ids, position - 1).tobytes() if position else b""
                mine = digest(before + bytes([int(batch.token_ids[row])]), 4 * 12)
                _token(there, span.page_ids, position)[:] = mine.reshape(2, 2, 1, 3)
                if row in wanted:
                    seen = b"".join(_token(there, span.page_ids, p).tobytes() for p in range(position + 1))
                    logits.append(digest(seen, 4 * VOCAB) / 2**32)
        return torch.from_numpy(np.stack(logits)) if logits else torch.empty((0, VOCAB))


def _starts(lengths: list[int]) -> list[int]:
    return [sum(lengths[:i]) for i in range(len(lengths))]


def _token(there: np.ndarray, page_ids: Sequence[int], position: int) -> np.ndarray:
    return there[:, :, page_ids[position // BLOCK], position % BLOCK]


def answer(prompt: Sequence[int], max_tokens: int, context: int = 64) -> list[int]:
    """What a FakeModel greedily answers: worked out without pages, engine or cache."""
    keys = np.empty((0, 2, 2, 1, 3), np.float32)
    tokens, given = list(prompt), []
    while True:
        for token in tokens[len(keys) :]:
            before = keys[-1].tobytes() if len(keys) else b""
            mine = digest(before + bytes([token]), 4 * 12).reshape(1, 2, 2, 1, 3)
            keys = np.concatenate((keys, mine))
        token = int((digest(keys.tobytes(), 4 * VOCAB) / 2**32).argmax())
        tokens.append(token)
        given.append(token)
        if token == EOS or len(given) == max_tokens or len(tokens) == context:
            return given


class LateTransfer:
    """Does its work, one block after another, once its cache has ticked `delay` times."""

    def __init__(self, cache: FlakyCache, work: Callable[[int], Outcome], blocks: int, *, stubborn: bool) -> None:
        self._cache, self._work, self._stubborn = cache, work, stubborn
        self._outcomes = [Outcome.PENDING] * blocks
        self.delay, self.cancelled = cache.delay(), False

    @property
    def settled(self) -> bool:
        return Outcome.PENDING not in self._outcomes

    def tick(self) -> None:
        if self.delay > 0:
            self.delay -= 1
        elif not self.settled:
            at = self._outcomes.index(Outcome.PENDING)
            stopped = self.cancelled and not self._stubborn
            self._outcomes[at] = Outcome.CANCELLED if stopped else self._work(at)

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        return tuple(self._outcomes)

    @property
    def done(self) -> bool:
        self._cache.tick()
        return self.settled

    @property
    def blocks(self) -> int:
        return next((i for i, o in enumerate(self._outcomes) if o is not Outcome.DONE), len(self._outcomes))

    def wait(self, timeout_s: float | None = None) -> bool:
        return self.done

    def wait_layer(self, layer: int, timeout_s: float | None = None) -> bool:
        return self.wait(timeout_s)

    def cancel(self) -> None:
        self.cancelled = True


class ManualClock:
    """A clock that tests advance."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds

    def wall(self) -> float:
        return self.seconds

    def advance(self, seconds: float) -> None:
        self.seconds += seconds


class FlakyCache(NaiveCache):
    """Late lookups, loads and stores, and blocks that turn out to be missing or damaged: by one seed.

    Each question whether a transfer is done makes time pass for all of them. While `hang` is "load" or "store", new
    ones of that kind do nothing at all until `release`.
    """

    def __init__(self, seed: int = 0, *, trouble: float = 0.3, longest: int = 12) -> None:
        super().__init__()
        self.random, self.trouble, self.longest = Random(seed), trouble, longest
        self.open_requests: set[FlakyRequest] = set()
        self.under_way: list[LateTransfer] = []
        self.hang = ""
        self.tiers: list[str] = []  # where the first blocks of any prefix are said to be

    def tick(self) -> None:
        for transfer in self.under_way:
            transfer.tick()
        self.under_way = [transfer for transfer in self.under_way if not transfer.settled]

    def release(self) -> None:
        self.hang = ""
        while self.under_way:
            for transfer in self.under_way:
                transfer.delay = 0
            self.tick()

    def namespace(self, *args: Any, **named: Any) -> FlakyNamespace:
        handle = super().namespace(*args, **named)
        return FlakyNamespace(self, handle)

    def delay(self) -> int:
        return self.random.randint(1, self.longest) if self.random.random() < self.trouble else 0

    def lose(self) -> None:
        """Half of the blocks are gone."""
        for name in list(self.blocks):
            if self.random.random() < 0.5:
                del self.blocks[name]


class FlakyNamespace:
    def __init__(self, cache: FlakyCache, handle: NaiveNamespace) -> None:
        self.cache, self.handle, self.id, self.layout = cache, handle, handle.id, handle.layout
        self.computed, self.event_signature = handle.computed, handle.event_signature

    def request(self, id: str | None = None, **_: Any) -> FlakyRequest:
        request = FlakyRequest(self.cache, self.handle, id or "")
        self.cache.open_requests.add(request)
        return request


class FlakyRequest(NaiveRequest):
    def __init__(self, cache: FlakyCache, handle: NaiveNamespace, id: str) -> None:
        super().__init__(handle, id)
        self.cache, self.pending = cache, cache.delay()

    def match(self, token_ids: Any = None, *, extras: Extras | None = None, digests: Any = None) -> Hit:
        hit = super().match(token_ids, extras=extras, digests=digests)
        if self.pending > 0:
            self.pending -= 1
            return Hit(tokens=0, blocks=0, pending=True)
        return replace(hit, by_tier=Counter(self.cache.tiers[: hit.blocks])) if self.cache.tiers else hit

    def load(  # type: ignore[override]
        self, blocks: int, pages: Pages, page_ids: Sequence[Sequence[int]], *, first_block: int = 0
    ) -> LateTransfer:
        def work(i: int) -> Outcome:
            outcome = super(FlakyRequest, self).load(
                first_block + i + 1, pages, [[page_ids[0][i]]], first_block=first_block + i
            )
            if self.cache.random.random() < self.cache.trouble / 4:
                for tensor in pages[0].owner:
                    tensor[:, page_ids[0][i]] = float("nan")  # a miss leaves anything in its page
                return Outcome.DAMAGED
            return outcome.outcomes[0]

        return self._late(work, blocks - first_block, hang=self.cache.hang == "load")

    def store(  # type: ignore[override]
        self, pages: Pages, page_ids: Sequence[Sequence[int]], *, first_block: int = 0
    ) -> LateTransfer:
        def work(i: int) -> Outcome:
            if self.cache.random.random() < self.cache.trouble / 4:
                return Outcome.NO_CAPACITY
            super(FlakyRequest, self).store(pages, [[page_ids[0][i]]], first_block=first_block + i)
            return Outcome.DONE

        return self._late(work, len(page_ids[0]), hang=self.cache.hang == "store")

    def _late(self, work: Callable[[int], Outcome], blocks: int, *, hang: bool) -> LateTransfer:
        transfer = LateTransfer(self.cache, work, blocks, stubborn=self.cache.random.random() < 0.5)
        if hang:
            transfer.delay = 10**9
        while not self.cache.trouble and not hang and not transfer.settled:
            transfer.tick()
        self.cache.under_way.append(transfer)
        return transfer

    def close(self) -> None:
        self.cache.open_requests.discard(self)
