"""Who of a fleet computes a prompt: one node at a time, known by a number that never comes twice.

Three notes a prompt. The lease holds the number of the node that computes it, and goes by itself when that node no
longer renews it. The mark says that the prompt's blocks are stored; only who still has the lease may set it, so a node
that slept through its lease cannot speak for the one after it. The blocks themselves need no such care: they are named
by their content, and two nodes that compute the same store the same."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from functools import partial
from typing import Any

from kvcache.os_env import Port
from kvcache.settings.tiers import Redis
from kvcache.tier.breaker import Counters
from kvcache.tier.redis.cluster import Entrance
from kvcache.tier.redis.connect import RefusedError
from kvcache.tier.redis.pool import ELSEWHERE
from kvcache.tier.redis.wire import Wire, Wrong

# Small notes that a fleet shares in its Redis, beside the records: `docs/spec/fleet.md` says which.

_MOST_MOVES = 3


class Board:
    """Connections of its own to the servers that `settings` name, so that a question waits behind no block."""

    def __init__(self, settings: Redis, port: Port | None = None) -> None:
        entrance = Entrance(
            settings.url,
            username=settings.username,
            password_file=settings.password_file,
            sentinel_password_file=settings.sentinel_password_file,
            tls_ca_file=settings.tls_ca_file,
            tls_cert_file=settings.tls_cert_file,
            tls_key_file=settings.tls_key_file,
        )
        self.prefix = settings.prefix
        self._nodes = entrance.nodes(
            settings.mode, settings.master, (port or Port()).clock, Counters(), timeout_s=settings.timeout_s
        )

    def ask(self, key: bytes, *words: bytes) -> Any:
        """The reply to a command about `key`. OSError where no server answers, or it refuses."""
        place = ""
        for _ in range(_MOST_MOVES):
            (share,) = self._nodes.divide([key], None, [place])
            try:
                reply = share.pool.run(partial(_said, words=words), None, asking=share.asking)
            except OSError:
                self._nodes.doubt()
                raise
            if not isinstance(reply, Wrong):
                return reply
            if reply not in ELSEWHERE:
                raise RefusedError(str(reply))
            place = reply.place  # also of what has moved for good: the cluster is not looked at anew for each
            if reply != "ASK":
                self._nodes.doubt()
        raise RefusedError("moved")

    def script(self, text: bytes, keys: list[bytes], *arguments: bytes) -> Any:
        """What a script says; all keys stand in one place, by the braces in them."""
        return self.ask(keys[0], b"EVAL", text, b"%d" % len(keys), *keys, *arguments)

    def close(self) -> None:
        self._nodes.close()


def _said(wire: Wire, words: tuple[bytes, ...]) -> Any:
    return wire.ask(*words)


LEASE_S = 10.0
MARK_S = 600.0
"""For so long a prompt counts as stored. Afterwards a node asks its engine again, which finds what is still there."""
_NUMBERS_S = 86_400

_TAKE = b"""local n = redis.call('INCR', KEYS[3])
redis.call('PEXPIRE', KEYS[3], ARGV[2])
if redis.call('EXISTS', KEYS[2]) == 1 then return -1 end
if redis.call('SET', KEYS[1], n, 'NX', 'PX', ARGV[1]) then return n end
return 0"""
_RENEW = b"""if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('PEXPIRE', KEYS[1], ARGV[2])"""
_LEAVE = b"""if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('DEL', KEYS[1])
if ARGV[2] ~= '0' then redis.call('SET', KEYS[2], ARGV[1], 'PX', ARGV[2]) end
return 1"""


class Turn(Enum):
    """What became of asking for a lease."""

    MINE = "mine"
    ANOTHERS = "another's"
    STORED = "stored"


class Lease:
    """Of one prompt, known by a digest. Every call may raise OSError: no server, no lease."""

    def __init__(
        self,
        board: Board,
        digest: str,
        *,
        lease_s: float = LEASE_S,
        renew_s: float | None = None,
        mark_s: float = MARK_S,
    ) -> None:
        """`renew_s`: how often it is renewed; thrice in its time where that is not given."""
        name = f"{board.prefix}:w1:{{{digest}}}".encode()
        self._board, self._keys = board, [name + b":lease", name + b":stored", name + b":number"]
        self._lease_s, self._renew_s, self._mark_s = lease_s, renew_s or lease_s / 3, mark_s
        self.number = 0

    def take(self) -> Turn:
        number = self._board.script(_TAKE, self._keys, _ms(self._lease_s), _ms(_NUMBERS_S))
        if number > 0:
            self.number = number
            return Turn.MINE
        return Turn.STORED if number < 0 else Turn.ANOTHERS

    def renew(self) -> bool:
        """Whether it is still ours."""
        return bool(self._board.script(_RENEW, self._keys[:1], b"%d" % self.number, _ms(self._lease_s)))

    def stored(self) -> bool:
        """Leave the lease and say that the blocks are there. False where it was another's by now: nothing is said."""
        return self._leave(self._mark_s)

    def give_up(self) -> bool:
        """Leave the lease to whoever asks next."""
        return self._leave(0)

    def _leave(self, mark_s: float) -> bool:
        return bool(self._board.script(_LEAVE, self._keys[:2], b"%d" % self.number, _ms(mark_s)))

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Renew it on a thread of its own, for as long as the work takes; given up where that fails."""
        over = threading.Event()

        def renew() -> None:
            while not over.wait(self._renew_s):
                with suppress(OSError):  # it may answer again before the lease is over
                    if not self.renew():
                        return

        thread = threading.Thread(target=renew, name="kvcache-lease", daemon=True)
        thread.start()
        try:
            yield
        except BaseException:
            with suppress(OSError):
                self.give_up()
            raise
        finally:
            over.set()
            thread.join()


def _ms(seconds: float) -> bytes:
    return b"%d" % int(1000 * seconds)
