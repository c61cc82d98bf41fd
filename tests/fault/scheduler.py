"""A scheduler that decides by a seed who runs next: many tasks, one thread, the same order for the same seed.

Tasks are greenlets. One runs until it reaches the disk or a lock; then any that can may go on. Through `port` a tier
gets an executor, a clock and conditions that are made of this.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from types import TracebackType
from typing import Any

from greenlet import getcurrent, greenlet

from kvcache.os_env import Disk, OsEnv

Ready = Callable[[], bool]


class Scheduler:
    """`pauses`: how often a task that could go on lets others run instead."""

    def __init__(self, seed: int, *, pauses: float = 0.5) -> None:
        self.chance = random.Random(seed)
        self.pauses = pauses
        self.seconds = 0.0
        self._hub = getcurrent()
        self._tasks: dict[greenlet, Ready | None] = {}  # what each waits for

    def os_env(self, disk: Disk) -> OsEnv:
        return OsEnv(
            disk=disk,
            clock=Clock(self),
            executor=lambda threads, name: Tasks(self, threads),
            condition=lambda: Condition(self),  # type: ignore[arg-type,return-value]
        )

    @property
    def busy(self) -> bool:
        return bool(self._tasks)

    def spawn(self, call: Callable[[], Any]) -> None:
        self._tasks[greenlet(call, parent=self._hub)] = None

    def pause(self) -> None:
        """Called where a thread could be interrupted."""
        if getcurrent() is not self._hub and self.chance.random() < self.pauses:
            self._hub.switch()

    def wait(self, ready: Ready) -> None:
        """Let others run until this is true."""
        me = getcurrent()
        while not ready():
            if me is self._hub:
                self.step()
            else:
                self._tasks[me] = ready
                self._hub.switch()
                self._tasks[me] = None

    def step(self) -> None:
        """Let one task run up to its next pause. What it raises is raised here."""
        self.seconds += self.chance.random() * 0.01
        able = [task for task, ready in self._tasks.items() if ready is None or ready()]
        if not able:
            assert self._tasks, "everything waits, and no task is there to wait for"
            self.seconds += 1.0  # somebody waits for time to pass, or for ever
            assert self.seconds < 1e6, "every task waits for another"
            return
        task = self.chance.choice(able)
        try:
            task.switch()
        finally:
            if task.dead:
                self._tasks.pop(task, None)

    def run(self) -> None:
        """Until there is nothing left to do."""
        while self._tasks:
            self.step()

    def kill(self) -> None:
        """End every task where it stands; the disk is dead by then, so nothing that they clean up reaches it."""
        while self._tasks:
            task, _ = self._tasks.popitem()
            with suppress(BaseException):  # a dead process reports nothing
                task.throw(Killed)


class Killed(BaseException):
    pass


class Clock:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def now(self) -> float:
        return self._scheduler.seconds

    def wall(self) -> float:
        return 1e9 + self._scheduler.seconds


class Tasks:
    """An executor."""

    def __init__(self, scheduler: Scheduler, threads: int) -> None:
        self._scheduler, self._threads = scheduler, threads
        self._waiting: list[Callable[[], None]] = []
        self._running = 0

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(call())
            except Exception as error:  # noqa: BLE001  as a pool does: the error belongs to the future
                future.set_exception(error)
            self._running -= 1
            self._start()

        self._waiting.append(run)
        self._start()
        return future

    def _start(self) -> None:
        while self._waiting and self._running < self._threads:
            self._running += 1
            self._scheduler.spawn(self._waiting.pop(0))

    def close(self) -> None:
        self._scheduler.wait(lambda: not self._waiting and not self._running)


class Condition:
    """A `threading.Condition` over a lock that its holder may take again."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._owner: greenlet | None = None
        self._depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        me = getcurrent()
        if self._owner is not me:
            self._scheduler.pause()
            if self._owner is not None and not blocking:
                return False
            if self._owner is not None:
                self._scheduler.wait(lambda: self._owner is None)
            self._owner = me
        self._depth += 1
        return True

    def release(self) -> None:
        assert self._owner is getcurrent()
        self._depth -= 1
        if not self._depth:
            self._owner = None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def wait_for(self, predicate: Ready, timeout: float | None = None) -> bool:
        until = None if timeout is None else self._scheduler.seconds + timeout
        depth, self._depth, self._owner = self._depth, 0, None
        self._scheduler.wait(lambda: predicate() or (until is not None and self._scheduler.seconds >= until))
        self._scheduler.wait(lambda: self._owner is None)
        self._depth, self._owner = depth, getcurrent()
        return predicate()

    def notify_all(self) -> None:
        pass

    notify = notify_all
