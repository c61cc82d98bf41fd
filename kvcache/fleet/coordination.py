"""Coordination of a fleet through Redis: a lease per prompt, so that one node at a time computes it.

Each prompt has three keys. The lease holds the number of the node that computes the prompt, and expires where that node
stops renewing it. The number is not reused. The mark says that the prompt's blocks are stored. Only the holder of the
lease may set it: a node whose lease has expired cannot mark for the next holder. The blocks need no such care: they are
named by their content, and two nodes that compute the same blocks store the same.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from functools import partial
from typing import Any

from kvcache.os_env import OsEnv
from kvcache.settings.tiers import RedisSettings
from kvcache.tier.breaker import Counters
from kvcache.tier.redis.cluster import ConnectionConfig
from kvcache.tier.redis.connect import RefusedError
from kvcache.tier.redis.pool import REDIRECT_REPLIES
from kvcache.tier.redis.wire import ErrorReply, RespConnection

# Small keys that a fleet shares in its Redis, beside the records; `docs/spec/fleet.md` specifies them.

_MAX_REDIRECTS = 3


class Coordination:
    """Sends commands to the Redis servers in `settings`.

    It has its own connections, so that no command waits behind a block.
    """

    def __init__(self, settings: RedisSettings, os_env: OsEnv | None = None) -> None:
        self.prefix = settings.prefix
        self._nodes = ConnectionConfig(settings).nodes((os_env or OsEnv()).clock, Counters())

    def command(self, key: bytes, *words: bytes) -> Any:
        """Return the reply to a command about `key`; OSError where no server answers, or the server refuses."""
        target = ""
        for _ in range(_MAX_REDIRECTS):
            (share,) = self._nodes.partition([key], None, [target])
            try:
                reply = share.pool.run(partial(_send, words=words), None, asking=share.asking)
            except OSError:
                self._nodes.mark_stale()
                raise
            if not isinstance(reply, ErrorReply):
                return reply
            if reply not in REDIRECT_REPLIES:
                raise RefusedError(str(reply))
            target = reply.target  # also for MOVED: the cluster's map is not read again for each key
            if reply != "ASK":
                self._nodes.mark_stale()
        raise RefusedError("moved")

    def script(self, text: bytes, keys: list[bytes], *arguments: bytes) -> Any:
        """Return the result of a script. All keys have one hash tag (in braces), and so one server."""
        return self.command(keys[0], b"EVAL", text, b"%d" % len(keys), *keys, *arguments)

    def close(self) -> None:
        self._nodes.close()


def _send(wire: RespConnection, words: tuple[bytes, ...]) -> Any:
    return wire.ask(*words)


LEASE_S = 10.0
STORED_MARK_S = 600.0
"""How long a prompt counts as stored. Afterwards a node asks its engine again, which finds the remaining blocks."""
_NUMBER_TTL_S = 86_400

_ACQUIRE = b"""local n = redis.call('INCR', KEYS[3])
redis.call('PEXPIRE', KEYS[3], ARGV[2])
if redis.call('EXISTS', KEYS[2]) == 1 then return -1 end
if redis.call('SET', KEYS[1], n, 'NX', 'PX', ARGV[1]) then return n end
return 0"""
_RENEW = b"""if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('PEXPIRE', KEYS[1], ARGV[2])"""
_RELEASE = b"""if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('DEL', KEYS[1])
if ARGV[2] ~= '0' then redis.call('SET', KEYS[2], ARGV[1], 'PX', ARGV[2]) end
return 1"""


class LeaseResult(Enum):
    """The outcome of `PromptLease.acquire`."""

    ACQUIRED = "mine"
    HELD_ELSEWHERE = "another's"
    STORED = "stored"


class PromptLease:
    """The lease of one prompt, identified by a digest.

    Every call may raise OSError: no server answers, and so there is no lease.
    """

    def __init__(
        self,
        coordination: Coordination,
        digest: str,
        *,
        lease_s: float = LEASE_S,
        renew_s: float | None = None,
        mark_s: float = STORED_MARK_S,
    ) -> None:
        """`renew_s` is the interval between renewals; a third of `lease_s` where it is None."""
        name = f"{coordination.prefix}:w1:{{{digest}}}".encode()
        self._coordination, self._keys = coordination, [name + b":lease", name + b":stored", name + b":number"]
        self._lease_s, self._renew_s, self._mark_s = lease_s, renew_s or lease_s / 3, mark_s
        self.number = 0

    def acquire(self) -> LeaseResult:
        number = self._coordination.script(_ACQUIRE, self._keys, _ms(self._lease_s), _ms(_NUMBER_TTL_S))
        if number > 0:
            self.number = number
            return LeaseResult.ACQUIRED
        return LeaseResult.STORED if number < 0 else LeaseResult.HELD_ELSEWHERE

    def renew(self) -> bool:
        """Return whether this node still has the lease."""
        return bool(self._coordination.script(_RENEW, self._keys[:1], b"%d" % self.number, _ms(self._lease_s)))

    def mark_stored(self) -> bool:
        """Release the lease and mark the prompt as stored. Return False, without a mark, where it is another node's."""
        return self._leave(self._mark_s)

    def release(self) -> bool:
        """Release the lease for the next node that asks."""
        return self._leave(0)

    def _leave(self, mark_s: float) -> bool:
        return bool(self._coordination.script(_RELEASE, self._keys[:2], b"%d" % self.number, _ms(mark_s)))

    @contextmanager
    def keep_renewed(self) -> Iterator[None]:
        """Renew the lease on a thread while the block runs; release it where the block raises."""
        over = threading.Event()

        def renew() -> None:
            while not over.wait(self._renew_s):
                with suppress(OSError):  # the server may answer again before the lease expires
                    if not self.renew():
                        return

        thread = threading.Thread(target=renew, name="kvcache-lease", daemon=True)
        thread.start()
        try:
            yield
        except BaseException:
            with suppress(OSError):
                self.release()
            raise
        finally:
            over.set()
            thread.join()


def _ms(seconds: float) -> bytes:
    return b"%d" % int(1000 * seconds)
