"""Prefixes near before they are asked for: each computed once in the fleet, and read by all others.

For each prompt one node of the fleet gets the lease, has its engine compute it, and marks it stored once it is. The
others go on with other prompts meanwhile, and then have their own engines read what is there. Without a server for
leases every node has its own engine do it: never in the way.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from kvcache.errors import KVCacheError
from kvcache.fleet.board import Board
from kvcache.fleet.engine import Usage
from kvcache.fleet.lease import LEASE_S, Lease, Turn
from kvcache.fleet.prompts import Prompt
from kvcache.log import logger
from kvcache.os_env import Clock

PAUSE_S = 0.1
"""Between two looks at what others compute."""

_log = logger("kvcache.fleet")


class Prefiller(Protocol):
    @property
    def model(self) -> str: ...
    def prefill(self, prompt: Prompt) -> Usage: ...


@dataclass(frozen=True, slots=True)
class Step:
    """What became of one prompt: `computed`, by this node's engine with the lease; `fetched`, after another node;
    `alone`, without a lease; `failed`; `left`, for lack of time or room."""

    number: int
    what: str
    usage: Usage = field(default_factory=lambda: Usage(0, 0))
    why: str = ""


class Warm:
    """`begin`: called before this node's engine computes a prompt. `settle`: waits until what the engine stored or used
    since then can be read by the others; whether it is so. `held`: bytes
    that this node keeps, of which `most_bytes` may be added. `patience_s`: for all of it."""

    def __init__(
        self,
        engine: Prefiller,
        prompts: Sequence[Prompt],
        board: Board | None,
        clock: Clock,
        *,
        begin: Callable[[], object] = lambda: None,
        settle: Callable[[], bool] = lambda: True,
        held: Callable[[], int] = lambda: 0,
        most_bytes: int | None = None,
        patience_s: float = 3600.0,
        lease_s: float = LEASE_S,
        tell: Callable[[Step], object] = lambda step: None,
    ) -> None:
        self._engine, self._prompts, self._board, self._clock = engine, prompts, board, clock
        self._begin, self._settle, self._held, self._most_bytes = begin, settle, held, most_bytes
        self._patience_s, self._lease_s, self._tell = patience_s, lease_s, tell
        self._done = threading.Event()
        self._stop = threading.Event()
        self.steps: list[Step] = []

    @property
    def ready(self) -> bool:
        """Every prompt was dealt with, however it ended."""
        return self._done.is_set()

    @property
    def counts(self) -> dict[str, int]:
        """Progress: prompts by what became of them, those that wait, and tokens."""
        steps = list(self.steps)
        tokens, cached = (sum(getattr(step.usage, name) for step in steps) for name in ("tokens", "cached"))
        waiting = len(self._prompts) - len(steps)
        return {**Counter(step.what for step in steps), "waiting": waiting, "tokens": tokens, "cached_tokens": cached}

    def start(self) -> threading.Thread:
        """In the background."""
        thread = threading.Thread(target=self.run, name="kvcache-warm", daemon=True)
        thread.start()
        return thread

    def stop(self) -> None:
        """After the prompt that is under way."""
        self._stop.set()

    def run(self) -> None:
        """Deal with every prompt; raises for none of them."""
        try:
            self._run()
        except Exception:  # noqa: BLE001  a fleet that is not warm serves as well
            _log.exception("warming up failed")
        finally:
            self._done.set()

    def _run(self) -> None:
        end, before = self._clock.now() + self._patience_s, self._held()
        waiting = deque(enumerate(self._prompts))
        others = 0  # in a row, that another node has
        while waiting and not self._stop.is_set():
            number, prompt = waiting.popleft()
            over = self._most_bytes is not None and self._held() - before >= self._most_bytes
            if over or self._clock.now() >= end:
                self._say(Step(number, "left", why="the limit on bytes is reached" if over else "no time is left"))
                continue
            step = self._one(number, prompt)
            if step is not None:
                self._say(step)
                others = 0
                continue
            waiting.append((number, prompt))
            others += 1
            if others >= len(waiting):
                self._stop.wait(PAUSE_S)
                others = 0

    def _say(self, step: Step) -> None:
        self.steps.append(step)
        level = logging.WARNING if step.what == "failed" else logging.INFO
        of = len(self._prompts)
        _log.log(level, "prompt %d of %d: %s%s", step.number + 1, of, step.what, f", {step.why}" if step.why else "")
        self._tell(step)

    def _one(self, number: int, prompt: Prompt) -> Step | None:
        """What became of it; None while another node computes it."""
        try:
            if self._board is None:
                return Step(number, "alone", self._engine.prefill(prompt))
            lease = Lease(self._board, prompt.digest(self._engine.model), lease_s=self._lease_s)
            try:
                turn = lease.take()
            except OSError as error:
                return Step(number, "alone", self._engine.prefill(prompt), f"no lease: {error}")
            if turn is Turn.ANOTHERS:
                return None
            if turn is Turn.STORED:
                return Step(number, "fetched", self._engine.prefill(prompt))
            return self._with_lease(number, prompt, lease)
        except KVCacheError as error:
            return Step(number, "failed", why=str(error))

    def _with_lease(self, number: int, prompt: Prompt, lease: Lease) -> Step:
        with lease.kept():
            self._begin()
            usage = self._engine.prefill(prompt)
            settled = self._settle()
        with suppress(OSError):  # then it ends by itself, and somebody else asks his engine
            lease.stored() if settled else lease.give_up()
        return Step(number, "computed", usage, "" if settled else "what was computed did not reach the fleet in time")
