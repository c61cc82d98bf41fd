"""The base of tiers over a server or store that other processes use too: Redis and object stores.

Prefix lookups run on a separate thread. When the tier closes, running work gets a moment to end.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from kvcache.block.record import Address
from kvcache.errors import ClosedError
from kvcache.observe.reasons import REASONS
from kvcache.os_env import OsEnv
from kvcache.tier.breaker import Counters
from kvcache.tier.io_queue import QueuedTier

_MAX_LOOKUPS = 64


class RemoteTier(QueuedTier):
    """Base class; a subclass defines `_match_prefix` and `_disconnect` besides the hooks of `QueuedTier`."""

    durable = shared = True
    where: str

    def __init__(
        self,
        *,
        connections: int,
        queue_bytes: int,
        os_env: OsEnv | None,
        log: logging.Logger | logging.LoggerAdapter[logging.Logger],
        **more: Any,
    ) -> None:
        super().__init__(threads=connections, queue_bytes=queue_bytes, os_env=os_env, log=log, **more)
        self._counters = Counters()
        self._lookups = 0
        self._asking = self._os_env.executor(1, f"{self.name}-lookup")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.where!r})"

    @abstractmethod
    def _match_prefix(self, addresses: Sequence[Address], deadline: float | None) -> int:
        """Return how many blocks of a chain are there, from its head.

        Raises:
            OSError: the server does not answer.
        """

    @abstractmethod
    def _disconnect(self) -> None:
        """Close all connections: pending calls fail."""

    def _count_defect(self) -> None:
        self._counters.add("defects")

    def match_prefix(self, addresses: Sequence[Address], *, deadline: float | None = None) -> Future[int]:
        """Look up how many blocks of a chain are there, from its head.

        A tail is stored after its head, so the lookup needs few round trips whatever the chain's length. A hole between
        the probed blocks shows as a shorter prefix when the blocks are read.

        Returns:
            A future. Its result is 0 where no answer arrives in time, and where 64 lookups are pending already.
        """
        with self._lock:
            if self._closed:
                raise ClosedError(f"{self.name} tier: it was closed")
            if self._lookups >= _MAX_LOOKUPS or not addresses:
                nothing: Future[int] = Future()
                nothing.set_result(0)
                return nothing
            self._lookups += 1
        return self._asking.submit(lambda: self._look(addresses, deadline))

    def _look(self, addresses: Sequence[Address], deadline: float | None) -> int:
        try:
            return self._match_prefix(addresses, deadline)
        except OSError:
            return 0
        finally:
            with self._lock:
                self._lookups -= 1

    @property
    def counters(self) -> dict[str, int]:
        """Event counts since the tier was opened, by name."""
        return self._counters.snapshot()

    @property
    def faults(self) -> dict[str, int]:
        """The counters that count faults."""
        return {name: count for name, count in self.counters.items() if name in REASONS["tier_faults", "fault"]}

    def sync(self) -> bool:
        """Nothing to do: acknowledged writes are as durable as the server makes them."""
        return True

    def _close(self, patience_s: float) -> bool:
        with self._lock:
            if self._closed:
                return True
            self._closed = True
        if not self._drain(patience_s):
            self._fail_queued("closed")
        self._disconnect()
        self._executor.close()
        self._asking.close()
        return True
