"""`KVCacheTier`: this cache as a secondary tier below vLLM's own offloading to host memory.

    {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {
        "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 8589934592,
        "secondary_tiers": [{"type": "KVCacheTier", "module_path": "kvcache.connector.vllm.tier",
                             "settings": {"nvme": {"path": "/data/kv"}}}]}}

vLLM moves chunks between its pages and its host memory. It asks this tier for each chunk by block hash and group. A
chunk is one opaque block here.

Thread safety: runs on the scheduler's thread. Only `drain_jobs` and `shutdown` wait.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from time import monotonic
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, Medium, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvcache.block.layout import Group, KVLayout
from kvcache.cache.api import Hit, NamespaceHandle, Request
from kvcache.connector.guard import GuardedTransfer, call_guarded
from kvcache.connector.vllm import version
from kvcache.connector.vllm.config import TierOptions, parse_options
from kvcache.connector.vllm.identity import checkpoint_of, resolve_revision
from kvcache.connector.vllm.shared_cache import open_tier_cache
from kvcache.errors import ModelError
from kvcache.transfer.pages import GroupPages

ABANDONED_LOOKUP_S = 60.0

_log = logging.getLogger("kvcache.connector.vllm")


@dataclass(slots=True)
class JobPart:
    """Consecutive keys of a job, each the parent of the next, and their transfer."""

    keys: Sequence[bytes]
    request: Request
    transfer: GuardedTransfer


@dataclass(slots=True)
class Job:
    id: int
    load: bool
    begun: float
    keys: Sequence[bytes]
    request_id: str
    parts: list[JobPart] = field(default_factory=list)
    failed: bool = False  # it could not begin


@dataclass(slots=True)
class PendingLookup:
    """A lookup of one key in other tiers, without an answer yet."""

    request: Request
    give_up_s: float


class KVCacheTier(SecondaryTierManager):
    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **extra: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        extra.pop("locality", None)
        self._options = parse_options(extra, TierOptions, where="secondary_tiers")
        self._view = np.asarray(primary_kv_view)
        self._disabled_reason = ""
        try:
            self._identity = _identity(offloading_spec, self._options)
        except (ModelError, OSError) as error:
            self._disabled_reason = str(error)
            _log.error("lower tiers are off: %s", error)
        chunk_bytes = self.block_size_bytes
        config = offloading_spec.config
        tokens = config.cache.tokens_per_hash * max(1, config.cache.blocks_per_chunk)
        group = Group(layers=1, kv_heads=1, head_dim=0, dtype="bf16", kind="opaque", opaque_bytes=chunk_bytes)
        self._layout, self._chunk_tokens = KVLayout((group,), tokens), tokens
        self._pages = [
            GroupPages(
                layout=self._layout,
                group=0,
                shard=group.whole,
                bases=np.array([[self._view.ctypes.data]], np.uint64),
                pages=self._view.shape[0],
                page_stride=chunk_bytes,
                token_stride=0,
                head_stride=0,
                owner=self._view,
            )
        ]
        self._cache = open_tier_cache(self._options)
        self._handle: NamespaceHandle | None = None
        self._epoch = ""
        self._jobs: dict[int, Job] = {}
        self._pending_lookups: dict[bytes, PendingLookup] = {}
        self._failed: dict[str, set[bytes]] = {}  # by open request: keys that were promised and not loaded

    # Lookups

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        if key in self._failed.get(req_context.req_id, ()):
            return LookupResult.MISS
        hit = call_guarded(Hit(0, 0), self._look, bytes(key))
        if hit is None:
            return LookupResult.RETRY
        return LookupResult.HIT if hit.blocks else LookupResult.MISS

    def _look(self, key: bytes) -> Hit | None:
        """Look a key up; None while the lookup is pending."""
        pending = self._pending_lookups.pop(key, None)
        if pending is not None:
            hit = pending.request.match()
        else:
            handle = self._namespace()
            if handle is None:
                return Hit(0, 0)
            pending = PendingLookup(
                handle.request(deadline_s=self._options.load_s), monotonic() + self._options.lookup_s
            )
            hit = pending.request.match(digests=[key], after=b"")
        if hit.pending and not hit.blocks and monotonic() < pending.give_up_s:
            self._pending_lookups[key] = pending
            return None
        call_guarded(None, pending.request.close)
        return hit

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        self._failed[req_context.req_id] = set()
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        self._failed.pop(req_context.req_id, None)

    # Transfers

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._submit(job_metadata, load=False)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._submit(job_metadata, load=True)

    def _submit(self, transfer_job: TransferJob, *, load: bool) -> None:
        keys, chunks = list(map(bytes, transfer_job.keys)), [int(chunk) for chunk in transfer_job.chunk_ids]
        job = self._jobs[transfer_job.job_id] = Job(
            transfer_job.job_id, load, monotonic(), keys, transfer_job.req_context.req_id
        )

        def begin() -> bool:
            handle = self._namespace()
            if handle is None:
                return False
            for first, end in self._runs(keys, transfer_job.req_context):
                request = handle.request(deadline_s=self._options.load_s)
                with ExitStack() as on_fault:
                    on_fault.callback(call_guarded, None, request.close)
                    transfer = self._begin(request, keys[first:end], chunks[first:end], load=load)
                    on_fault.pop_all()
                job.parts.append(JobPart(keys[first:end], request, transfer))
            return True

        job.failed = not call_guarded(False, begin)

    def _begin(self, request: Request, keys: Sequence[bytes], chunks: Sequence[int], *, load: bool) -> GuardedTransfer:
        request.match(digests=keys, after=b"")
        if not load:
            return GuardedTransfer(request.store(self._pages, [chunks]))
        request.admit()
        return GuardedTransfer(request.load(len(keys), self._pages, [chunks]))

    def _runs(self, keys: Sequence[bytes], context: Any) -> Iterator[tuple[int, int]]:
        """Yield ranges (first, end) of keys that follow one another in their request. A block stored under a wrong
        parent would fail the check of every later read."""
        at = [context.get_offload_key_position(key) for key in keys]
        cuts = [
            i
            for i, (one, two) in enumerate(pairwise(range(len(keys))), 1)
            if keys[one][-4:] != keys[two][-4:]
            or at[one] is None
            or at[two] is None
            or at[two] - at[one] != self._chunk_tokens
        ]
        return pairwise([0, *cuts, len(keys)])

    def get_finished_jobs(self) -> Iterable[JobResult]:
        results = []
        for job in list(self._jobs.values()):
            if all(part.transfer.done for part in job.parts):
                del self._jobs[job.id]
                results.append(self._result(job))
        return results

    def _result(self, job: Job) -> JobResult:
        came = [key for part in job.parts for key in part.keys[: part.transfer.blocks]]
        whole = not job.failed and len(came) == sum(len(part.keys) for part in job.parts)
        if job.load and not whole:
            self._failed.get(job.request_id, set()).update(set(job.keys).difference(came))
        for part in job.parts:
            call_guarded(None, part.request.close)
        return JobResult(
            job.id,
            whole,
            successful_keys=tuple(came) if job.load and not whole else None,
            transfer_time=monotonic() - job.begun,
            transfer_bytes=len(came) * self.block_size_bytes,
        )

    def on_schedule_end(self, context: Any) -> None:
        """Close lookups whose requests have disappeared."""
        now = monotonic()
        for key in [
            key for key, pending in self._pending_lookups.items() if now > pending.give_up_s + ABANDONED_LOOKUP_S
        ]:
            call_guarded(None, self._pending_lookups.pop(key).request.close)

    # Shutdown and reset

    def drain_jobs(self) -> None:
        """End all jobs and begin a new namespace. vLLM drops its blocks since weights may have changed, so blocks
        stored before must not be found."""
        for job in self._jobs.values():
            for part in job.parts:
                part.transfer.cancel()
                if not part.transfer.wait(ABANDONED_LOOKUP_S):
                    _log.error("copy has not ended: chunks=%d", len(part.keys))
        self._handle, self._epoch = None, uuid.uuid4().hex

    def shutdown(self) -> None:
        for pending in self._pending_lookups.values():
            call_guarded(None, pending.request.close)
        self._pending_lookups.clear()
        call_guarded(None, self._cache.close)
        self._pages.clear()  # vLLM unmaps the memory behind them
        del self._view

    # Internals

    def _namespace(self) -> NamespaceHandle | None:
        """Return the namespace, bound on first use because vLLM chooses the root of its hashes late. None where vLLM's
        hashes differ between processes."""
        if self._handle is None and not self._disabled_reason:
            origin = version.hash_origin("sha256") or version.hash_origin("sha256_cbor")
            if origin is None:
                self._disabled_reason = (
                    "vLLM's block hashes differ between processes (prefix_caching_hash_algo, PYTHONHASHSEED, or a "
                    "version before 0.30): lower tiers are off"
                )
                _log.error("%s", self._disabled_reason)
                return None
            name, revision, facts = self._identity
            facts = {**facts, "digests": origin, **({"since": self._epoch} if self._epoch else {})}
            self._handle = self._cache.namespace(
                self._layout, model=name, revision=revision, tenant=self._options.tenant, facts=facts
            )
        return self._handle


def _identity(spec: Any, options: TierOptions) -> tuple[str, str, dict[str, Any]]:
    """Return name, revision and facts: everything that decides the bytes of a chunk."""
    config = spec.config
    name, revision = resolve_revision(config.model.name, options, str(config.engine_id))
    parallel = config.parallel
    return (
        name,
        revision,
        {
            "engine": "vllm offloading",
            "version": version.VERSION,
            "checkpoint": checkpoint_of(config.model.name),
            "dtype": str(config.model.dtype),
            "layout": str(config.kv_cache_layout),
            "canonical": bool(config.canonical_layout),
            "worker_bytes": int(config.worker_kv_bytes_per_block),
            "blocks": int(config.cache.blocks_per_chunk),
            "groups": [[int(g.tokens_per_block), *g.layer_names] for g in config.groups],
            "ranks": [int(n) for n in (parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size)],
        },
    )
