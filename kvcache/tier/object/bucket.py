"""Calls to an object store, each within its deadline; and whether to try it at all.

Retries with jitter are obstore's, inside the time that a call has. A call that is out of time is dropped together with
its request, so a store that hangs holds no thread. What fails opens the breaker: from then on nothing waits for the
store until a probe finds it well."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast
from urllib.parse import SplitResult, urlsplit

from kvcache.errors import ConfigError
from kvcache.log import logger
from kvcache.os_env import Clock
from kvcache.tier.breaker import CircuitBreaker, Counters

T = TypeVar("T")
_LONG_CALL_FACTOR = 6
"""Reading many tables, or deleting many objects, may take so many times what other calls may."""
COALESCE_GAP_BYTES = 1 << 20
"""Between two pieces of an object: reading them costs less than another request."""
PAGE_OBJECTS = 1000
"""Objects that a store names at a time."""
_MIN_FAIR_TIMEOUT_S = 0.02  # a call given less than this says nothing of the store by being late
_LOG_INTERVAL_S = 5.0
_CLOSE_S = 5.0

log = logger("kvcache.tier.object")


class RefusedError(OSError):
    """The store did not do it; `reason` in a word."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class ObjectExistsError(Exception):
    """Something of this name is there already."""


class ListedObject:
    """An object as a listing tells of it; `mark` changes with its contents."""

    __slots__ = ("age_s", "etag", "path", "size")

    def __init__(self, meta: Mapping[str, Any], now: float) -> None:
        self.path = str(meta["path"])
        self.size = int(meta["size"])
        self.etag = str(meta["e_tag"] or meta["last_modified"])
        self.age_s = now - float(meta["last_modified"].timestamp())


class Bucket:
    def __init__(
        self, store: Any, where: str, *, timeout_s: float, max_concurrent_calls: int, clock: Clock, counters: Counters
    ) -> None:
        self.where, self.timeout_s, self._store = where, timeout_s, store
        self._clock, self._counters, self._most = clock, counters, max_concurrent_calls
        self.breaker = CircuitBreaker(clock, pause_s=0.25, max_pause_s=10.0)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvcache-object", daemon=True)
        self._thread.start()
        self._logged_s, self._unlogged_faults = float("-inf"), 0
        self._closed = False

    # calls

    async def _fetch(self, path: str, first: int, end: int | None) -> memoryview:
        """Bytes `first` to `end` of an object, or as many as there are.

        obstore raises `GenericError` for a range that begins behind the end of the object, and for most other faults.
        The object's size decides which of them it was.
        """
        from obstore import get_async
        from obstore.exceptions import GenericError

        options = {} if end is None else {"range": (first, end)}
        try:
            got = await get_async(self._store, path, options=cast(Any, options))
            return memoryview(await got.bytes_async())
        except GenericError:
            if end is None or await self._size(path) > first:
                raise
            return memoryview(b"")

    async def _size(self, path: str) -> int:
        from obstore import head_async

        return (await head_async(self._store, path))["size"]

    def get(self, path: str, deadline: float | None, *, end: int | None = None) -> bytes | None:
        """The first `end` bytes of an object, or all there are; None where there is none."""
        received = self._run(lambda: self._fetch(path, 0, end), deadline)
        return None if received is None else bytes(received)

    def heads(self, paths: Sequence[str], end: int, deadline: float | None) -> list[bytes | None]:
        """The first `end` bytes of each of these, a bounded number at a time."""

        async def one(path: str, turn: asyncio.Semaphore) -> bytes | None:
            async with turn:
                try:
                    return bytes(await self._fetch(path, 0, end))
                except FileNotFoundError:
                    return None

        async def call() -> list[bytes | None]:
            turn = asyncio.Semaphore(self._most)
            return await asyncio.gather(*(one(path, turn) for path in paths))

        return self._run(call, deadline, times=_LONG_CALL_FACTOR) or []

    def ranges(self, path: str, parts: Sequence[tuple[int, int]], deadline: float | None) -> list[memoryview] | None:
        """Pieces of an object, (first, end) each, in ascending order; near ones come together. Short where the object
        ends before; None where it is gone."""
        spans: list[tuple[int, int]] = []
        for first, end in parts:
            if spans and first - spans[-1][1] <= COALESCE_GAP_BYTES:
                spans[-1] = spans[-1][0], end
            else:
                spans.append((first, end))

        async def call() -> list[memoryview]:
            return await asyncio.gather(*(self._fetch(path, first, end) for first, end in spans))

        received = self._run(call, deadline)
        if received is None:
            return None
        found, at = [], 0
        for first, end in parts:
            while first >= spans[at][1]:
                at += 1
            found.append(received[at][first - spans[at][0] : end - spans[at][0]])
        return found

    def put(
        self,
        path: str,
        pieces: Sequence[memoryview],
        deadline: float | None,
        *,
        create: bool,
        part_bytes: int | None = None,
    ) -> str:
        """Write an object; its mark. `create`: TakenError where there is one. `part_bytes`: in parts of this size, some
        at a time; it appears when the last is there."""
        from obstore import put_async

        async def call() -> str:
            mode: Any = "create" if create else "overwrite"
            if part_bytes is not None:
                done = await put_async(
                    self._store, path, iter(pieces), use_multipart=True, chunk_size=part_bytes, max_concurrency=4
                )
            else:
                done = await put_async(self._store, path, iter(pieces), mode=mode, use_multipart=False)
            return str(done["e_tag"] or "")

        etag = self._run(call, deadline, takes=True)
        if etag is None:  # the bucket is not there
            self._failed("missing", "there is no such bucket")
            raise RefusedError("missing")
        return etag

    def move(self, path: str, to: str, deadline: float | None) -> None:
        """TakenError where there is one of that name already."""
        from obstore import rename_async

        async def call() -> bool:
            await rename_async(self._store, path, to, overwrite=False)
            return True

        if self._run(call, deadline, takes=True) is None:
            raise RefusedError("missing")

    def pages(self, prefix: str) -> Iterator[list[ListedObject]]:
        """What there is, some at a time; each page has the time of a call."""
        from obstore import list as listing
        from obstore.exceptions import GenericError

        stream = listing(self._store, prefix, chunk_size=PAGE_OBJECTS)

        async def call() -> list[ListedObject]:
            now = self._clock.wall()
            try:
                page = await stream.__anext__()
            except StopAsyncIteration:
                return []
            except GenericError:
                # obstore gives a refused listing no type of its own. It does for one object: that type says "denied".
                with suppress(FileNotFoundError, GenericError):
                    await self._size(prefix)
                raise
            return [ListedObject(cast(Mapping[str, Any], meta), now) for meta in page]

        while page := self._run(call, None):
            yield page

    def delete(self, paths: Sequence[str], deadline: float | None) -> None:
        """What is gone already is no fault."""
        from obstore import delete_async

        async def one(path: str, turn: asyncio.Semaphore) -> None:
            async with turn:
                with suppress(FileNotFoundError):
                    await delete_async(self._store, path)

        async def call(some: Sequence[str]) -> None:
            turn = asyncio.Semaphore(self._most)
            await asyncio.gather(*(one(path, turn) for path in some))

        for first in range(0, len(paths), PAGE_OBJECTS):
            some = paths[first : first + PAGE_OBJECTS]
            self._run(lambda some=some: call(some), deadline, times=_LONG_CALL_FACTOR)  # type: ignore[misc]  # bound by a default

    # how they end

    def _run(
        self, make: Callable[[], Awaitable[T]], deadline: float | None, *, times: int = 1, takes: bool = False
    ) -> T | None:
        """What a call comes to; None where the object is not there. OSError where the store did not do it: TimeoutError
        for time, RefusedError with a reason. `takes`: the call takes a name, and raises TakenError where the store says
        that there is an object of that name."""
        if not self.breaker.allows():
            raise RefusedError("breaker")
        began = self._clock.now()
        most = times * self.timeout_s
        remaining_s = most if deadline is None else min(most, deadline - began)
        if self._closed:
            raise RefusedError("closed")
        future = asyncio.run_coroutine_threadsafe(_bounded(make, max(0.0, remaining_s)), self._loop)
        try:
            result = future.result(max(0.0, remaining_s) + _CLOSE_S)  # else the loop ended before it began
        except FileNotFoundError:
            self.breaker.record_success()
            return None
        except concurrent.futures.CancelledError:
            raise RefusedError("closed") from None
        except (TimeoutError, asyncio.TimeoutError, concurrent.futures.TimeoutError):
            if remaining_s >= _MIN_FAIR_TIMEOUT_S:
                self._failed("timeout", "it did not answer in time")
            raise TimeoutError("timeout") from None
        except Exception as error:  # noqa: BLE001  whatever obstore makes of what the store did
            reason = _reason(error)
            if reason == "taken" and takes:
                self.breaker.record_success()
                raise ObjectExistsError from None
            self._failed(reason, (str(error).splitlines() or [type(error).__name__])[0][:200])
            raise RefusedError(reason) from None
        self.breaker.record_success()
        return result

    def _failed(self, reason: str, text: str) -> None:
        self._counters.add("faults")
        self._counters.add(f"faults_{reason}")
        if self.breaker.record_failure():
            self._counters.add("breaker_opened")
        self._unlogged_faults += 1
        now = self._clock.now()
        if now - self._logged_s >= _LOG_INTERVAL_S:
            log.warning(
                "object %s: %s: %s; %d faults since the last line", self.where, reason, text, self._unlogged_faults
            )
            self._logged_s, self._unlogged_faults = now, 0

    def close(self) -> None:
        """End what is under way."""

        async def end() -> None:
            others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            self._loop.stop()

        if not self._closed:
            self._closed = True
            asyncio.run_coroutine_threadsafe(end(), self._loop)
            self._thread.join()
            self._loop.close()


def _reason(error: Exception) -> str:
    """A word for what a call raised, by its type alone: the text holds paths, ports and times."""
    from obstore import exceptions as raised

    if isinstance(error, (raised.AlreadyExistsError, raised.PreconditionError)):
        return "taken"
    if isinstance(error, (raised.PermissionDeniedError, raised.UnauthenticatedError)):
        return "denied"
    if isinstance(error, (raised.NotSupportedError, NotImplementedError)):
        return "unsupported"
    return "failed"


async def _bounded(make: Callable[[], Awaitable[T]], seconds: float) -> T:
    return await asyncio.wait_for(cast(Coroutine[Any, Any, T], make()), seconds)


# The way from settings to a store: Amazon's, Google's, Microsoft's, a directory. Asks nothing of it.

RETRIES = 3
_EXPECTED_URL = "expected s3://BUCKET, gs://BUCKET, az://ACCOUNT/CONTAINER or file:///DIRECTORY"


def _read_credentials(file: str) -> dict[str, str]:
    """Of a file with `name = value` a line, which may hold secrets; nothing of it stands in an error."""
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"object.credentials_file = {file!r}: {type(error).__name__}; expected a file") from None
    found = {}
    for line in (line.strip() for line in lines):
        name, equals, value = line.partition("=")
        if line and not line.startswith("#"):
            if not equals:
                raise ConfigError(f"object.credentials_file = {file!r}: expected `name = value` a line")
            found[name.strip().lower()] = value.strip().strip("\"'")
    return found


def open_store(url: str, *, endpoint: str, region: str, credentials_file: str, timeout_s: float) -> Any:
    """The store of a URL, of which nothing is asked yet. ConfigError where it is none."""
    try:
        from obstore.store import from_url
    except ModuleNotFoundError:
        raise ConfigError("object.enabled: needs obstore; pip install 'kvcache-tiers[object]'") from None
    parts = urlsplit(url)
    config: dict[str, Any] = _read_credentials(credentials_file) if credentials_file else {}
    if "@" in parts.netloc or parts.query:
        raise ConfigError("object.url: holds credentials; give them in object.credentials_file or the environment")
    if not parts.scheme:
        raise ConfigError(f"object.url = {url!r}: {_EXPECTED_URL}")
    try:
        if parts.scheme == "file":
            return from_url(url, mkdir=True, automatic_cleanup=True)
        if parts.scheme == "memory":
            return from_url(url)
        named = _container(parts) if parts.scheme == "az" else {}
        if parts.scheme == "s3":  # which has no other way to move an object where nothing is
            config.setdefault("copy_if_not_exists", "multipart")
        config |= named
        config |= {"base_url" if parts.scheme == "gs" else "endpoint": endpoint} if endpoint else {}
        config |= {"region": region} if region else {}
        options = {"timeout": f"{timeout_s}s", "connect_timeout": f"{timeout_s}s"}
        if endpoint.startswith("http://"):
            options["allow_http"] = True  # type: ignore[assignment]  # a table of both
        retries = {
            "max_retries": RETRIES,
            "retry_timeout": timedelta(seconds=timeout_s),
            "backoff": {"init_backoff": timedelta(milliseconds=50), "max_backoff": timedelta(seconds=1), "base": 2},
        }
        make = cast(Callable[..., Any], from_url)
        where = f"az://{named['container_name']}" if named else url
        return make(where, config=config, client_options=options, retry_config=retries)
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001  whatever obstore makes of a URL or an option
        text = type(error).__name__ if credentials_file else str(error).splitlines()[0]
        raise ConfigError(f"object.url = {url!r}: {text}; {_EXPECTED_URL}") from None


def _container(parts: SplitResult) -> dict[str, str]:
    """Of `az://ACCOUNT/CONTAINER`: obstore's own `az://` names a container and no account."""
    container = parts.path.strip("/")
    if not parts.netloc or not container or "/" in container:
        raise ConfigError(f"object.url = {parts.geturl()!r}: expected az://ACCOUNT/CONTAINER")
    return {"account_name": parts.netloc, "container_name": container}
