"""Inspection of a whole server: its records, memory use and faults."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from kvcache.block.record import CHUNK_BYTES, Address
from kvcache.tier.redis.keys import KeyNames, address_of, header_bytes_of, scan_keys, stored_bytes_of
from kvcache.tier.redis.store import Store
from kvcache.tier.redis.wire import ErrorReply, RespConnection
from kvcache.tier.tier import Usage, parents_first

_SCAN_BATCH_KEYS = 500


@dataclass(frozen=True, slots=True)
class MemoryUsage:
    records: int
    used_bytes: int
    max_bytes: int
    policy: str  # `maxmemory-policy`; empty where `maxmemory` is not set

    @property
    def limited(self) -> bool:
        """Whether a full server refuses writes instead of evicting."""
        return self.policy == "noeviction"

    def free_slots(self, record_bytes: int) -> int:
        free = self.max_bytes - (self.used_bytes if self.limited else 0)
        return max(0, free // record_bytes)

    def usage(self) -> Usage:
        return Usage(self.records, self.used_bytes, self.max_bytes)


class ServerInspector:
    def __init__(self, names: KeyNames, store: Store) -> None:
        self._names, self._store = names, store

    def memory(self, wire: RespConnection) -> MemoryUsage | None:
        info, keys = wire.ask(b"INFO", b"memory"), wire.ask(b"DBSIZE")
        if not isinstance(info, bytes) or not isinstance(keys, int):
            return None
        facts = dict(line.split(":", 1) for line in info.decode().splitlines() if ":" in line)
        limit = int(facts.get("maxmemory", 0))
        return MemoryUsage(
            records=keys,
            used_bytes=int(facts.get("used_memory", 0)),
            max_bytes=limit or int(facts.get("total_system_memory", 0)),
            policy=facts.get("maxmemory_policy", "unknown") if limit else "",
        )

    def scan(self, wire: RespConnection) -> list[Address]:
        found = (address_of(head) for _, head in self._heads(wire) if not isinstance(head, ErrorReply))
        return parents_first([address for address in found if address is not None])

    def check(self, wire: RespConnection) -> list[str]:
        faults = []
        for name, head in self._heads(wire):
            if not head:
                continue  # removed since the scan
            address = None if isinstance(head, ErrorReply) else address_of(head)
            if address is None or isinstance(head, ErrorReply):
                faults.append(f"redis: {name.decode()} holds no record")
            elif self._names.record(address) != name:
                faults.append(f"redis: {name.decode()} holds the record of another address")
            else:
                payload = wire.ask(b"STRLEN", name) - header_bytes_of(head)
                stored = stored_bytes_of(head)
                if payload >= 0 and payload != stored and (not 0 < payload < stored or payload % CHUNK_BYTES):
                    faults.append(f"redis: {name.decode()} holds {payload} bytes of payload, {stored} were stored")
        return faults

    def _heads(self, wire: RespConnection) -> Iterator[tuple[bytes, bytes | ErrorReply]]:
        names = self._keys(wire)
        while some := list(islice(names, _SCAN_BATCH_KEYS)):
            wire.extend_deadline()
            yield from zip(some, self._store.heads(wire, some), strict=True)

    def _keys(self, wire: RespConnection) -> Iterator[bytes]:
        """Yield the keys of records, each once; SCAN may return a key twice."""
        seen: set[bytes] = set()
        for name in scan_keys(wire, self._names.pattern):
            if self._names.is_record(name) and name not in seen:
                seen.add(name)
                yield name

    def purge(self, wire: RespConnection, namespace: bytes) -> None:
        """Unlink the further parts of this namespace's records, also those whose head was evicted."""
        parts = [
            name for name in scan_keys(wire, self._names.namespace_pattern(namespace)) if self._names.is_part(name)
        ]
        for name in parts:
            wire.extend_deadline()
            wire.ask(b"UNLINK", name)
