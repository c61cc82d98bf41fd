"""Times the engine's steps for the plan, which loads a prefix only where that is faster than computing it.

A step begins when it is scheduled and ends when its output reaches the scheduler, in the same order. Where steps
overlap, a step is timed from the end of the step before it. Only steps that mostly compute prompts are reported.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import Protocol

from kvcache.connector.guard import call_guarded

MAX_PENDING_STEPS = 64
"""Limit of scheduled steps without output; engines have a few."""


class ComputeObserver(Protocol):
    """Receives the times of steps; a `NamespaceHandle` is one."""

    def computed(self, tokens: int, seconds: float) -> None: ...


@dataclass(slots=True)
class Step:
    begun: float = 0.0
    tokens: int = 0  # of all requests
    prompts: int = 0  # of these, tokens of prompts
    namespaces: list[ComputeObserver] = field(default_factory=list)  # observers of these prompts


class StepTimer:
    """Thread safety: used on the scheduler's thread only."""

    def __init__(self, now: Callable[[], float] = monotonic) -> None:
        self._now = now
        self._next = Step()
        self._under_way: deque[Step] = deque(maxlen=MAX_PENDING_STEPS)
        self._ended = float("-inf")

    def prompt(self, handle: ComputeObserver | None, tokens: int) -> None:
        """Record that the step being scheduled computes `tokens` tokens of a prompt, if any."""
        if tokens > 0 and handle is not None:
            self._next.prompts += tokens
            if handle not in self._next.namespaces:
                self._next.namespaces.append(handle)

    def begin(self, tokens: int) -> None:
        """Record that the step is scheduled, with `tokens` tokens in all."""
        step, self._next = self._next, Step()
        step.begun, step.tokens = self._now(), tokens
        self._under_way.append(step)

    def end(self) -> None:
        """Record that the output of the oldest step has arrived, and report its time."""
        if not self._under_way:
            return
        step, now = self._under_way.popleft(), self._now()
        seconds, self._ended = now - max(step.begun, self._ended), now
        if step.prompts * 2 > step.tokens and seconds > 0:
            for handle in step.namespaces:
                call_guarded(None, handle.computed, step.tokens, seconds)
