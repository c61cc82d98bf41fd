"""The control socket: answers an operator's commands to a running cache, in a daemon or in an engine.

One thread accepts, and each command has a thread, at most `MAX_CONCURRENT_COMMANDS` at a time. No engine call passes
through this file. A slow, broken or hostile client costs a bounded number of bytes and threads for a bounded time. A
long audit blocks neither other commands nor a bypass of the cache.
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

from kvcache.block.chain import SIGNATURE_BYTES
from kvcache.cache.cache import Cache
from kvcache.cache.erase import clear
from kvcache.cache.flush import Watch
from kvcache.cache.prefetch import Prefetcher
from kvcache.daemon.discovery import make_socket_directory, open_control_socket
from kvcache.daemon.protocol import (
    MAX_REPLY_BYTES,
    MAX_REQUEST_BYTES,
    NOT_FOUND,
    FrameError,
    describe_report,
    receive_message,
    send_message,
)
from kvcache.daemon.server.report import Report, explain, lookup_prompt
from kvcache.errors import ConfigError, KVCacheError, NotFoundError
from kvcache.log import logger
from kvcache.observe.recent_requests import RecentRequest, find_prefix, prefixes

# Commands that change a cache: pin and unpin a prefix, prune unused namespaces, erase.

KNOWN = 64
"""Known prefixes that an error compares with an unknown name."""
PREFETCH_TIMEOUT_S = 30.0
"""Time to promote a prefix before it is pinned; `pin` then pins the blocks that are there."""


def pin(cache: Cache, arguments: dict[Any, Any]) -> dict[str, Any]:
    """Promote a prefix into host memory and pin it there, and in every other tier that has it.

    Without a prefix it lists the pins. Pins may fill a part of host memory only, which limits the promotion.

    Args:
        cache: The cache.
        arguments: `seconds`, and one of `request` (id of a recent request), `prefix` (its name) or `ids` (token ids).
    """
    which, seconds = _find_prompt(cache, arguments), arguments.get("seconds")
    if which is not None:
        if not isinstance(seconds, (int, float)) or isinstance(seconds, bool):
            raise ConfigError(f"seconds = {seconds!r:.40}: expected a duration in seconds")
        entry, blocks = which
        handle = next((handle for handle in cache.handles if handle.id == entry.namespace), None)
        if handle is None:
            raise ConfigError("no engine has bound this prompt's namespace here")
        packed, pins, clock = entry.packed[: blocks * SIGNATURE_BYTES], cache.pins, cache.os_env.clock
        pins.check(float(seconds))
        end = clock.now() + PREFETCH_TIMEOUT_S
        most = pins.pinnable_blocks(handle, blocks)
        Prefetcher(handle, packed, None, lambda: clock.now() >= end, most_blocks=most).prefetch("pin")
        made = pins.pin(handle, packed, float(seconds))
        return {"made": made.describe(), "pins": [item.describe() for item in cache.pins.all()]}
    return {"made": None, "pins": [item.describe() for item in cache.pins.all()]}


def unpin(cache: Cache, arguments: dict[Any, Any]) -> dict[str, Any]:
    """Remove one pin, or every pin. `pin` in `arguments` is its number, or "all"."""
    which = arguments.get("pin")
    pins = cache.pins
    if which == "all":
        ended = [item.id for item in pins.all() if pins.unpin(item.id)]
    elif isinstance(which, int) and not isinstance(which, bool):
        if not pins.unpin(which):
            raise NotFoundError(f"pin {which}: found no pin with this number; `kvcache pin` lists the pins")
        ended = [which]
    else:
        raise ConfigError(f"pin = {which!r:.40}: expected the number of a pin, or all")
    return {"ended": ended, "pins": [item.describe() for item in pins.all()]}


def prune(cache: Cache, arguments: dict[Any, Any]) -> dict[str, Any]:
    """Remove namespaces that no request used for `unused_s`, from the tiers of this cache only.

    Shared tiers are left alone, because other nodes may use the namespace. A namespace without a known use counts from
    the start of this cache. With `dry_run` the command only reports.
    """
    unused_s, dry_run = arguments.get("unused_s"), bool(arguments.get("dry_run"))
    if not isinstance(unused_s, (int, float)) or isinstance(unused_s, bool) or not unused_s > 0:
        raise ConfigError(f"unused_s = {unused_s!r:.40}: expected the least time without use, in seconds")
    tiers = [tier for tier in (cache.host, *cache.lower_tiers) if not tier.shared]
    names = {tier.name for tier in tiers}
    uses, now = cache.usage_log, cache.os_env.clock.wall()
    held = cache.namespace_usage.take(anew=True)
    known = {namespace.id: namespace for namespace in cache.namespaces}
    pruned = []
    for space, of_tier in held.items():
        used = uses.namespaces().get(space)
        last = uses.since if used is None else used.last
        if now - last < unused_s or not names & of_tier.keys():
            continue
        pruned.append(
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
    if pruned and not dry_run:
        cache.namespace_usage.take(anew=True)
    return {"pruned": pruned, "dry_run": dry_run}


def erase(cache: Cache, arguments: dict[Any, Any]) -> dict[str, Any]:
    """Erase from every tier, shared tiers included, and overwrite what was stored.

    `arguments` has one or more of `tenant`, `cache_salt` and `namespace`; records that match all of them are erased.
    The reply follows when the erasure is done, or names the tiers where it is not. With `dry_run` the command only
    counts.
    """
    given = {name: arguments.get(name) for name in ("tenant", "cache_salt", "namespace")}
    for name, value in given.items():
        if value is not None and (not isinstance(value, str) or (name == "namespace" and len(value) < 8)):
            raise ConfigError(f"{name}: expected a text, of a namespace's id 8 digits or more")
    erased = cache.erasure.erase(**given, dry_run=bool(arguments.get("dry_run")))
    return {
        "namespaces": [namespace.hex() for namespace in erased.namespaces],
        "records": erased.records,
        "left": erased.incomplete,
    }


def _find_prompt(cache: Cache, arguments: dict[Any, Any]) -> tuple[RecentRequest, int] | None:
    """Return the prompt that the arguments name, and its number of blocks; None where they name none."""
    request, name, ids = arguments.get("request"), arguments.get("prefix"), arguments.get("ids")
    if isinstance(name, str):
        found = find_prefix(cache.miss_explainer.recent_requests.last(), name)
        if found is None:
            known = [prefix.name for prefix in prefixes(cache.miss_explainer.recent_requests.last(), KNOWN)]
            raise NotFoundError.like(f"prefix {name!r:.40}: no recent prompt has a block with this name", name, known)
        return found
    if isinstance(request, str):
        one = cache.miss_explainer.recent_requests.find(request)
        if one is None:
            known = [item.request for item in cache.miss_explainer.recent_requests.last()]
            raise NotFoundError.like(
                f"request {request!r:.60}: the cache has no recent request with this id", request, known
            )
        return one, one.blocks
    if ids is not None:
        one = lookup_prompt(cache, ids, str(arguments.get("namespace") or ""))
        return one, one.blocks
    return None


CONTROL_PROTOCOL_VERSION = 1
CLIENT_TIMEOUT_S = 2.0
"""To receive a command, and again to send the reply."""
MAX_CONCURRENT_COMMANDS = 4
"""Further clients are disconnected."""
MAX_FLUSH_WAIT_S = 60.0
"""Longest wait of the `flush` command for the tiers."""
MAX_FAULTS = 1000
"""Lines of an audit in a reply."""
WATCHES, LONGEST_NAME = 64, 64
"""Most named callers of `flush` that are remembered, and most characters of a name."""
_ACCEPT_RETRY_S = 0.1

_log = logger("kvcache.control")


def open_control(cache: Cache, version: str) -> ControlServer | None:
    """Open the control socket until the cache is closed or garbage-collected.

    Where that fails, the function logs it and returns None: an operator's convenience must not fail an engine.
    """
    try:
        control = ControlServer(cache, version, *open_control_socket(make_socket_directory()))
    except (OSError, KVCacheError) as error:
        _log.warning("no control socket, so that `kvcache ps` does not list this cache: %s", error)
        return None
    cache.on_close.append(control.close)
    weakref.finalize(cache, control.close)
    return control


class ControlServer:
    """Listens at `path`. It holds the cache weakly, so that the socket does not keep an unused cache alive."""

    def __init__(self, cache: Cache, version: str, listener: socket.socket, path: Path) -> None:
        self.path = path
        self._cache = weakref.ref(cache)
        self._version = version
        self._started = time.time()
        self._pid = os.getpid()
        self._listener = listener
        self._wake, self._woken = socket.socketpair()
        self._free = threading.BoundedSemaphore(MAX_CONCURRENT_COMMANDS)
        self._auditing, self._watching = threading.Lock(), threading.Lock()
        self._watches: dict[str | None, Watch] = {None: cache.tier_manager.watch()}
        """What `flush` has reported to each named caller, and (None) to all unnamed callers together."""
        self._closed = threading.Event()
        _OPEN.add(self)
        threading.Thread(target=self._accept, name="kvcache-control", daemon=True).start()

    def close(self) -> None:
        """Stop listening and remove the socket. Idempotent; does not wait."""
        if self._closed.is_set() or self._pid != os.getpid():
            return
        self._closed.set()
        with suppress(OSError):
            self.path.unlink()
        self._wake.close()  # wakes the accepting thread, which closes the rest

    def close_in_child(self) -> None:
        """In a forked child: close the parent's sockets, so that they end with the parent."""
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
                except OSError as error:  # the client has hung up, or this process has no descriptors left
                    _log.debug("control client closed before the reply: %s", error)
                    self._closed.wait(_ACCEPT_RETRY_S)
                    continue
                self._dispatch(connection)

    def _dispatch(self, connection: socket.socket) -> None:
        """Answer on a new thread; close the connection where too many commands run."""
        if self._free.acquire(blocking=False):
            try:
                threading.Thread(target=self._serve, args=(connection,), name="kvcache-answer", daemon=True).start()
                return
            except RuntimeError:  # this process can start no more threads
                self._free.release()
        connection.close()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                arguments = receive_message(connection, max_bytes=MAX_REQUEST_BYTES, timeout_s=CLIENT_TIMEOUT_S)
                send_message(connection, self._answer(arguments), max_bytes=MAX_REPLY_BYTES, timeout_s=CLIENT_TIMEOUT_S)
            except FrameError as error:
                _log.debug("control request failed: %s", error)
            finally:
                self._free.release()

    def _answer(self, arguments: dict[Any, Any]) -> dict[str, Any]:
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
            "prefixes": lambda cache, arguments: {"prefixes": Report(cache).prefixes(arguments.get("count", 10))},
            "pin": pin,
            "unpin": unpin,
            "prune": prune,
            "erase": erase,
        }
        cache, op = self._cache(), arguments.get("op")
        if cache is None:
            raise FrameError("the cache is closed")
        for name, of_others in cache.control_handlers.items():
            answers[name] = lambda _, arguments, answer=of_others: answer(arguments)  # type: ignore[misc]  # early bind
        if not isinstance(op, str) or op not in answers:
            return {"error": f"op = {op!r:.40}: this version knows {', '.join(answers)}"}
        try:
            return {"ok": answers[op](cache, arguments)}
        except NotFoundError as error:
            return {"error": str(error), "kind": NOT_FOUND}
        except KVCacheError as error:
            return {"error": str(error)}
        except Exception as error:  # noqa: BLE001  boundary to foreign code: the client gets the error
            _log.exception("%s failed", op)
            return {"error": f"{op} failed: {error!r}"}

    def _info(self, cache: Cache, arguments: dict[Any, Any]) -> dict[str, Any]:
        """Describe this process. Of its command line only the program's name: arguments may hold secrets."""
        nvme = cache.settings.nvme
        return {
            "protocol": CONTROL_PROTOCOL_VERSION,
            "version": self._version,
            "pid": self._pid,
            "program": os.path.basename(sys.argv[0] if sys.argv else "") or "python",
            "started": self._started,
            "models": sorted({namespace.model for namespace in cache.namespaces}),
            "nvme_path": ", ".join(map(str, nvme.directories)) if nvme.enabled else None,
            "tiers": cache.stats()["tiers"],
            "bypass": cache.bypass.mode,
        }

    def _check(self, cache: Cache, arguments: dict[Any, Any]) -> dict[str, Any]:
        if not self._auditing.acquire(blocking=False):
            return {"busy": True, "count": 0, "faults": []}
        try:
            faults = cache.check()
        finally:
            self._auditing.release()
        return {"busy": False, "count": len(faults), "faults": faults[:MAX_FAULTS]}

    def _scrub(self, cache: Cache, arguments: dict[Any, Any]) -> dict[str, Any]:
        if not self._auditing.acquire(blocking=False):
            return {"busy": True}
        try:
            return {"busy": False, **asdict(cache.scrub())}
        finally:
            self._auditing.release()

    def _flush(self, cache: Cache, arguments: dict[Any, Any]) -> dict[str, Any]:
        """Wait until stored blocks are in their tiers, at most `seconds`."""
        seconds, fleet = arguments.get("seconds", CLIENT_TIMEOUT_S), arguments.get("fleet")
        if not isinstance(seconds, (int, float)) or isinstance(seconds, bool) or not 0 <= seconds <= MAX_FLUSH_WAIT_S:
            raise ConfigError(f"seconds = {seconds!r:.40}: expected at most {MAX_FLUSH_WAIT_S:g}")
        if fleet is not None and (not isinstance(fleet, str) or len(fleet) > LONGEST_NAME):
            raise ConfigError(f"fleet = {fleet!r:.40}: expected a name of {LONGEST_NAME} characters at most")
        with self._watching:
            watch = self._watches.pop(fleet, None) or cache.tier_manager.watch(anew=fleet is not None)
            self._watches[fleet] = watch  # last used, last in order
            while len(self._watches) > WATCHES:
                del self._watches[next(name for name in self._watches if name is not None)]
        report = cache.tier_manager.flush(seconds, watch=watch, first=cache.on_flush, fleet=fleet is not None)
        return {"flushed": bool(report), **describe_report(report)}


def _events(cache: Cache, arguments: dict[Any, Any]) -> dict[str, Any]:
    count = arguments.get("count")
    if count is not None and (not isinstance(count, int) or count < 0):
        raise ConfigError(f"count = {count!r:.40}: expected the number of recent events")
    return {"events": [asdict(event) for event in cache.events.last(count)]}


def _bypass(cache: Cache, arguments: dict[Any, Any]) -> dict[str, Any]:
    """Report or set the bypass mode. It takes no lock, so that it works while the rest of the cache hangs."""
    bypass, mode = cache.bypass, arguments.get("mode")
    was = bypass.mode
    if mode is not None:
        bypass.set(mode)
        if mode != was:
            _log.warning("bypass changed: from=%s to=%s source=control socket", was, mode)
    return {"mode": bypass.mode, "was": was}


_OPEN: weakref.WeakSet[ControlServer] = weakref.WeakSet()


def _close_all_in_child() -> None:
    for control in list(_OPEN):
        control.close_in_child()


os.register_at_fork(after_in_child=_close_all_in_child)
