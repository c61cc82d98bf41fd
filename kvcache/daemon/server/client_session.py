"""State of one client in the daemon: its namespaces, open requests and pending stores.

A session starts with the hello of a control connection. It ends with that connection or with the client's process,
whichever ends first. Its requests close then, and their references end. No timer ends anything in a session.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcache.block.chain import SIGNATURE_BYTES, bind_signatures
from kvcache.cache.api import FlushReport
from kvcache.cache.cache import Cache
from kvcache.cache.request import CacheNamespace, CacheRequest
from kvcache.daemon.protocol import MAX_CLIENT_NAMESPACES, STORE_TIMEOUT_S, ProtocolError, parse_spec
from kvcache.daemon.server.admission import QUOTA_REASON, Admission, Credentials
from kvcache.daemon.server.auth import Tenant
from kvcache.daemon.server.connection import Connection
from kvcache.daemon.server.namespace_registry import NamespaceRegistry
from kvcache.daemon.server.report import Report
from kvcache.errors import AccessError, ConfigError, RequestError, TokenError
from kvcache.os_env import Clock

# Pending stores: those that clients have announced and not finished. A flush waits for them before it looks at the
# cache. A client announces a store before its engine continues, and copies afterwards. A flush that starts after the
# engine's reply therefore waits for the blocks of that reply: the loop first reads what clients have sent. On a Unix
# socket that is everything sent before the flush; over TCP it is what has arrived.

if TYPE_CHECKING:
    pass

MAX_PENDING_STORES = 8192
"""Per client at a time; a flush does not wait for further ones."""

MAX_STORE_S = 2 * STORE_TIMEOUT_S
"""Age at which a flush stops waiting for a store: its timeout, and as long again in the client's queue."""

MIN_CATCH_UP_S = 0.5
"""Least time for the loop to read announcements, even where the flush has less left."""


class PendingStores:
    """Open stores of all clients, by tenant.

    Thread safety: any thread; `wait` blocks until the loop has run, so that the loop's own thread must not call it.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, clients: Mapping[Connection, ClientSession], clock: Clock
    ) -> None:
        """Start without open stores.

        Args:
            loop: The daemon's event loop.
            clients: Sessions by control connection; the loop changes it.
            clock: Time for the age of stores.
        """
        self._loop, self._clients, self._clock = loop, clients, clock
        self._begun = 0
        self._open: defaultdict[str, OrderedDict[int, float]] = defaultdict(OrderedDict)
        """By tenant: start time of each open store by number, oldest first."""
        self._waiting_tenants: set[str | None] = (
            set()
        )  # tenants whose clients are read in the next scheduled turn; None is all
        self._catch_ups_begun = self._catch_ups_done = 0  # number of turns started, and of the last one that finished
        self._closed = False
        self._changed = threading.Condition()

    def begin(self, tenant: str) -> int:
        """Record that a store of this tenant has started; return the number for `end`."""
        with self._changed:
            self._begun += 1
            self._open[tenant][self._begun] = self._clock.now()
            return self._begun

    def end(self, tenant: str, number: int) -> None:
        """Record that a store has finished or failed. Idempotent."""
        with self._changed:
            of_tenant = self._open[tenant]
            oldest = next(iter(of_tenant), None)
            of_tenant.pop(number, None)
            if number == oldest:  # `wait` watches the oldest
                self._changed.notify_all()

    def wait(self, timeout_s: float | None, tenant: str | None = None) -> bool:
        """Wait until every store announced by now has ended.

        Args:
            timeout_s: None waits without limit.
            tenant: Wait for this tenant's stores only; None for all.

        Returns:
            Whether all of them ended, or passed `MAX_STORE_S`, in time.
        """
        until = float("inf") if timeout_s is None else self._clock.now() + timeout_s
        with self._changed:
            if not self._closed and not self._waiting_tenants:
                self._loop.call_soon_threadsafe(self._catch_up_clients)
            self._waiting_tenants.add(tenant)
            turn = self._catch_ups_begun + 1
            hear_s = None if timeout_s is None else max(MIN_CATCH_UP_S, timeout_s)
            if not self._changed.wait_for(lambda: self._catch_ups_done >= turn or self._closed, hear_s):
                return False
            last = self._begun
            while (since := self._oldest(tenant, last)) is not None:
                now = self._clock.now()
                if now >= until:
                    return False
                self._changed.wait(min(until, since + MAX_STORE_S) - now)
            return True

    def close(self) -> None:
        """Record that the loop reads no more announcements; `wait` no longer waits for it."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _catch_up_clients(self) -> None:
        """Read what clients of the waiting tenants have sent, once for all waiters. Loop thread."""
        with self._changed:
            waiting_tenants, self._waiting_tenants = self._waiting_tenants, set()
            self._catch_ups_begun += 1
        for peer, session in list(self._clients.items()):
            if not waiting_tenants.isdisjoint((None, session.tenant.name)):
                peer.catch_up()
        with self._changed:
            self._catch_ups_done = self._catch_ups_begun
            self._changed.notify_all()

    def _oldest(self, tenant: str | None, last: int) -> float | None:
        """Return the start of the oldest open store up to number `last`; forget stores older than `MAX_STORE_S`."""
        began = []
        for of_tenant in self._open.values() if tenant is None else [self._open[tenant]]:
            while of_tenant:
                number, since = next(iter(of_tenant.items()))
                if since + MAX_STORE_S > self._clock.now():
                    if number <= last:
                        began.append(since)
                    break
                del of_tenant[number]
        return min(began, default=None)


MAX_OPEN_REQUESTS = 8192
"""Per session at a time."""
MAX_SIGNATURE_BYTES = 64 << 20
"""Signatures of all requests of a session together: 32 million tokens, in blocks of 16.

Token ids, which a client sends so that a miss can be explained, count as well; ids beyond the limit are not kept.
"""

MAX_DEADLINE_S = 3600.0


class ClientSession:
    """Namespaces, requests and stores of one client.

    Thread safety: the loop's thread; `request`, `bound`, `payload_sizes` and `flush` also from transfer threads.
    """

    def __init__(
        self,
        cache: Cache,
        engine: str,
        pid: int,
        credentials: Credentials,
        admission: Admission,
        namespace_registry: NamespaceRegistry,
        pending_stores: PendingStores,
    ) -> None:
        """Authenticate the client.

        Args:
            pid: The client's process on this host, else 0.
            credentials: From the hello; `admission` maps them to a tenant.

        Raises:
            AccessError: No tenant has these credentials.
        """
        self.secret = secrets.token_bytes(16)
        self.engine, self.pid, self.credentials = engine, pid, credentials
        self.tenant: Tenant = admission.tenant(credentials)
        self.rate_limit = admission.rate_limit(self.tenant)
        self._isolates_tenants = admission.isolates_tenants
        self.streams_payloads = credentials.remote or self.tenant.share == "copy"
        """Whether payload bytes go over the socket, because the client does not map the arena."""
        self._cache, self._namespace_registry, self._pending_stores = cache, namespace_registry, pending_stores
        self._handles: dict[int, tuple[CacheNamespace, Callable[[], CacheNamespace]]] = {}  # and the call that binds it
        self._numbers: dict[CacheNamespace, int] = {}
        self._next = 0
        self._requests: dict[int, CacheRequest] = {}
        self._handle_of: dict[int, CacheNamespace] = {}  # by request number
        self._signature_bytes: dict[int, int] = {}  # in bytes, by request opened here (not joined)
        self._within_rate_limit = True  # whether the current message is within the tenant's rate limit
        self._token_id_bytes: dict[int, int] = {}  # bytes of token ids, by request number
        self._stores: dict[int, int] = {}  # number in `PendingStores`, by the client's number
        self._watch = cache.tier_manager.watch()
        self.ended = False

    def still_authorized(self, admission: Admission) -> bool:
        """Return whether the credentials still map to the same tenant and `share`; if so, adopt its new limits."""
        try:
            tenant = admission.tenant(self.credentials)
        except AccessError:
            return False
        same = (tenant.name, tenant.share) == (self.tenant.name, self.tenant.share)
        self.tenant = tenant if same else self.tenant
        return same

    # Messages.

    def answer(self, op: str, message: Mapping[str, Any]) -> dict[str, Any]:
        """Answer one message of the control connection.

        Raises:
            KVCacheError: The client receives it as an error; the session is unchanged.
        """
        answers: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
            "namespace": self._namespace,
            "open": self._open,
            "computed": self._computed,
            "match": self._match,
            "extend": self._extend,
            "join": self._join,
            "signatures": self._signatures,
            "admit": self._admit,
            "close": self._close,
            "storing": self._storing,
            "stored": self._stored,
            "stats": lambda _: self._stats(),
        }
        if op not in ("storing", "stored"):  # they belong to a store, whose `store` message is counted
            self._within_rate_limit = self.rate_limit.count_operation(refusable=op == "match")
        if self.rate_limit.overdrawn:
            raise ProtocolError(f"tenant {self.tenant.name!r} far exceeds its operations a second")
        return answers[op](message)

    def request(self, number: int) -> CacheRequest:
        found = self._requests.get(number)
        if found is None:
            raise RequestError(f"request {number}: found no open request with this number")
        return found

    def payload_sizes(self, number: int) -> list[int]:
        """Return the payload bytes of a block, by group, for a request."""
        handle = self._handle_of.get(number)
        return [] if handle is None else [ref.payload_bytes for ref in handle.own_shards]

    def _namespace(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Bind a namespace; then end the bindings in `ends`. Where binding fails, nothing changes."""
        ends = {number for number in message.get("ends") or () if type(number) is int and number in self._handles}
        if not self.tenant.may_act_as(message["tenant"]):
            raise AccessError(f"tenant = {message['tenant']!r:.140}: this client authenticated as {self.tenant.name!r}")
        bind = partial(self._cache.namespace, parse_spec(message))
        if len(self._handles) - len(ends) >= MAX_CLIENT_NAMESPACES:
            raise ConfigError(f"{MAX_CLIENT_NAMESPACES} namespaces bound: the limit of a client; end some first")
        handle = self._namespace_registry.acquire(self.tenant.name, bind, self)
        number = self._numbers.get(handle)
        if number is None:
            number = self._numbers[handle] = self._next
            self._handles[number], self._next = (handle, bind), number + 1
        for ended in ends - {number}:
            self._end_binding(ended)
        return {"namespace": number, "id": handle.id}

    def _end_binding(self, number: int) -> None:
        """End a binding. Its open requests continue."""
        handle, _ = self._handles.pop(number)
        if self._numbers.get(handle) == number:
            del self._numbers[handle]
            self._namespace_registry.release(self.tenant.name, handle, self)

    def _open(self, message: Mapping[str, Any]) -> dict[str, Any]:
        number = message["request"]
        if number in self._requests:
            raise RequestError(f"request {number} is open already")
        agent, session = message.get("agent"), message.get("session")
        handle = self._use_namespace(message)
        ttl_s, deadline_s = message.get("ttl_s"), _deadline(message)
        made = handle.request(
            self._request_name(message), agent=agent, session=session, ttl_s=ttl_s, deadline_s=deadline_s
        )
        self._add_request(number, handle, made)
        self._signature_bytes[number] = 0
        return {}

    def _computed(self, message: Mapping[str, Any]) -> dict[str, Any]:
        self._use_namespace(message).computed(message["tokens"], message["seconds"])
        return {}

    def _match(self, message: Mapping[str, Any]) -> dict[str, Any]:
        number, signatures = message["request"], message.get("signatures")
        request = self.request(number)
        if signatures is not None:
            self._check_opened_here(number)
            self._check_signature_budget(number, len(signatures))
            self._signature_bytes[number] = len(signatures)
        handle = None if signatures is None else self._bind_signatures(request, signatures)
        head = message.get("head")
        if head is not None and len(head) not in (0, SIGNATURE_BYTES):
            raise TokenError(f"a head of {len(head)} bytes: expected {SIGNATURE_BYTES}, or 0 for an unknown one")
        head = head and self._bind_signatures(request, head)
        hit = request.match(signatures=handle, head=head, refused="" if self._within_rate_limit else QUOTA_REASON)
        if signatures is not None and self._isolates_tenants:
            request.chain.client_signatures = signatures
        return {"blocks": hit.blocks, "by_tier": dict(hit.by_tier), "reason": hit.reason, "pending": hit.pending}

    def _extend(self, message: Mapping[str, Any]) -> dict[str, Any]:
        number, signatures = message["request"], message["signatures"]
        request = self.request(number)
        self._check_opened_here(number)
        size = self._signature_bytes[number] + len(signatures)
        self._check_signature_budget(number, size)
        request.chain.append(self._bind_signatures(request, signatures))
        if self._isolates_tenants:
            request.chain.client_signatures += signatures
        request.miss.extended(request.chain.packed)
        self._signature_bytes[number] = size
        return {}

    def _join(self, message: Mapping[str, Any]) -> dict[str, Any]:
        if message["request"] in self._requests:
            raise RequestError(f"request {message['request']} is open: give the joined request another number")
        handle = self._use_namespace(message)
        request = self._add_request(message["request"], handle, handle.join(self._request_name(message)))
        return {"blocks": len(request.signatures)}

    def _signatures(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return the signatures as the client sent them."""
        chain = self.request(message["request"]).chain
        return {"signatures": chain.client_signatures if self._isolates_tenants else chain.packed}

    def _admit(self, message: Mapping[str, Any]) -> dict[str, Any]:
        number, ids = message["request"], message.get("ids", b"")
        request = self.request(number)
        if number in self._signature_bytes and ids and len(ids) % 4 == 0 and self._fits(len(ids)):
            self._token_id_bytes[number] = len(ids)
            request.miss.add_token_ids(np.frombuffer(ids, "<u4"))
        request.admit()
        return {}

    def _close(self, message: Mapping[str, Any]) -> dict[str, Any]:
        request = self._requests.pop(message["request"], None)
        self._signature_bytes.pop(message["request"], None)
        self._token_id_bytes.pop(message["request"], None)
        handle = self._handle_of.pop(message["request"], None)
        if request is not None:
            request.close()
        if handle is not None:
            self._namespace_registry.drop_reference(handle)
        return {}

    def _storing(self, message: Mapping[str, Any]) -> dict[str, Any]:
        if len(self._stores) < MAX_PENDING_STORES and message["store"] not in self._stores:
            self._stores[message["store"]] = self._pending_stores.begin(self.tenant.name)
        return {}

    def _stored(self, message: Mapping[str, Any]) -> dict[str, Any]:
        number = self._stores.pop(message["store"], None)
        if number is not None:
            self._pending_stores.end(self.tenant.name, number)
        return {}

    def flush(self, timeout_s: float) -> FlushReport:
        """Flush as `Cache.flush`, from any thread.

        A tenant waits for its own clients' stores only, and its report covers its own namespaces only.
        """
        flow, tenant = self._cache.tier_manager, self.tenant
        if tenant.operator:
            return flow.flush(timeout_s, watch=self._watch, first=self._cache.on_flush)
        owners = self._cache.erasure.owned()
        own = {space for space, owner in owners.items() if owner.fits(tenant.name, None)}
        own |= {handle.id for handle, _ in list(self._handles.values())}
        waits = [partial(self._pending_stores.wait, tenant=tenant.name)]
        return flow.flush(timeout_s, watch=self._watch, first=waits, scope=own.__contains__)

    def _stats(self) -> dict[str, Any]:
        """Return the statistics of the cache for an operator, and those of its own data for a tenant."""
        if self.tenant.operator:
            return self._cache.stats()
        moved = {"moved_bytes": self.rate_limit.moved_bytes, "refused": self.rate_limit.refused}
        return {"tenant": self.tenant.name, **Report(self._cache, self.tenant.name).stats(), **moved}

    def _add_request(self, number: int, handle: CacheNamespace, request: CacheRequest) -> CacheRequest:
        if len(self._requests) >= MAX_OPEN_REQUESTS:
            request.close()
            raise RequestError(f"{MAX_OPEN_REQUESTS} requests are open: the limit of a client; close some")
        self._requests[number], self._handle_of[number] = request, handle
        self._namespace_registry.add_reference(handle)
        return request

    def find_namespace(self, message: Mapping[str, Any]) -> CacheNamespace:
        """Return the namespace that this session bound under the message's number.

        The registry may have removed the binding for the tenant's share. Thread safety: any thread.

        Raises:
            RequestError: This session bound no namespace under the number.
        """
        number: int = message["namespace"]
        found = self._handles.get(number) if type(number) is int else None
        if found is None:
            raise RequestError(f"namespace {number!r:.40}: not bound by this client, which has {len(self._handles)}")
        return found[0]

    def _use_namespace(self, message: Mapping[str, Any]) -> CacheNamespace:
        """Return the same namespace for use; bind it again where the registry has removed it."""
        handle, number = self.find_namespace(message), message["namespace"]
        if self._namespace_registry.touch(self.tenant.name, handle, self):
            return handle
        _, bind = self._handles[number]
        again = self._namespace_registry.acquire(self.tenant.name, bind, self)
        if self._numbers.get(handle) == number:
            del self._numbers[handle]
        self._numbers.setdefault(again, number)
        self._handles[number] = again, bind
        return again

    def _request_name(self, message: Mapping[str, Any]) -> str:
        """Return the request's id with the engine's name before it, so that ids of two engines cannot collide."""
        name: str = message["id"]
        return f"{self.engine}/{name}" if self.engine or "/" in name else name

    def _bind_signatures(self, request: CacheRequest, signatures: bytes) -> bytes:
        return bind_signatures(request.chain.namespace_id, signatures) if self._isolates_tenants else signatures

    def _check_opened_here(self, number: int) -> None:
        if number not in self._signature_bytes:
            raise RequestError(f"request {number} was joined: only the client that opened it adds signatures")

    def _check_signature_budget(self, number: int, size: int) -> None:
        if size % SIGNATURE_BYTES:
            raise TokenError(f"signatures of {size} bytes: expected a multiple of {SIGNATURE_BYTES}")
        more = size - self._signature_bytes.get(number, 0) if size else 0
        if not self._fits(more):
            total = sum(self._signature_bytes.values()) + more
            raise RequestError(
                f"signatures of {total} bytes: the limit of a client is {MAX_SIGNATURE_BYTES}; close some"
            )

    def _fits(self, more: int) -> bool:
        return sum(self._signature_bytes.values()) + sum(self._token_id_bytes.values()) + more <= MAX_SIGNATURE_BYTES

    # The end of the session.

    def end(self) -> None:
        """Close every request, store and binding. Idempotent."""
        self.ended = True
        requests, self._requests = self._requests, {}
        for request in requests.values():
            request.close()
        while self._stores:
            self._pending_stores.end(self.tenant.name, self._stores.popitem()[1])
        while self._handle_of:
            self._namespace_registry.drop_reference(self._handle_of.popitem()[1])
        for number in list(self._handles):
            self._end_binding(number)


def _deadline(message: Mapping[str, Any]) -> float | None:
    given = message.get("deadline_s")
    return None if given is None else min(max(0.0, float(given)), MAX_DEADLINE_S)
