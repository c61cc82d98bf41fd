"""The Redis tier: the contract of a tier over a server that others use as well.

Its room is the server's: `maxmemory` and the server's eviction decide what stays, and a value that went is a miss.
Nothing is remembered here of what is there. Threads are bounded and have one connection each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

from kvcache.block.cipher import RecordSigner
from kvcache.block.namespace import Owner
from kvcache.block.record import CHUNK_BYTES, Address
from kvcache.errors import ConfigError
from kvcache.os_env import OsEnv
from kvcache.tier.breaker import CircuitBreaker
from kvcache.tier.io_queue import Batch
from kvcache.tier.redis import keys as owners
from kvcache.tier.redis.cluster import ConnectionConfig, ServerBatch, SingleServer, ask_all
from kvcache.tier.redis.inspect import ServerInspector
from kvcache.tier.redis.keys import KeyNames, popularity_keys
from kvcache.tier.redis.lookup import PrefixLookup
from kvcache.tier.redis.pool import log, reason
from kvcache.tier.redis.store import MAX_IN_FLIGHT_BYTES, Completion, RecordTTL, Store
from kvcache.tier.remote import RemoteTier
from kvcache.tier.tier import Op, Outcome, Usage, parents_first

_CLOSE_S = 2.0  # how long closing waits for what is under way before it cuts the connections
_MAX_REDIRECTS = 3  # how often a call follows keys that are moved between servers

Work = Callable[..., None]


class RedisTier(RemoteTier):
    """Records in a Redis or Valkey server (6.2 or newer), under keys that begin with `prefix`.

    `part_bytes`: a longer payload is split; a multiple of 256 KiB, 16 MiB at most. `expire_s`: after so long a record
    goes, 0 for never; the parts of a long one go after `part_expire_s` in any case. `timeout_s`: what a call without a
    deadline of its own may take, and the most that any may. `mode`: the URL names a server, sentinels that know which
    server is `master`, or some servers of a Redis Cluster (several hosts with commas between them).

    Opening asks nothing of the server: one that is away is a miss until it is there.
    """

    name = "redis"

    def __init__(
        self,
        url: str,
        *,
        mode: Literal["standalone", "sentinel", "cluster"] = "standalone",
        master: str = "mymaster",
        username: str = "",
        password_file: str = "",
        sentinel_password_file: str = "",
        tls_ca_file: str = "",
        tls_cert_file: str = "",
        tls_key_file: str = "",
        prefix: str = "kvcache",
        part_bytes: int = 4 << 20,
        expire_s: float = 0,
        part_expire_s: float = 86_400,
        connections: int = 4,
        queue_bytes: int = 256 << 20,
        signing_key_file: str = "",
        timeout_s: float = 5.0,
        os_env: OsEnv | None = None,
    ) -> None:
        if part_bytes % CHUNK_BYTES or not 0 < part_bytes <= MAX_IN_FLIGHT_BYTES:
            raise ConfigError(f"redis.part_bytes = {part_bytes}: expected a multiple of 256 KiB, 16 MiB at most")
        for setting, value, least in (
            ("connections", connections, 1),
            ("queue_bytes", queue_bytes, 1),
            ("timeout_s", timeout_s, 0.001),
            ("expire_s", expire_s, 0),
            ("part_expire_s", part_expire_s, 1),
        ):
            if value < least:
                raise ConfigError(f"redis.{setting} = {value}: expected at least {least}")
        super().__init__(connections=connections, queue_bytes=queue_bytes, os_env=os_env, log=log)
        entrance = ConnectionConfig(
            url,
            username=username,
            password_file=password_file,
            sentinel_password_file=sentinel_password_file,
            tls_ca_file=tls_ca_file,
            tls_cert_file=tls_cert_file,
            tls_key_file=tls_key_file,
        )
        self.where = entrance.name if mode != "sentinel" else f"sentinel {master}"
        self._nodes = entrance.nodes(mode, master, self._os_env.clock, self._counters, timeout_s=timeout_s)
        self._write_breaker = CircuitBreaker(self._os_env.clock, pause_s=0.25, max_pause_s=10.0)
        names = self._names = KeyNames(prefix, cluster=mode == "cluster")
        self._store = Store(
            names,
            self._counters,
            self._write_breaker,
            part_bytes=part_bytes,
            ttl=RecordTTL(int(expire_s * 1000), int(part_expire_s * 1000), self._os_env.clock),
            signer=RecordSigner.of(signing_key_file, "redis.signing_key_file") if signing_key_file else None,
        )
        self._inspector = ServerInspector(names, self._store)
        self._lookup = PrefixLookup(self._nodes, names, self._store, self._os_env.clock)
        self._timeout_s = timeout_s

    def _failing(self, op: Op) -> bool:
        open_ = any(pool.breaker.is_open() for pool in self._nodes.pools())
        return open_ or (op == "write" and self._write_breaker.is_open())

    def _execute(self, piece: Batch) -> None:
        remaining: dict[int, str] | None = None  # all of it
        try:
            for _ in range(_MAX_REDIRECTS):
                remaining = self._run_on_each(piece, remaining)
                if not remaining:
                    return
        except OSError as error:  # nobody knows where the servers are
            self._settle_rest(
                piece, Outcome.TIMED_OUT if isinstance(error, TimeoutError) else Outcome.FAILED, reason(error)
            )
        self._settle_rest(piece, Outcome.FAILED, "moved")

    def _run_on_each(self, piece: Batch, remaining: dict[int, str] | None) -> dict[int, str]:
        """Do the work at the servers that have these blocks; which of them turned out to be elsewhere, and where."""
        work: Work = getattr(self._store, piece.op)
        moved: dict[int, str] = {}
        for share, part, completion in self._parts(piece, remaining):
            try:
                share.pool.run(partial(work, batch=part, settle=completion), piece.deadline, asking=share.asking)
            except OSError as error:
                self._nodes.mark_stale()
                completion.settle_rest(
                    Outcome.TIMED_OUT if isinstance(error, TimeoutError) else Outcome.FAILED, reason(error)
                )
            moved |= completion.moved
            if completion.has_stale_topology:
                self._nodes.mark_stale()
        return moved

    def _parts(self, piece: Batch, remaining: dict[int, str] | None) -> Iterator[tuple[ServerBatch, Batch, Completion]]:
        """What each server is asked for."""
        if isinstance(self._nodes, SingleServer):
            yield ServerBatch(self._nodes.pools()[0], piece.blocks), piece, Completion(piece, self._counters)
            return
        remaining = dict.fromkeys(piece.blocks, "") if remaining is None else remaining
        of = list(remaining)
        names = self._names.records([piece.addresses[i] for i in of])
        for share in self._nodes.partition(names, piece.deadline, list(remaining.values())):
            blocks = [of[k] for k in share.keys]
            segments = [piece.segments[i] for i in blocks] if piece.segments else ()
            addresses = [piece.addresses[i] for i in blocks]
            part = replace(piece, addresses=addresses, segments=segments, first=0, end=len(blocks))
            yield share, part, Completion(piece, self._counters, blocks=blocks, follow=True)

    def _settle_rest(self, batch: Batch, outcome: Outcome, check: str = "") -> None:
        """Settle what of a batch is not settled."""
        Completion(batch, self._counters).settle_rest(outcome, check)

    def forget(self) -> None:
        """What lookups remember: the next one asks for everything."""
        self._asking.submit(self._lookup.forget).result()

    def _match_prefix(self, addresses: Sequence[Address], deadline: float | None) -> int:
        limit = self._os_env.clock.now() + self._timeout_s
        return self._lookup.match_prefix(addresses, limit if deadline is None else min(limit, deadline))

    @property
    def breaker(self) -> str:
        """`open` where that of some server is, else `closed`. While it is open, one call in a while is tried."""
        return "open" if any(self.breakers.values()) else "closed"

    @property
    def breakers(self) -> dict[str, bool]:
        """By server, whether it is left alone for now."""
        return {pool.name: pool.breaker.is_open() for pool in self._nodes.pools()}

    def room(self, record_bytes: int) -> int:
        """As the server's memory has it; where the server evicts by itself there is always room for what fits."""
        facts = ask_all(self._nodes, self._inspector.memory) or []
        return sum(fact.room(record_bytes) for fact in facts if fact)

    def colocated(self, address: Address) -> list[Address]:
        """Only itself: a server gives memory back record by record."""
        answers = ask_all(self._nodes, lambda wire: self._inspector.find(wire, address)) or []
        return [address for some in answers for address in some]

    def scan(self) -> Iterator[Address]:
        """All records of this prefix, each behind its parent where that is here too. Asks for the head of each."""
        answers = ask_all(self._nodes, self._inspector.scan) or []
        return iter(parents_first([address for some in answers for address in some]))

    def purge(self, namespace: bytes) -> int | None:
        """Records go one by one; here goes what a fleet counted of them, and parts whose record was evicted. OSError
        where a server does not answer, or refuses."""
        if ask_all(self._nodes, partial(self._inspector.purge, namespace=namespace)) is None:
            raise OSError(f"redis {self.where}: it does not answer, or does not let its keys be listed")
        keys = popularity_keys(self._names.prefix, namespace)
        for pool, *_ in self._nodes.partition(keys[:1], None):
            pool.run(lambda wire: wire.ask(b"UNLINK", *keys), None)
        return None

    def note_owner(self, namespace: bytes, owner: Owner) -> None:
        owners.record_owner(self._nodes, self._names, namespace, owner)

    def owners(self) -> Mapping[bytes, Owner]:
        """OSError where a server does not answer, or refuses."""
        answers = owners.read_owners(self._nodes, self._names)
        if answers is None:
            raise OSError(f"redis {self.where}: it does not answer, or does not let its keys be listed")
        return answers

    def usage(self) -> Usage:
        """Keys of the database, whoever wrote them; bytes of whole servers. Nothing while one does not answer."""
        facts = [fact.usage() for fact in ask_all(self._nodes, self._inspector.memory) or [] if fact]
        return Usage(
            sum(fact.records for fact in facts),
            sum(fact.used_bytes for fact in facts),
            sum(fact.capacity_bytes for fact in facts),
        )

    def policies(self) -> set[str]:
        """What the servers do when they are full; "" for one without a limit. None where one does not answer."""
        return {fact.policy for fact in ask_all(self._nodes, self._inspector.memory) or [] if fact}

    def check(self) -> list[str]:
        """Whether each record lies under its own key, whole in length. Reads no payload."""
        if self._closed:
            return []
        faults = ask_all(self._nodes, self._inspector.check)
        if faults is None:
            return [f"redis {self.where}: it does not answer"]
        return [fault for some in faults for fault in some]

    def health_issues(self) -> list[str]:
        """A line a server that is left alone."""
        write_breaker = [] if self._closed else [name for name, write_breaker in self.breakers.items() if write_breaker]
        return [f"redis {name}: it does not answer, or refuses; it is tried again by itself" for name in write_breaker]

    def _disconnect(self) -> None:
        self._nodes.close()

    def close(self) -> bool:
        """Run what was submitted, for a moment; what the server leaves unanswered then fails. Idempotent."""
        return self._close(_CLOSE_S)
