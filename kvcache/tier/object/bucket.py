"""Calls to an object store, each within its deadline, and the store's breaker.

obstore retries with jitter inside the time of a call. A call past its deadline is dropped together with its request, so
a store that hangs holds no thread. Failures open the breaker; calls then fail at once until a probe succeeds.
"""

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
"""Calls that read many tables or delete many objects may take this many times `timeout_s`."""
COALESCE_GAP_BYTES = 1 << 20
"""Ranges with a smaller gap share a request: reading the gap costs less than another request."""
PAGE_OBJECTS = 1000
"""Objects in a page of a listing, and in a group of deletions."""
_MIN_FAIR_TIMEOUT_S = 0.02  # a call with less time than this is no evidence against the store when it times out
_LOG_INTERVAL_S = 5.0
_CLOSE_S = 5.0

log = logger("kvcache.tier.object")


class RefusedError(OSError):
    """The store refused or failed a call; `reason` is one word."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class ObjectExistsError(Exception):
    """An object of this name exists already."""


class ListedObject:
    """An object in a listing; `etag` changes with its contents."""

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
        """Return bytes `first` to `end` of an object, fewer where the object is shorter.

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
        """Return the first `end` bytes of an object, or all of it; None where there is no object."""
        received = self._run(lambda: self._fetch(path, 0, end), deadline)
        return None if received is None else bytes(received)

    def heads(self, paths: Sequence[str], end: int, deadline: float | None) -> list[bytes | None]:
        """Return the first `end` bytes of each object; `max_concurrent_calls` run at a time."""

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
        """Return ranges of an object; None where the object does not exist.

        Args:
            parts: (first, end) of each range, in ascending order. Near ranges share a request.

        Returns:
            The bytes of each range; short where the object ends earlier.
        """
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
        """Write an object and return its etag.

        Args:
            create: Raise ObjectExistsError where an object of this name exists.
            part_bytes: Upload in parts of this size, 4 at a time. The object appears after its last part.
        """
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
        if etag is None:  # the bucket does not exist
            self._failed("missing", "the bucket does not exist")
            raise RefusedError("missing")
        return etag

    def move(self, path: str, to: str, deadline: float | None) -> None:
        """Rename an object. Raises ObjectExistsError where the new name exists."""
        from obstore import rename_async

        async def call() -> bool:
            await rename_async(self._store, path, to, overwrite=False)
            return True

        if self._run(call, deadline, takes=True) is None:
            raise RefusedError("missing")

    def pages(self, prefix: str) -> Iterator[list[ListedObject]]:
        """Yield the pages of a listing; each page has `timeout_s`."""
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
                # obstore has no error type for a refused listing, but one for a refused `head`, which `_size` raises
                with suppress(FileNotFoundError, GenericError):
                    await self._size(prefix)
                raise
            return [ListedObject(cast(Mapping[str, Any], meta), now) for meta in page]

        while page := self._run(call, None):
            yield page

    def delete(self, paths: Sequence[str], deadline: float | None) -> None:
        """Delete objects; a missing object is no fault."""
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

    # outcomes of calls

    def _run(
        self, make: Callable[[], Awaitable[T]], deadline: float | None, *, times: int = 1, takes: bool = False
    ) -> T | None:
        """Run a call on the event loop and return its result; None where the object does not exist.

        Args:
            times: The call may take this many times `timeout_s`.
            takes: The call creates a name, and raises ObjectExistsError where the name exists.

        Raises:
            OSError: The call failed: TimeoutError past its deadline, RefusedError with a reason.
        """
        if not self.breaker.allows():
            raise RefusedError("breaker")
        began = self._clock.now()
        most = times * self.timeout_s
        remaining_s = most if deadline is None else min(most, deadline - began)
        if self._closed:
            raise RefusedError("closed")
        future = asyncio.run_coroutine_threadsafe(_bounded(make, max(0.0, remaining_s)), self._loop)
        try:
            result = future.result(max(0.0, remaining_s) + _CLOSE_S)  # more only if the loop stopped
        except FileNotFoundError:
            self.breaker.record_success()
            return None
        except concurrent.futures.CancelledError:
            raise RefusedError("closed") from None
        except (TimeoutError, asyncio.TimeoutError, concurrent.futures.TimeoutError):
            if remaining_s >= _MIN_FAIR_TIMEOUT_S:
                self._failed("timeout", "it did not answer in time")
            raise TimeoutError("timeout") from None
        except Exception as error:  # noqa: BLE001  boundary to foreign code: obstore
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
        """Cancel running calls and stop the event loop."""

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
    """Return one word for an error, by its type: its text holds paths, ports and times."""
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


# From settings to a store. Nothing here calls the store.

RETRIES = 3
_EXPECTED_URL = "expected s3://BUCKET, gs://BUCKET, az://ACCOUNT/CONTAINER or file:///DIRECTORY"


def _read_credentials(file: str) -> dict[str, str]:
    """Read a file of `name = value` lines. They may be secrets, so no error quotes them."""
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
    """Return the obstore store of a URL, without a call to it. Raises ConfigError for an invalid URL."""
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
        if parts.scheme == "s3":  # S3 has no other way to move without overwriting
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
    except Exception as error:  # noqa: BLE001  boundary to foreign code: obstore
        text = type(error).__name__ if credentials_file else str(error).splitlines()[0]
        raise ConfigError(f"object.url = {url!r}: {text}; {_EXPECTED_URL}") from None


def _container(parts: SplitResult) -> dict[str, str]:
    """Return account and container of `az://ACCOUNT/CONTAINER`; obstore's own `az://` has no account."""
    container = parts.path.strip("/")
    if not parts.netloc or not container or "/" in container:
        raise ConfigError(f"object.url = {parts.geturl()!r}: expected az://ACCOUNT/CONTAINER")
    return {"account_name": parts.netloc, "container_name": container}
