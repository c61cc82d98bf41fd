"""A running cache answers an operator: on one thread that waits, and one for each of a few questions at a time.

Nothing here is on an engine's path. A client that is slow, broken or hostile costs a bounded number of bytes and of
threads, for a bounded time; a long audit keeps nobody else from asking, or from bypassing the cache."""

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

from kvcache.block.chain import SIGNATURE_BYTES
from kvcache.cache.cache import Cache
from kvcache.cache.erase import clear
from kvcache.cache.flush import Watch
from kvcache.cache.prefetch import Near
from kvcache.daemon.discovery import listening, prepare
from kvcache.daemon.protocol import ANSWER_BYTES, NOT_FOUND, REQUEST_BYTES, FrameError, describe_report, receive, send
from kvcache.daemon.server.report import Report, explain, prompt
from kvcache.errors import ConfigError, KVCacheError, NotFoundError
from kvcache.log import logger
from kvcache.observe.recent_requests import Asked, named, prefixes

# What an operator orders a running cache to do: keep a prefix, let it go, remove what nobody uses.

KNOWN = 64
"""Prefixes that an unknown name is compared with."""
NEAR_S = 30.0
"""For a prefix to come near before it is pinned as far as it is."""


def pin(cache: Cache, asked: dict[Any, Any]) -> dict[str, Any]:
    """`seconds`, and which prefix: `request`, the id of one that is remembered, `prefix`, its name, or `ids`. It is
    brought into host memory, as far as pins may fill that, and kept there and wherever else it is. Without any of these
    it tells what is pinned."""
    which, seconds = _which(cache, asked), asked.get("seconds")
    if which is not None:
        if not isinstance(seconds, (int, float)) or isinstance(seconds, bool):
            raise ConfigError(f"seconds = {seconds!r:.40}: expected for how long")
        whose, blocks = which
        bound = next((bound for bound in cache.bounds if bound.id == whose.namespace), None)
        if bound is None:
            raise ConfigError("no engine has bound this prompt's namespace here")
        packed, flow = whose.packed[: blocks * SIGNATURE_BYTES], cache.flow
        flow.pins.check(float(seconds))
        end = flow.port.clock.now() + NEAR_S
        most = flow.pins.fitting(bound, blocks)
        near = Near(flow, bound, packed, None, lambda: flow.port.clock.now() >= end, most_blocks=most)
        near.bring("pin")
        made = flow.pins.pin(bound, packed, float(seconds))
        return {"made": made.told(), "pins": [each.told() for each in cache.flow.pins.all()]}
    return {"made": None, "pins": [each.told() for each in cache.flow.pins.all()]}


def unpin(cache: Cache, asked: dict[Any, Any]) -> dict[str, Any]:
    """`pin`: the number of one, or "all"."""
    which = asked.get("pin")
    pins = cache.flow.pins
    if which == "all":
        ended = [each.id for each in pins.all() if pins.unpin(each.id)]
    elif isinstance(which, int) and not isinstance(which, bool):
        if not pins.unpin(which):
            raise NotFoundError(f"pin {which}: there is none of this number; `kvcache pin` lists those there are")
        ended = [which]
    else:
        raise ConfigError(f"pin = {which!r:.40}: expected the number of a pin, or all")
    return {"ended": ended, "pins": [each.told() for each in pins.all()]}


def prune(cache: Cache, asked: dict[Any, Any]) -> dict[str, Any]:
    """Remove namespaces that nobody used for `unused_s` from the tiers of this cache alone: what others share, others
    may use. One of which no use is known counts from when this cache began. `dry_run`: only tell which."""
    unused_s, dry_run = asked.get("unused_s"), bool(asked.get("dry_run"))
    if not isinstance(unused_s, (int, float)) or isinstance(unused_s, bool) or not unused_s > 0:
        raise ConfigError(f"unused_s = {unused_s!r:.40}: expected for how long nobody used it, in seconds")
    tiers = [tier for tier in (cache.flow.host, *cache.below) if not tier.shared]
    names = {tier.name for tier in tiers}
    uses, now = cache.flow.uses, cache.flow.port.clock.wall()
    held = cache.census.take(anew=True)
    known = {namespace.id: namespace for namespace in cache.namespaces}
    rows = []
    for space, of_tier in held.items():
        used = uses.namespaces().get(space)
        last = uses.since if used is None else used.last
        if now - last < unused_s or not names & of_tier.keys():
            continue
        rows.append(
            {
                "id": space.hex(),
                "model": known[space].model if space in known else None,
                "last": None if used is None else used.last,
                "bytes": sum(holding.bytes for tier, holding in of_tier.items() if tier in names),
                "records": sum(holding.records for tier, holding in of_tier.items() if tier in names)
                if dry_run
                else clear(space, cache.index, tiers),
            }
        )
    if rows and not dry_run:
        cache.census.take(anew=True)
    return {"pruned": rows, "dry_run": dry_run}


def erase(cache: Cache, asked: dict[Any, Any]) -> dict[str, Any]:
    """Remove what is of a `tenant`, a `cache_salt` or a `namespace` (all that is given must fit) from every tier,
    shared ones too, and overwrite what it left. Answers when it is done, or says in which tier it is not. `dry_run`:
    only count."""
    given = {name: asked.get(name) for name in ("tenant", "cache_salt", "namespace")}
    for name, value in given.items():
        if value is not None and (not isinstance(value, str) or (name == "namespace" and len(value) < 8)):
            raise ConfigError(f"{name}: expected a text, of a namespace's id 8 digits or more")
    erased = cache.erasure.erase(**given, dry_run=bool(asked.get("dry_run")))
    return {
        "namespaces": [namespace.hex() for namespace in erased.namespaces],
        "records": erased.records,
        "left": erased.left,
    }


def _which(cache: Cache, asked: dict[Any, Any]) -> tuple[Asked, int] | None:
    """The prompt that is meant, and up to which block."""
    request, name, ids = asked.get("request"), asked.get("prefix"), asked.get("ids")
    if isinstance(name, str):
        found = named(cache.why.ring.last(), name)
        if found is None:
            known = [prefix.name for prefix in prefixes(cache.why.ring.last(), KNOWN)]
            raise NotFoundError.like(f"prefix {name!r:.40}: no prompt of late has a block of this name", name, known)
        return found
    if isinstance(request, str):
        one = cache.why.ring.find(request)
        if one is None:
            known = [each.request for each in cache.why.ring.last()]
            raise NotFoundError.like(f"request {request!r:.60}: no request of that id is remembered", request, known)
        return one, one.blocks
    if ids is not None:
        one = prompt(cache, ids, str(asked.get("namespace") or ""))
        return one, one.blocks
    return None


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
            "pin": pin,
            "unpin": unpin,
            "prune": prune,
            "erase": erase,
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
