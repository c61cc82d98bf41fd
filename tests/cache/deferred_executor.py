"""An executor that runs its calls when it is told to."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class DeferredExecutor:
    def __init__(self) -> None:
        self.calls: list[Callable[[], Any]] = []

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        self.calls.append(call)
        return Future()

    def run(self) -> None:
        while self.calls:
            self.calls.pop(0)()

    def close(self) -> None:
        self.run()
