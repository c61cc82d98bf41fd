"""Small notes that a fleet shares in its Redis, beside the records: `docs/spec/fleet.md` says which."""

from __future__ import annotations

from functools import partial
from typing import Any

from kvcache.os_env import Port
from kvcache.settings.tiers import Redis
from kvcache.tier.breaker import Counters
from kvcache.tier.redis.cluster import Entrance
from kvcache.tier.redis.connect import RefusedError
from kvcache.tier.redis.pool import ELSEWHERE
from kvcache.tier.redis.wire import Wire, Wrong

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
