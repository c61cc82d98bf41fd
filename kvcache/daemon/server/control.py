"""A running cache answers an operator: on one thread that waits, and one for each of a few questions at a time.

Nothing here is on an engine's path. A client that is slow, broken or hostile costs a bounded number of bytes and of
threads, for a bounded time; a long audit keeps nobody else from asking, or from bypassing the cache.
"""

from __future__ import annotations

import os
import selectors
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvcache.cache.cache import Cache
from kvcache.cache.flush import Watch
from kvcache.daemon.control import orders
from kvcache.daemon.control.explain import explain
from kvcache.daemon.control.frame import ANSWER_BYTES, NOT_FOUND, REQUEST_BYTES, FrameError, receive, send
from kvcache.daemon.control.place import listening, prepare
from kvcache.daemon.protocol import describe_report
from kvcache.daemon.report import Report
from kvcache.errors import ConfigError, KVCacheError, NotFoundError
from kvcache.log import logger

PROTOCOL = 1
DEADLINE_S = 2.0
"""For a client to ask, and again for it to take the answer."""
AT_ONCE = 4
"""Questions that are answered at a time; who asks beyond them is turned away."""
LONGEST_S = 60.0
"""That a question may wait for the tiers."""
FAULTS = 1000
"""Lines of an audit that go into an answer."""
WATCHES, LONGEST_NAME = 64, 64
"""Callers of `flush` that name themselves and are remembered, and characters of such a name."""
_PAUSE_S = 0.1

_log = logger("kvcache.control")


def listen(cache: Cache, version: str) -> Control | None:
    """Make the cache reachable until it is closed or forgotten. Where that cannot be, it runs on without, and says
    so: an operator's convenience is no reason to fail an engine."""
    try:
        control = Control(cache, version, *listening(prepare()))
    except (OSError, KVCacheError) as error:
        _log.warning("`kvcache ps` will not find this cache: %s", error)
        return None
    cache.at_close.append(control.close)
    weakref.finalize(cache, control.close)
    return control


class Control:
    """Listens at `path`. Holds the cache weakly: one that nobody else has any more is not kept alive by this."""

    def __init__(self, cache: Cache, version: str, listener: socket.socket, path: Path) -> None:
        self.path = path
        self._cache = weakref.ref(cache)
        self._version = version
        self._started = time.time()
        self._pid = os.getpid()
        self._listener = listener
        self._wake, self._woken = socket.socketpair()
        self._free = threading.BoundedSemaphore(AT_ONCE)
        self._auditing, self._watching = threading.Lock(), threading.Lock()
        self._watches: dict[str | None, Watch] = {None: cache.flow.watch()}
        """What callers of `flush` were told: those that named themselves, and all others together."""
        self._closed = threading.Event()
        _OPEN.add(self)
        threading.Thread(target=self._accept, name="kvcache-control", daemon=True).start()

    def close(self) -> None:
        """Stop listening and remove the socket. Idempotent; waits for nobody."""
        if self._closed.is_set() or self._pid != os.getpid():
            return
        self._closed.set()
        with suppress(OSError):
            self.path.unlink()
        self._wake.close()  # wakes the thread that waits, which closes the rest

    def forget(self) -> None:
        """In a forked child: let go of the parent's socket, so that it ends with the parent."""
        self._closed.set()
        for end in (self._listener, self._wake, self._woken):
            end.close()

    def _accept(self) -> None:
        with self._listener, self._woken, selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while True:
                selector.select()
                if self._closed.is_set():
                    return
                try:
                    connection, _ = self._listener.accept()
                except OSError as error:  # it hung up already; or this process has no descriptors left
                    _log.debug("nobody to answer: %s", error)
                    self._closed.wait(_PAUSE_S)
                    continue
                self._hand_over(connection)

    def _hand_over(self, connection: socket.socket) -> None:
        """To a thread of its own; or hang up, where enough are at it."""
        if self._free.acquire(blocking=False):
            try:
                threading.Thread(target=self._serve, args=(connection,), name="kvcache-answer", daemon=True).start()
                return
            except RuntimeError:  # no more threads in this process
                self._free.release()
        connection.close()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                asked = receive(connection, most_bytes=REQUEST_BYTES, timeout_s=DEADLINE_S)
                send(connection, self._answer(asked), most_bytes=ANSWER_BYTES, timeout_s=DEADLINE_S)
            except FrameError as error:
                _log.debug("no question, or nobody to take the answer: %s", error)
            finally:
                self._free.release()

    def _answer(self, asked: dict[Any, Any]) -> dict[str, Any]:
        answers: dict[Any, Callable[[Cache, dict[Any, Any]], dict[str, Any]]] = {
            "info": self._info,
            "stats": lambda cache, _: cache.stats(),
            "events": _events,
            "explain": explain,
            "check": self._check,
            "scrub": self._scrub,
            "bypass": _bypass,
            "flush": self._flush,
            "curve": lambda cache, _: cache.curve(),
            "namespaces": lambda cache, _: {"namespaces": Report(cache).namespaces()},
            "tenants": lambda cache, _: {"tenants": Report(cache).tenants()},
            "agents": lambda cache, _: {"agents": Report(cache).agents()},
            "prefixes": lambda cache, asked: {"prefixes": Report(cache).prefixes(asked.get("count", 10))},
            "pin": orders.pin,
            "unpin": orders.unpin,
            "prune": orders.prune,
            "erase": orders.erase,
        }
        cache, op = self._cache(), asked.get("op")
        if cache is None:
            raise FrameError("the cache is gone")
        for name, of_others in cache.answers.items():
            answers[name] = lambda _, asked, answer=of_others: answer(asked)  # type: ignore[misc]  # bound to this turn
        if not isinstance(op, str) or op not in answers:
            return {"error": f"op = {op!r:.40}: this version knows {', '.join(answers)}"}
        try:
            return {"ok": answers[op](cache, asked)}
        except NotFoundError as error:
            return {"error": str(error), "kind": NOT_FOUND}
        except KVCacheError as error:
            return {"error": str(error)}
        except Exception as error:  # noqa: BLE001  whoever asked is told; the engine is not
            _log.exception("%s failed", op)
            return {"error": f"{op} failed: {error!r}"}

    def _info(self, cache: Cache, asked: dict[Any, Any]) -> dict[str, Any]:
        """Who this is. Of the command line only the program's name: arguments may hold secrets."""
        nvme = cache.settings.nvme
        return {
            "protocol": PROTOCOL,
            "version": self._version,
            "pid": self._pid,
            "program": os.path.basename(sys.argv[0] if sys.argv else "") or "python",
            "started": self._started,
            "models": sorted({namespace.model for namespace in cache.namespaces}),
            "nvme_path": ", ".join(map(str, nvme.directories)) if nvme.enabled else None,
            "tiers": cache.stats()["tiers"],
            "bypass": cache.flow.bypass.mode,
        }

    def _check(self, cache: Cache, asked: dict[Any, Any]) -> dict[str, Any]:
        if not self._auditing.acquire(blocking=False):
            return {"busy": True, "count": 0, "faults": []}
        try:
            faults = cache.check()
        finally:
            self._auditing.release()
        return {"busy": False, "count": len(faults), "faults": faults[:FAULTS]}

    def _scrub(self, cache: Cache, asked: dict[Any, Any]) -> dict[str, Any]:
        if not self._auditing.acquire(blocking=False):
            return {"busy": True}
        try:
            return {"busy": False, **asdict(cache.scrub())}
        finally:
            self._auditing.release()

    def _flush(self, cache: Cache, asked: dict[Any, Any]) -> dict[str, Any]:
        """Wait until what was stored is where it should be, for so long at most."""
        seconds, fleet = asked.get("seconds", DEADLINE_S), asked.get("fleet")
        if not isinstance(seconds, (int, float)) or isinstance(seconds, bool) or not 0 <= seconds <= LONGEST_S:
            raise ConfigError(f"seconds = {seconds!r:.40}: expected at most {LONGEST_S:g}")
        if fleet is not None and (not isinstance(fleet, str) or len(fleet) > LONGEST_NAME):
            raise ConfigError(f"fleet = {fleet!r:.40}: expected a name of {LONGEST_NAME} characters at most")
        with self._watching:
            watch = self._watches.pop(fleet, None) or cache.flow.watch(anew=fleet is not None)
            self._watches[fleet] = watch  # the one used last is the last
            while len(self._watches) > WATCHES:
                del self._watches[next(name for name in self._watches if name is not None)]
        report = cache.flow.flush(seconds, watch=watch, first=cache.at_flush, fleet=fleet is not None)
        return {"flushed": bool(report), **describe_report(report)}


def _events(cache: Cache, asked: dict[Any, Any]) -> dict[str, Any]:
    count = asked.get("count")
    if count is not None and (not isinstance(count, int) or count < 0):
        raise ConfigError(f"count = {count!r:.40}: expected how many of the last events")
    return {"events": [asdict(event) for event in cache.events.last(count)]}


def _bypass(cache: Cache, asked: dict[Any, Any]) -> dict[str, Any]:
    """Takes no lock, so that it works however the rest of the cache hangs."""
    bypass, mode = cache.flow.bypass, asked.get("mode")
    was = bypass.mode
    if mode is not None:
        bypass.set(mode)
        if mode != was:
            _log.warning("bypass was %s and is %s, by the control socket", was, mode)
    return {"mode": bypass.mode, "was": was}


_OPEN: weakref.WeakSet[Control] = weakref.WeakSet()


def _forget_all() -> None:
    for control in list(_OPEN):
        control.forget()


os.register_at_fork(after_in_child=_forget_all)
