"""The Redis tier: a `Tier` over Redis or Valkey servers that a fleet of caches shares.

The tier stores each record as a string value. The key is derived from the record's address alone, so every process of
the fleet finds a record without coordination. `docs/spec/redis.md` specifies keys, values and expiry.

Design
------
The server owns capacity. `maxmemory` and the server's eviction policy decide which values stay. The tier keeps no
index of the server: other processes write to it, and the server evicts without notice. An evicted value is a miss.
The tier avoids three alternatives:

- A local index of the server's keys would be wrong after each eviction and each write of another process. Lookups read
  the first 174 bytes of a value instead (`lookup.py`). The lookup remembers a head only while the server promises to
  report changes (client tracking), or for half a second without that promise.
- A lookup per block would cost one command a block. A tail is stored behind its head, so `match_prefix` finds the
  end of a chain in a few rounds of sixteen probes. A hole between probes shows when the blocks are read.
- redis-py makes an object of each value and so copies it twice. It is used only to connect and authenticate
  (`connect.py`). `wire.py` sends payloads from the caller's memory and receives them into it.

A payload above `part_bytes` is split, so that no single value stops the server for long. `store.py` writes the further
parts first and the header last.

`QueuedTier` splits a batch into pieces. `_execute` partitions a piece by server (`cluster.py`). Each share runs on one
connection of a pool (`pool.py`), where `Store` reads, writes, looks up or removes the records.

Invariants
----------
- A cache fault never fails a request: `_execute` turns every `OSError` into an outcome, and settles every block.
- A block settles as read only after its whole identity and all checksums were compared.
- Writes set a record's key only where no value exists (`NX`), and only after the parts that the record needs.
- A record's key does not outlive its parts by its own expiry. A write id in part keys keeps two writes apart.
- The server compares a value with the head that was read before it removes the value, in one script.
- Credentials stay in `connect.py`. Log lines and outcomes hold the kind of an error, never its text.

Threads and locks
-----------------
`connections` worker threads execute pieces. Writers never take all of them when there is more than one. One further
thread runs lookups; `PrefixLookup` and its caches belong to it and take no lock. `usage`, `check`, `scan`, `purge` and
the owner calls run on the caller's thread. Each running call has a connection for itself. `ConnectionPool` and
`ClusterTopology` each guard their tables with one lock. A cluster's lock is held while it reads the slot map.

A breaker for each server stops calls after three failures in a row and probes until one succeeds. A second breaker
stops only writes, because a full or read-only server still answers reads.

Changing it
-----------
Another key or record format needs a new `k..r..` version in `keys.py` and the specification; both can share a server.
Another server protocol needs replacements of `Endpoint`, `RespConnection` and the commands in `store.py`. The contract
suite in `kvcache/testing/tier.py` applies to any implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from kvcache.block.cipher import RecordSigner
from kvcache.block.namespace import Owner
from kvcache.block.record import Address
from kvcache.os_env import OsEnv
from kvcache.settings.tiers import RedisSettings
from kvcache.tier.breaker import CircuitBreaker
from kvcache.tier.io_queue import Batch
from kvcache.tier.redis import keys as owners
from kvcache.tier.redis.cluster import ConnectionConfig, ServerBatch, SingleServer, ask_all
from kvcache.tier.redis.inspect import ServerInspector
from kvcache.tier.redis.keys import KeyNames, popularity_keys
from kvcache.tier.redis.lookup import PrefixLookup
from kvcache.tier.redis.pool import log, reason
from kvcache.tier.redis.store import MAX_PART_TTL_MS, Completion, RecordTTL, Store
from kvcache.tier.remote import RemoteTier
from kvcache.tier.tier import Op, Outcome, Usage, parents_first

_CLOSE_S = 2.0  # how long `close` waits for running calls before it cuts their connections
_MAX_REDIRECTS = 3  # rounds in which a call follows keys that move between servers

Work = Callable[..., None]


class RedisTier(RemoteTier):
    """Records in a Redis or Valkey server (6.2 or newer), under keys that begin with `prefix`.

    The constructor sends nothing to the server. An unreachable server is a miss until it answers.
    """

    name = "redis"

    def __init__(self, settings: RedisSettings, os_env: OsEnv | None = None) -> None:
        super().__init__(connections=settings.connections, queue_bytes=settings.queue_bytes, os_env=os_env, log=log)
        clock, servers = self._os_env.clock, ConnectionConfig(settings)
        self.where = servers.name
        self._nodes = servers.nodes(clock, self._counters)
        self._write_breaker = CircuitBreaker(clock, pause_s=0.25, max_pause_s=10.0)
        names = self._names = KeyNames(settings.prefix, cluster=settings.mode == "cluster")
        key_file = settings.signing_key_file
        self._store = Store(
            names,
            self._counters,
            self._write_breaker,
            part_bytes=settings.part_bytes,
            ttl=RecordTTL(int(settings.expire_s * 1000), MAX_PART_TTL_MS, clock),
            signer=RecordSigner.of(key_file, "redis.signing_key_file") if key_file else None,
        )
        self._inspector = ServerInspector(names, self._store)
        self._lookup = PrefixLookup(self._nodes, names, self._store, clock)
        self._timeout_s = settings.timeout_s

    def _failing(self, op: Op) -> bool:
        open_ = any(pool.breaker.is_open() for pool in self._nodes.pools())
        return open_ or (op == "write" and self._write_breaker.is_open())

    def _execute(self, piece: Batch) -> None:
        remaining: dict[int, str] | None = None  # None: all blocks
        try:
            for _ in range(_MAX_REDIRECTS):
                remaining = self._run_on_each(piece, remaining)
                if not remaining:
                    return
        except OSError as error:  # the topology could not be read
            self._settle_rest(
                piece, Outcome.TIMED_OUT if isinstance(error, TimeoutError) else Outcome.FAILED, reason(error)
            )
        self._settle_rest(piece, Outcome.FAILED, "moved")

    def _run_on_each(self, piece: Batch, remaining: dict[int, str] | None) -> dict[int, str]:
        """Run the piece on the servers that own its blocks; return the blocks that moved, with the server named."""
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
        """Yield each server's share of a piece, as a batch and its completion."""
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
        """Settle the blocks of a batch that are not settled yet."""
        Completion(batch, self._counters).settle_rest(outcome, check)

    def forget(self) -> None:
        """Drop the heads that lookups remember."""
        self._asking.submit(self._lookup.forget).result()

    def _match_prefix(self, addresses: Sequence[Address], deadline: float | None) -> int:
        limit = self._os_env.clock.now() + self._timeout_s
        return self._lookup.match_prefix(addresses, limit if deadline is None else min(limit, deadline))

    @property
    def breaker(self) -> str:
        """`open` while the breaker of any server is open, else `closed`. An open breaker still allows probes."""
        return "open" if any(self.breakers.values()) else "closed"

    @property
    def breakers(self) -> dict[str, bool]:
        """Return for each server whether its breaker is open."""
        return {pool.name: pool.breaker.is_open() for pool in self._nodes.pools()}

    def free_slots(self, record_bytes: int) -> int:
        """Return how many records fit in the servers' memory: all of it where a server evicts, else the free part."""
        facts = ask_all(self._nodes, self._inspector.memory) or []
        return sum(fact.free_slots(record_bytes) for fact in facts if fact)

    def scan(self) -> Iterator[Address]:
        """Return all records of this prefix, parents first. Reads the head of each record."""
        answers = ask_all(self._nodes, self._inspector.scan) or []
        return iter(parents_first([address for some in answers for address in some]))

    def purge(self, namespace: bytes) -> int:
        """Remove a namespace's popularity counts and the further parts of its records, those of evicted records too.

        The caller removes the records themselves, one by one.

        Raises:
            OSError: A server does not answer, or refuses.
        """
        if ask_all(self._nodes, partial(self._inspector.purge, namespace=namespace)) is None:
            raise OSError(f"redis {self.where}: the server does not answer, or refuses SCAN")
        keys = popularity_keys(self._names.prefix, namespace)
        for pool, *_ in self._nodes.partition(keys[:1], None):
            pool.run(lambda wire: wire.ask(b"UNLINK", *keys), None)
        return 0  # the caller removed the records themselves

    def note_owner(self, namespace: bytes, owner: Owner) -> None:
        owners.record_owner(self._nodes, self._names, namespace, owner)

    def owners(self) -> Mapping[bytes, Owner]:
        """Return the owner of each namespace. Raises OSError where a server does not answer, or refuses."""
        answers = owners.read_owners(self._nodes, self._names)
        if answers is None:
            raise OSError(f"redis {self.where}: the server does not answer, or refuses SCAN")
        return answers

    def usage(self) -> Usage:
        """Return the keys of the database, by any writer, and the bytes of whole servers.

        All are 0 while any server does not answer.
        """
        facts = [fact.usage() for fact in ask_all(self._nodes, self._inspector.memory) or [] if fact]
        return Usage(
            sum(fact.records for fact in facts),
            sum(fact.used_bytes for fact in facts),
            sum(fact.capacity_bytes for fact in facts),
        )

    def policies(self) -> set[str]:
        """Return the servers' eviction policies, "" for one without a limit. Empty while any does not answer."""
        return {fact.policy for fact in ask_all(self._nodes, self._inspector.memory) or [] if fact}

    def check(self) -> list[str]:
        """Return faults: records under another record's key, or of a wrong length. Reads no payload."""
        if self._closed:
            return []
        faults = ask_all(self._nodes, self._inspector.check)
        if faults is None:
            return [f"redis {self.where}: the server does not answer"]
        return [fault for some in faults for fault in some]

    def health_issues(self) -> list[str]:
        """Return a line for each server whose breaker is open."""
        write_breaker = [] if self._closed else [name for name, write_breaker in self.breakers.items() if write_breaker]
        return [f"redis {name}: the server does not answer or refuses; the tier retries" for name in write_breaker]

    def _disconnect(self) -> None:
        self._nodes.close()

    def close(self) -> bool:
        """Finish submitted work for up to 2 s, then cut the connections; unfinished work fails. Idempotent."""
        return self._close(_CLOSE_S)
