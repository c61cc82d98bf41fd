"""A client's namespaces and requests. The client hashes tokens; the daemon answers the rest."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Any

from kvcache.block.chain import Chain, Signatures, bind_signatures, tokens
from kvcache.block.namespace import Namespace
from kvcache.cache.api import Extras, Hit, NamespaceSpec, PageIds, check_origin, check_shards, check_transfer, check_ttl
from kvcache.cache.operation import BlockTransfer
from kvcache.cache.slot_copy import PagesSlotCopy
from kvcache.daemon.client.connection import Connection
from kvcache.daemon.client.transfer import ConnectedClient, TransferTask
from kvcache.daemon.protocol import MAX_CLIENT_NAMESPACES, MAX_FRAME_BYTES, encode_spec
from kvcache.errors import KVCacheError
from kvcache.log import RequestContext, logger
from kvcache.tier.tier import Outcome
from kvcache.transfer.pages import Pages

UNREACHABLE = "unreachable"
"""The miss reason of a match without a reply."""

_log = logger("kvcache.daemon")


class RemoteNamespace:
    def __init__(self, cache: ConnectedClient, spec: NamespaceSpec, namespace: Namespace) -> None:
        """`namespace`: that of `spec`, with the daemon's facts. Raises LayoutError for shards outside the layout."""
        self.cache, self.namespace, self.layout, self.ttl_s = cache, namespace, spec.layout, spec.ttl_s
        self.shards, _ = check_shards(spec.layout, spec.shards, spec.ranks)
        self._spec = replace(spec, facts=namespace.facts, shards=self.shards)
        self.id = namespace.id
        """The daemon's id of the namespace, which includes the daemon's facts; before its first reply, the client's."""
        self._number: tuple[Connection, int] | None = None

    def number(self, connection: Connection) -> int:
        """Return the number of this namespace in the session; bind it where the session does not have it."""
        if (
            self._number is None
            or self._number[0] is not connection
            or self._number[1] not in connection.namespace_numbers
        ):
            connection.unbind_oldest(len(connection.namespace_numbers) - MAX_CLIENT_NAMESPACES + 1)
            reply = self._bind(connection)
            connection.ends.clear()
            self.id = reply["id"]
            self._number = connection, reply["namespace"]
            connection.namespace_numbers[self._number[1]] = None
        connection.namespace_numbers.move_to_end(self._number[1])
        return self._number[1]

    def _bind(self, connection: Connection) -> dict[str, Any]:
        return connection.call("namespace", **encode_spec(self._spec), ends=list(connection.ends))

    def event_signature(self, signature: bytes) -> bytes:
        return bind_signatures(self.id, signature) if self.cache.isolates_tenants else signature

    def request(
        self,
        id: str | None = None,
        *,
        agent: str | None = None,
        session: str | None = None,
        ttl_s: float | None = None,
        deadline_s: float | None = None,
    ) -> RemoteRequest:
        made = RemoteRequest(self, id or f"{self.cache.prefix}-{next(self.cache.numbers)}", deadline_s)
        made.work, made.ttl_s = (
            RequestContext.of(made.id, agent, session),
            check_ttl(self.ttl_s if ttl_s is None else ttl_s),
        )
        made.open()
        return made

    def computed(self, tokens: int, seconds: float) -> None:
        try:
            with self.cache.connected() as connection:
                connection.post("computed", namespace=self.number(connection), tokens=tokens, seconds=seconds)
        except KVCacheError as error:
            _log.debug("report not sent: %s", error)

    def clear(self) -> int:
        try:
            with self.cache.connected() as connection:
                number = self.number(connection)
            return int(self.cache.long_call("clear", None, {"namespace": number})["records"])
        except KVCacheError as error:
            _log.warning("clear failed: %s", error)
            return 0

    def join(self, id: str) -> RemoteRequest:
        joined = RemoteRequest(self, id, None, joined=True)
        with self.cache.connected() as connection:
            joined.number(connection)
        return joined


class RemoteRequest:
    def __init__(self, handle: RemoteNamespace, id: str, deadline_s: float | None, *, joined: bool = False) -> None:
        self.id, self.work, self.ttl_s = id, RequestContext(id), handle.ttl_s
        self._handle, self._cache = handle, handle.cache
        self._deadline_s = handle.cache.deadline_s if deadline_s is None else deadline_s
        self._joined = joined
        self._unreported_ids = b""  # token ids of a prompt with a miss, for the daemon to explain it
        self._known_blocks = 0  # blocks of a joined request, as of the last reply
        self._chain = Chain(handle.id, handle.layout.block_tokens)
        self._number = next(handle.cache.numbers)
        self._connection: weakref.ref[Connection] | None = None  # the session that has this request open
        self._transfers_running = 0  # transfers that are running
        self._closed = False
        self._lock = threading.Lock()

    @property
    def signatures(self) -> Sequence[bytes]:
        if not self._joined:
            return self._chain.signatures
        try:
            with self._cache.connected() as connection:
                packed = connection.call("signatures", request=self.number(connection))["signatures"]
        except KVCacheError:
            packed = b""
        return Signatures(packed)

    def open(self) -> None:
        """Open the request in the daemon, so that ranks can join it.

        Where the daemon does not answer, a later call opens it.
        """
        try:
            with self._cache.connected() as connection:
                self.number(connection)
        except KVCacheError as error:
            _log.debug("request is not open in the daemon yet: request=%s cause=%s", self.id, error)

    def number(self, connection: Connection, *, resend: bool = True) -> int:
        """Return the request's number in the session; open or join it where the session does not have it.

        `resend` also sends its signatures, where an earlier session had it open.
        """
        if self._connection is None or self._connection() is not connection:
            fields = {"request": self._number, "namespace": self._handle.number(connection), "id": self.id}
            if self._joined:
                self._known_blocks = connection.call("join", **fields)["blocks"]
            else:
                named = {"agent": self.work.agent, "session": self.work.session}
                connection.post("open", **fields, deadline_s=self._deadline_s, ttl_s=self.ttl_s, **named)
                if resend and self._chain.packed and self._chain.namespace_id == self._handle.id:
                    connection.call("match", request=self._number, **self._chain_fields())
            self._connection = weakref.ref(connection)
        return self._number

    def _chain_fields(self) -> dict[str, Any]:
        """Return the fields of a message that carry the chain."""
        chain = self._chain
        return {"signatures": chain.packed, "head": None if chain.head == chain.namespace_id else chain.head}

    def match(
        self,
        token_ids: Any = None,
        *,
        extras: Extras | None = None,
        digests: Sequence[bytes] | None = None,
        after: bytes | None = None,
    ) -> Hit:
        check_origin(self._joined or None, token_ids, digests)
        handle, block_tokens = self._handle, self._handle.layout.block_tokens
        is_new_prompt = digests is not None or token_ids is not None
        if digests is not None:
            self._chain = Chain.from_digests(handle.id, digests, block_tokens, after=after)
        elif token_ids is not None:
            chain = Chain(handle.id, block_tokens)
            chain.extend(token_ids, extras)
            self._chain = chain
        fields = self._chain_fields() if is_new_prompt else {}
        try:
            with self._cache.connected() as connection:
                reply = connection.call("match", request=self.number(connection, resend=not is_new_prompt), **fields)
                blocks = int(reply["blocks"])
                if is_new_prompt:
                    self._unreported_ids = b"" if blocks == len(self._chain.signatures) else self._packed(token_ids)
                return Hit(
                    tokens=blocks * block_tokens,
                    blocks=blocks,
                    by_tier=reply["by_tier"],
                    reason=reply["reason"],
                    pending=reply["pending"],
                )
        except KVCacheError as error:
            _log.debug("no match: %s", error)
            return Hit(tokens=0, blocks=0, reason=UNREACHABLE)

    def extend(
        self, token_ids: Any = None, *, extras: Extras | None = None, digests: Sequence[bytes] | None = None
    ) -> None:
        check_origin(self._joined or None, token_ids, digests)
        before = len(self._chain.packed)
        if digests is not None:
            self._chain.extend_digests(digests)
        else:
            self._chain.extend(token_ids, extras)
        if len(self._chain.packed) == before:
            return
        try:
            with self._cache.connected() as connection:
                if self._connection is None or self._connection() is not connection:
                    self.number(connection)  # sends the whole chain
                else:
                    connection.call("extend", request=self._number, signatures=self._chain.packed[before:])
        except KVCacheError as error:
            self._connection = None
            _log.debug("extend failed: %s", error)

    def admit(self) -> None:
        try:
            with self._cache.connected() as connection:
                ids, self._unreported_ids = self._unreported_ids, b""
                connection.call("admit", request=self.number(connection), **({"ids": ids} if ids else {}))
        except KVCacheError as error:
            _log.debug("admit failed: %s", error)

    def _packed(self, token_ids: Any) -> bytes:
        """Return the token ids of full blocks, packed; b"" where they exceed half a frame."""
        if token_ids is None:
            return b""
        ids = tokens(token_ids)[: len(self._chain.signatures) * self._handle.layout.block_tokens]
        return ids.tobytes() if ids.nbytes <= MAX_FRAME_BYTES // 2 else b""

    def load(self, blocks: int, pages: Pages, page_ids: PageIds, *, first_block: int = 0) -> BlockTransfer:
        return self._move("load", pages, page_ids, first_block, blocks)

    def store(self, pages: Pages, page_ids: PageIds, *, first_block: int = 0) -> BlockTransfer:
        return self._move("store", pages, page_ids, first_block, first_block + (len(page_ids[0]) if page_ids else 0))

    def _move(self, op: str, pages: Pages, page_ids: PageIds, first: int, end: int) -> BlockTransfer:
        self._cache.check_open()
        known = len(self._chain.signatures)
        if self._joined:
            if end > self._known_blocks:
                self._known_blocks = len(self.signatures)
            known = self._known_blocks
        check_transfer(self._handle.layout, self._handle.shards, pages, page_ids, first, end, known)
        transfer = BlockTransfer(end - first)
        slot_copy = PagesSlotCopy(self._cache.copiers, pages, page_ids)
        sizes = [p.block_bytes for p in pages]
        with self._lock:
            self._transfers_running += 1
        self._cache.transfer_started()
        store = self._announce() if op == "store" else 0
        task = TransferTask(self._cache, self, op, first, end, sizes, slot_copy, transfer, self._deadline_s, store)
        try:
            self._cache.executor.submit(task.run)
        except RuntimeError as error:  # another thread closes the cache, or the system gives no thread
            _log.debug("%s did not start: %s", op, error)
            task.finish(Outcome.FAILED)
        return transfer

    def _announce(self) -> int:
        """Announce a store before the engine continues, so that a later flush waits for it.

        Returns:
            Its number; 0 where it could not be announced at once.
        """
        number = next(self._cache.numbers)
        return number if self._cache.announce_store(number) else 0

    def transfer_ended(self, store: int) -> None:
        """Record the end of a transfer; `store` is the number of its announcement, or 0."""
        with self._lock:
            self._transfers_running -= 1
        self._report_finished(store)

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._report_finished(0)

    def _report_finished(self, store: int) -> None:
        """Report the end of a store; and of the request, once it is closed and none of its transfers runs.

        A transfer that starts after that report would not find the request.
        """
        with self._lock:
            over = self._closed and not self._transfers_running
        if not store and not over:
            return
        with suppress(KVCacheError), self._cache.connected() as connection:
            if store and connection.accepts_store_notices:
                connection.post("stored", store=store)
            if (
                over and self._connection is not None and self._connection() is connection
            ):  # otherwise the daemon has closed it with its session
                connection.post("close", request=self._number)

    def __enter__(self) -> RemoteRequest:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
