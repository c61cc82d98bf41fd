"""Leases of lookups: pages in host memory that are held until they are loaded or released.

SGLang treats a failed load as an error, so pages in lower tiers are not promised. Their promotion begins, and a later
lookup of the same request finds them. A lease that is never loaded is released after `MAX_LEASE_S`, or when too many
are open.

A model may have several pools. Some pools need every page of the prefix; others (a window, a state) need only the last
pages before its end. The latter are present at some ends only, so an end is promised where all pools agree.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvcache.cache.api import NamespaceHandle, Request
from kvcache.connector.sglang.pool_store import release

HOST = "host"
MAX_LEASES = 256
MAX_LEASE_S = 60.0
RENEW_S, POLL_S = 0.25, 0.001
MAX_ENDS = 4
"""Ends of a prefix that are held for a pool that needs only the last pages. The ranks have to agree on one of them."""
MAX_END_PROBES = 256
"""Limit of the places that are probed for such ends, from the end of the prefix."""


@dataclass(slots=True)
class _Tail:
    end: int
    keys: tuple[str, ...]
    request: Request


@dataclass(slots=True)
class _Lease:
    keys: tuple[str, ...]
    last: Mapping[str, int]
    since: float
    whole: dict[str, Request] = field(default_factory=dict)
    tails: dict[str, list[_Tail]] = field(default_factory=dict)
    reach: int = 0  # how far the tails were searched

    def close(self) -> None:
        release(self.whole.values())
        release(tail.request for tails in self.tails.values() for tail in tails)


class LookupLeases:
    """The open leases of the linker.

    Args:
        pools: namespaces by pool. A pool that a lookup does not mention needs every page of a prefix.
        wait_s: how long the first lookup of a request waits for promotions, so that an idle server need not compute.

    Thread safety: not thread-safe; SGLang's scheduler is the only caller.
    """

    def __init__(
        self, pools: Mapping[str, NamespaceHandle], wait_s: float, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._pools, self._wait_s, self._now = pools, wait_s, now
        self._open: OrderedDict[str, _Lease] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def loadable_lengths(self, rid: str, keys: Sequence[str], last: Mapping[str, int] | None = None) -> list[int]:
        """Return every number of leading pages that can certainly be loaded.

        Args:
            last: for pools that need only the last pages before the end, how many.
        """
        self._expire()
        lease, wanted, last = self._open.get(rid), tuple(keys), dict(last or {})
        until = self._now()
        if lease is None or lease.keys != wanted or lease.last != last:
            until += self._wait_s
            lease = self._begin(rid, wanted, last)
        elif until - lease.since > RENEW_S:
            lease = self._begin(rid, wanted, last)  # the next part: a request promotes one load
        while True:
            ends, moving = self._look(lease)
            if not moving or self._now() >= until:
                return ends
            time.sleep(POLL_S)

    def claim(self, rid: str, wanted: Mapping[str, Sequence[str]]) -> dict[str, Request] | None:
        """Return the request of these pages by pool, now owned by the caller; None where a page has left host
        memory."""
        lease = self._open.pop(rid, None)
        if lease is None:
            return None
        try:
            taken = {name: self._held(lease, name, tuple(keys)) for name, keys in wanted.items()}
        except BaseException:
            lease.close()
            raise
        kept = {name: request for name, request in taken.items() if request is not None}
        if len(kept) < len(taken):
            lease.close()
            return None
        for name, request in kept.items():
            if lease.whole.get(name) is request:
                del lease.whole[name]
            lease.tails[name] = [tail for tail in lease.tails.get(name, ()) if tail.request is not request]
        lease.close()
        return kept

    def cancel(self, rid: str) -> None:
        lease = self._open.pop(rid, None)
        if lease is not None:
            lease.close()

    def clear(self) -> None:
        for rid in list(self._open):
            self.cancel(rid)

    def _begin(self, rid: str, keys: tuple[str, ...], last: Mapping[str, int]) -> _Lease:
        lease = _Lease(keys, last, self._now())
        try:
            for name, handle in self._pools.items():
                if name not in last:
                    lease.whole[name] = self._ask(handle, keys)
        except BaseException:
            lease.close()
            raise
        self.cancel(rid)  # after the new one holds the same pages
        self._open[rid] = lease
        return lease

    @staticmethod
    def _ask(handle: NamespaceHandle, keys: Sequence[str]) -> Request:
        request = handle.request()
        try:
            request.match(digests=_digests(keys), after=b"")
        except BaseException:
            release([request])
            raise
        return request

    def _look(self, lease: _Lease) -> tuple[list[int], bool]:
        """Return the ends that can be promised now, and whether pages are still being promoted."""
        known, host_blocks, moving = len(lease.keys), len(lease.keys), False
        for name, request in lease.whole.items():
            hit = request.match()
            if not hit.pending:
                request.admit()
            in_host = hit.by_tier.get(HOST, 0)
            moving = moving or hit.pending or in_host < hit.blocks
            known = min(known, hit.blocks)
            host_blocks = min(host_blocks, self._host_prefix_blocks(name, lease.keys, hit.blocks, in_host))
        ends = set(range(1, host_blocks + 1))
        for name, count in lease.last.items():
            if name not in lease.tails or lease.reach < known:
                release(old.request for old in lease.tails.pop(name, ()))
                lease.tails[name] = self._tails(name, lease.keys[:known], count)
            in_host_ends = set()
            for tail in lease.tails[name]:
                if tail.request.match().by_tier.get(HOST, 0) == len(tail.keys):
                    in_host_ends.add(tail.end)
                else:
                    moving = True
            ends &= in_host_ends
        lease.reach = max(lease.reach, known)
        return sorted(ends), moving

    def _tails(self, name: str, keys: tuple[str, ...], count: int) -> list[_Tail]:
        """Return the last ends before which `count` pages are present in any tier, and begin their promotion."""
        found: list[_Tail] = []
        end = len(keys)
        for _ in range(MAX_END_PROBES):
            if end <= 0 or len(found) == MAX_ENDS:
                break
            first = max(0, end - max(1, count))
            wanted = keys[first:end]
            request = self._ask(self._pools[name], wanted)
            run = request.match().blocks
            if run == len(wanted):
                request.admit()
                found.append(_Tail(end, wanted, request))
                end -= 1
            else:
                release([request])
                end = first + run  # a page missing there is missing for each end that needs it
        return found

    def _held(self, lease: _Lease, name: str, keys: tuple[str, ...]) -> Request | None:
        request = lease.whole.get(name)
        if request is not None:
            if lease.keys[: len(keys)] != keys:
                return None
            hit = request.match()
            host_blocks = self._host_prefix_blocks(name, lease.keys, hit.blocks, hit.by_tier.get(HOST, 0))
            return request if host_blocks >= len(keys) else None
        for tail in lease.tails.get(name, ()):
            if tail.keys == keys and tail.request.match().by_tier.get(HOST, 0) == len(keys):
                return tail.request
        return None

    def _host_prefix_blocks(self, name: str, keys: Sequence[str], blocks: int, in_host: int) -> int:
        """Return the number of leading blocks in host memory, of `blocks` leading ones of which `in_host` lie in
        host."""
        if blocks == in_host:
            return blocks
        low, high = 0, blocks
        digests = _digests(keys[:blocks])
        with self._pools[name].request() as probe:
            while low < high:
                middle = (low + high + 1) // 2
                hit = probe.match(digests=digests[:middle], after=b"")
                if hit.by_tier.get(HOST, 0) == middle:
                    low = middle
                else:
                    high = middle - 1
        return low

    def _expire(self) -> None:
        limit = self._now() - MAX_LEASE_S
        while self._open and (len(self._open) >= MAX_LEASES or next(iter(self._open.values())).since < limit):
            self.cancel(next(iter(self._open)))


def _digests(keys: Sequence[str]) -> list[bytes]:
    return [bytes.fromhex(key) for key in keys]


# Consensus of the tensor ranks of one model: a decision holds where every rank agrees.


@dataclass(frozen=True, slots=True)
class RankConsensus:
    """`groups` are those of torch.distributed over which SGLang itself reduces the results of a lookup."""

    rank: int = 0
    size: int = 1
    groups: Sequence[Any] = ()

    @classmethod
    def of(cls, params: Any) -> RankConsensus:
        import torch.distributed as dist

        named = [getattr(params, name, None) for name in ("attn_cp_cache_group", "attn_tp_cache_group")]
        groups = [group for group in named if group is not None and dist.get_world_size(group) > 1]
        tensor = named[1] if named[1] is not None else getattr(params, "tp_cache_group", None)
        if tensor is None:
            return cls()
        size = dist.get_world_size(tensor)
        if not groups and size > 1:
            groups = [tensor]
        return cls(dist.get_rank(tensor), size, tuple(groups))

    def all_agree(self, mine: bool) -> bool:
        """Return whether every rank agrees. Every rank has to call this, in the same order."""
        if not self.groups:
            return mine
        import torch
        import torch.distributed as dist

        vote = torch.tensor([int(mine)], dtype=torch.int)
        for group in self.groups:
            dist.all_reduce(vote, op=dist.ReduceOp.MIN, group=group)
        return bool(vote.item())
