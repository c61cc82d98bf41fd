"""Runs an engine on its own thread: requests from any thread, answers as futures."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import Full, SimpleQueue

from kvcache.engine.engine import Engine
from kvcache.engine.sampling import SamplingParams
from kvcache.engine.sequence import RequestOutput, SequenceState
from kvcache.engine.sequence import Sequence as Running
from kvcache.errors import ClosedError, KVCacheError

_log = logging.getLogger("kvcache.engine")


class EngineLoop:
    """Runs an engine's steps on a thread; call the engine from nowhere else until the loop is closed.

    At most `backlog` requests are unfinished at a time. The loop owns the thread, not the engine.

    Thread safety: all methods may be called from any thread.
    """

    def __init__(self, engine: Engine, *, backlog: int = 1024) -> None:
        self._engine = engine
        self._backlog = threading.BoundedSemaphore(backlog)
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._running: dict[Running, Future[RequestOutput]] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kvcache-engine", daemon=True)
        self._thread.start()

    def submit(self, prompt_ids: Sequence[int], params: SamplingParams) -> Future[RequestOutput]:
        """Return the future of a request: its result, or the KVCacheError with which the engine refuses it.

        Cancelling the future aborts the request.

        Raises:
            queue.Full: too many requests are unfinished.
            ClosedError: the loop is closed.
        """
        if not self._backlog.acquire(blocking=False):
            raise Full("too many unfinished requests: try again later")
        future: Future[RequestOutput] = Future()
        future.add_done_callback(lambda done: self._backlog.release() if done.cancelled() else None)
        with self._lock:  # so that nothing is queued after the thread's last read
            if self._closed:
                future.cancel()
                raise ClosedError("this engine is stopped; start another one")
            self._inbox.put(lambda: self._add(prompt_ids, params, future))
        return future

    def _run(self) -> None:
        while not self._closed:
            try:
                while not (self._engine.unfinished and self._inbox.empty()) and not self._closed:
                    self._inbox.get()()
                self._step()
            except Exception as error:  # noqa: BLE001  worker thread that must survive; its callers get the error
                _log.exception("engine step failed; its requests end")
                self._end(error)
        while not self._inbox.empty():
            self._inbox.get()()
        self._end(ClosedError("the engine was stopped before this request had finished"))

    def _add(self, prompt_ids: Sequence[int], params: SamplingParams, future: Future[RequestOutput]) -> None:
        if future.cancelled():
            return
        try:
            sequence = self._engine.add(prompt_ids, params)
        except KVCacheError as error:
            self._settle(future, error)
            return
        self._running[sequence] = future
        future.add_done_callback(lambda done: self._inbox.put(lambda: self._abort(sequence)))

    def _abort(self, sequence: Running) -> None:
        self._running.pop(sequence, None)
        self._engine.abort(sequence)  # no effect on a finished request, the usual case

    def _step(self) -> None:
        if self._engine.unfinished:
            for sequence in self._engine.step():
                if sequence.state is SequenceState.FINISHED and sequence in self._running:
                    self._settle(self._running.pop(sequence), sequence.result())

    def _end(self, error: Exception) -> None:
        for sequence, future in list(self._running.items()):
            self._engine.abort(sequence)
            self._settle(future, error)
        self._running.clear()

    def _settle(self, future: Future[RequestOutput], outcome: RequestOutput | Exception) -> None:
        if not future.set_running_or_notify_cancel():
            return  # cancelled meanwhile
        self._backlog.release()  # before the result is visible: its reader may submit the next request at once
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    def close(self) -> None:
        """End the thread; unfinished requests end with ClosedError. Idempotent."""
        with self._lock:
            self._closed = True
        self._inbox.put(lambda: None)  # wake the thread
        self._thread.join()

    def check(self) -> list[str]:
        """Audit the engine, once the loop is closed."""
        faults = [f"{s.id} is still listed" for s in self._running]
        return [*faults, *self._engine.check()]
