"""What the scheduler's side remembers of one request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvcache.cache.api import MOST_TTL_S, Hit, Request
from kvcache.connector.vllm.digest import Digests
from kvcache.connector.vllm.identity import Who
from kvcache.connector.vllm.quiet import quietly


@dataclass
class Wishes:
    """What a request asks of the cache, in `kv_transfer_params`; names begin with `kvcache.`."""

    skip_load: bool = False
    skip_store: bool = False
    max_load_tokens: int | None = None
    tenant: str | None = None
    ttl: float | None = None
    agent: str | None = None
    session: str | None = None

    @classmethod
    def of(cls, params: Mapping[str, Any] | None) -> tuple[Wishes, str]:
        """The wishes, and what was wrong with them: a wish that makes no sense is left out, never an error."""
        kinds = {"skip_load": bool, "skip_store": bool, "max_load_tokens": int, "ttl": float}
        found: dict[str, Any] = {}
        wrong = []
        for name, value in (params or {}).items():
            wish = name.removeprefix("kvcache.")
            if wish == name:
                continue
            given = float(value) if kinds.get(wish) is float and type(value) is int else value
            fits = wish in cls.__dataclass_fields__ and type(given) is kinds.get(wish, str)
            if wish == "ttl" and fits:
                fits = 0 < given < MOST_TTL_S
            if fits and not (type(given) in {int, float} and given < 0):
                found[wish] = given
            else:
                wrong.append(f"{name} = {value!r}")
        return cls(**found), ", ".join(wrong)


@dataclass
class Tracked:
    request: Any  # vLLM's
    who: Who
    digests: Digests
    wishes: Wishes
    face: Request | None = None
    hit: Hit | None = None
    asked: int = 0  # blocks that were matched
    local_tokens: int = 0  # of the last match: what the engine has itself
    give_up_s: float = 0.0  # until when a lookup may be pending
    blocks: list[list[int]] = field(default_factory=list)  # page ids by vLLM's group
    stored: int = 0  # blocks that are stored, on their way, or not to be stored
    told: int = 0  # digests that the ranks know
    loading: bool = False
    sources: dict[str, int] = field(default_factory=dict)  # by tier, the tokens of the last load
    failed: bool = False  # a load failed: this request computes

    @property
    def cached(self) -> bool:
        """Something of it was found, loaded or stored."""
        return bool(self.stored or self.sources)

    def storable(self, of: Sequence[int], first: int, end: int) -> int:
        """From where on each of these groups of vLLM's has its own page: what a window has left behind is page 0, which
        is nobody's."""
        for g in of:
            first = max([first, *(i + 1 for i in range(first, end) if self.blocks[g][i] == 0)])
        return first

    def decline(self) -> None:
        """It goes on without a cache."""
        self.wishes = Wishes(skip_load=True, skip_store=True)
        self.close()

    def close(self) -> None:
        if self.face is not None:
            quietly(None, self.face.close)
        self.face = self.hit = None
        self.asked = 0


def behind(by_tier: Mapping[str, int], first: int, end: int, block_tokens: int) -> dict[str, int]:
    """Of a prefix whose blocks are so many by tier, nearest first, the tokens of blocks `first` to `end`. Tails leave a
    tier before heads, so that what is nearest is taken to be in front."""
    found, at = {}, 0
    for tier, blocks in by_tier.items():
        mine = min(at + blocks, end) - max(at, first)
        if mine > 0:
            found[tier] = mine * block_tokens
        at += blocks
    return found
