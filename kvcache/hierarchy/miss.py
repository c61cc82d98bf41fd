"""What a request knows of the part of its prompt that was not found: one reason, counted once.

Counted when the request stores or is left, since until then a load may still bring less than was found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcache.block.chain import digest_chain, tokens
from kvcache.hierarchy.transfer import BlockTransfer
from kvcache.hierarchy.why import OUTCOMES, Why
from kvcache.log import Work
from kvcache.observe.metrics import Counters
from kvcache.observe.recent_requests import Asked, kept
from kvcache.tier.tier import Outcome


class Miss:
    def __init__(
        self,
        why: Why,
        counters: Counters,
        *,
        work: Work,
        namespace: bytes,
        places: Sequence[bytes],
        block_tokens: int,
    ) -> None:
        self._why, self._counters = why, counters
        request, agent, session = work
        self._asked = Asked(request, namespace, places, block_tokens, b"", 0, 0.0, agent=agent, session=session)
        self._prompt_blocks = 0
        self._behind: list[NDArray[np.uint32]] = []
        self._loads: list[tuple[int, int, BlockTransfer]] = []  # whose, its first block
        self._admitted = self._counted = False

    def look(
        self,
        packed: bytes,
        found: int,
        ids: NDArray[Any] | None = None,
        beside: Any = None,
        *,
        reason: str | None = None,
        **detail: Any,
    ) -> str:
        """So many blocks of this chain were found; why no more, as the asker may know it. `ids`: of its full blocks,
        where the chain is new; `beside`: any tokens from the first on, where it was named by digests. `reason`: where
        it is known, and is not that the next block is not there."""
        asked = self._asked
        if packed is not asked.packed:
            if asked.kept:  # another prompt in the same request
                self._asked = asked = replace(asked, ids=[], found=0, reason="", fate=None, detail={}, kept=False)
            asked.packed, asked.ids, asked.known_from = packed, [], 0
        asked.found, asked.detail = found, detail
        if found == asked.blocks:
            if not asked.ids:
                asked.known_from = found * asked.block_tokens
            asked.reason = reason or ""
            return asked.reason
        if self._why.ring.most_bytes and ids is None and beside is not None:
            ids = tokens(beside)[: asked.blocks * asked.block_tokens]
        if ids is not None and self._why.ring.most_bytes:
            asked.ids = [kept(ids)]
        asked.reason = self._why.reason(asked) if reason is None else reason
        # nobody learns from an answer what another tenant has stored
        return self._why.alone(asked) if asked.reason == "apart" else asked.reason

    def digest(self, parent: bytes, ids: NDArray[Any], block_tokens: int, extras: list[bytes] | None) -> bytes:
        """Hashes what comes behind the prompt, and keeps its ids for `extended`."""
        if self._why.ring.most_bytes:
            self._behind.append(kept(ids))
        return digest_chain(parent, ids, block_tokens, extras)

    def extended(self, packed: bytes) -> None:
        """The chain has more blocks now."""
        behind, self._behind = self._behind, []
        if packed is not self._asked.packed:
            self._why.ring.grow(self._asked, behind, packed)

    def told(self, ids: Any) -> None:
        """Tokens of the chain from the first on, by a client that named its blocks itself. As `look`, for one that has
        answered without them."""
        asked = self._asked
        if asked.found < asked.blocks and not asked.kept and self._why.ring.most_bytes:
            asked.ids, asked.known_from = [kept(tokens(ids)[: asked.blocks * asked.block_tokens])], 0
            if asked.reason in {"cold", "diverged"}:
                asked.reason = self._why.reason(asked)

    def admit(self, clock: int, time: float) -> None:
        self._admitted = True
        asked = self._asked
        asked.clock, asked.time = clock, time
        self._prompt_blocks = asked.blocks
        self._why.ring.add(asked)
        if self._why.heard is not None:
            self._why.heard(asked)

    def loading(self, rank: int, first_block: int, transfer: BlockTransfer) -> None:
        """`rank`: any number, the same for loads that come one after the other."""
        self._loads.append((rank, first_block, transfer))

    def count(self) -> bool:
        """Once, and only what was admitted: whether it was counted now."""
        if not self._admitted or self._counted:
            return False
        self._counted = True
        asked = self._asked
        for _, first_block, transfer in self._loads:
            if transfer.failure is not None and first_block + transfer.failure[0] < asked.found:
                asked.found = first_block + transfer.failure[0]
                asked.reason, asked.detail = self._failed(asked, transfer.failure[1])
        missed = self._prompt_blocks - asked.found
        if asked.reason and missed > 0:
            self._counters.add("misses", reason=asked.reason)
            self._counters.add("missed_tokens", missed * asked.block_tokens, reason=asked.reason)
        return True

    def loaded(self) -> tuple[int, int, float] | None:
        """Once: up to which block loads were asked for, how many blocks all ranks had when these had ended, and how
        long they took. None where there was none. A rank that only loads what its scheduler found is asked as well."""
        loads, self._loads = self._loads, []
        if not loads:
            return None
        reached: dict[int, int] = {}
        seconds: dict[int, float] = {}
        for rank, first, load in loads:
            reached[rank] = max(reached.get(rank, 0), first + load.blocks)
            seconds[rank] = seconds.get(rank, 0.0) + load.seconds
        taken = max(first + len(load.outcomes) for _, first, load in loads)
        return taken, min(reached.values()), max(seconds.values())

    def _failed(self, asked: Asked, outcome: Outcome) -> tuple[str, dict[str, Any]]:
        """Why a block that was found did not come."""
        reason = OUTCOMES.get(outcome.value)
        asked.fate = fate = self._why.lost.find(asked.signature(asked.found))
        if reason is None:  # it left between the question and the load; or the tier found that it has it no more
            return ("refused", {"outcome": outcome.value}) if fate is None else (fate.reason, {})
        return reason, {"outcome": outcome.value}
