"""Our tiers below vLLM's own offloading to host memory: a secondary tier for its `OffloadingConnector`.

    {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {
        "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 8589934592,
        "secondary_tiers": [{"type": "KVCacheTier", "module_path": "kvcache.connector.vllm.tier",
                             "settings": {"nvme": {"path": "/data/kv"}}}]}}

vLLM moves chunks between its pages and its host memory, and asks us about each chunk by its block hash and group. A
chunk is one opaque block here. Runs on the scheduler's thread, so nothing here waits but `drain_jobs` and `shutdown`.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from time import monotonic
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, Medium, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvcache.block.layout import Group, KVLayout
from kvcache.cache.api import Bound, Hit, Request
from kvcache.connector.vllm import version
from kvcache.connector.vllm.config import TierOptions, read
from kvcache.connector.vllm.connector import below
from kvcache.connector.vllm.guard import Calm, quietly, say
from kvcache.connector.vllm.identity import checkpoint_of, revision_of
from kvcache.errors import ModelError
from kvcache.transfer.pages import GroupPages

PATIENCE_S = 60.0

_log = logging.getLogger("kvcache.connector.vllm")


@dataclass(slots=True)
class Part:
    """Keys of a job of which each is the parent of the next, and their transfer."""

    keys: Sequence[bytes]
    request: Request
    transfer: Calm


@dataclass(slots=True)
class Job:
    id: int
    load: bool
    begun: float
    keys: Sequence[bytes]
    request_id: str
    parts: list[Part] = field(default_factory=list)
    failed: bool = False  # it could not begin


@dataclass(slots=True)
class Asked:
    """A key that other tiers are being asked about."""

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
        self._options = read(extra, TierOptions, where="secondary_tiers")
        self._view = np.asarray(primary_kv_view)
        self._off = ""
        try:
            self._identity = _identity(offloading_spec, self._options)
        except (ModelError, OSError) as error:
            self._off = str(error)
            _log.error("nothing is kept below host memory: %s", error)
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
        self._cache = below(self._options)
        self._bound: Bound | None = None
        self._since = ""
        self._jobs: dict[int, Job] = {}
        self._asked: dict[bytes, Asked] = {}
        self._failed: dict[str, set[bytes]] = {}  # by open request: what was promised and did not come

    # asking

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        if key in self._failed.get(req_context.req_id, ()):
            return LookupResult.MISS
        try:
            hit = self._look(bytes(key))
        except Exception as error:  # noqa: BLE001  law: never in the way; the chunk counts as missing
            say("a lookup", error)
            return LookupResult.MISS
        if hit is None:
            return LookupResult.RETRY
        return LookupResult.HIT if hit.blocks else LookupResult.MISS

    def _look(self, key: bytes) -> Hit | None:
        """None: others are still being asked."""
        asked = self._asked.pop(key, None)
        if asked is not None:
            hit = asked.request.match()
        else:
            bound = self._namespace()
            if bound is None:
                return Hit(0, 0)
            asked = Asked(bound.request(deadline_s=self._options.load_s), monotonic() + self._options.lookup_s)
            hit = asked.request.match(digests=[key], after=b"")
        if hit.pending and not hit.blocks and monotonic() < asked.give_up_s:
            self._asked[key] = asked
            return None
        quietly(None, asked.request.close)
        return hit

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        self._failed[req_context.req_id] = set()
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        self._failed.pop(req_context.req_id, None)

    # moving

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._submit(job_metadata, load=False)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._submit(job_metadata, load=True)

    def _submit(self, told: TransferJob, *, load: bool) -> None:
        keys, chunks = list(map(bytes, told.keys)), [int(chunk) for chunk in told.chunk_ids]
        job = self._jobs[told.job_id] = Job(told.job_id, load, monotonic(), keys, told.req_context.req_id)
        try:
            bound = self._namespace()
            if bound is None:
                job.failed = True
                return
            for first, end in self._runs(keys, told.req_context):
                request = bound.request(deadline_s=self._options.load_s)
                try:
                    transfer = self._begin(request, keys[first:end], chunks[first:end], load=load)
                except Exception:
                    quietly(None, request.close)
                    raise
                job.parts.append(Part(keys[first:end], request, transfer))
        except Exception as error:  # noqa: BLE001  law: never in the way
            say("a load of chunks" if load else "a store of chunks", error)
            job.failed = True

    def _begin(self, request: Request, keys: Sequence[bytes], chunks: Sequence[int], *, load: bool) -> Calm:
        request.match(digests=keys, after=b"")
        if not load:
            return Calm(request.store(self._pages, [chunks]))
        request.admit()
        return Calm(request.load(len(keys), self._pages, [chunks]))

    def _runs(self, keys: Sequence[bytes], context: Any) -> Iterator[tuple[int, int]]:
        """Stretches of keys that follow one another in their request: (first, end). A wrong parent would be a lie that
        every later read finds out."""
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
        found = []
        for job in list(self._jobs.values()):
            if all(part.transfer.done for part in job.parts):
                del self._jobs[job.id]
                found.append(self._result(job))
        return found

    def _result(self, job: Job) -> JobResult:
        came = [key for part in job.parts for key in part.keys[: part.transfer.blocks]]
        whole = not job.failed and len(came) == sum(len(part.keys) for part in job.parts)
        if job.load and not whole:
            self._failed.get(job.request_id, set()).update(set(job.keys).difference(came))
        for part in job.parts:
            quietly(None, part.request.close)
        return JobResult(
            job.id,
            whole,
            successful_keys=tuple(came) if job.load and not whole else None,
            transfer_time=monotonic() - job.begun,
            transfer_bytes=len(came) * self.block_size_bytes,
        )

    def on_schedule_end(self, context: Any) -> None:
        """Lookups whose requests went away."""
        now = monotonic()
        for key in [key for key, asked in self._asked.items() if now > asked.give_up_s + PATIENCE_S]:
            quietly(None, self._asked.pop(key).request.close)

    # ends

    def drain_jobs(self) -> None:
        """vLLM forgets what it has, since weights may have changed: what was stored until now is not found any more."""
        for job in self._jobs.values():
            for part in job.parts:
                part.transfer.cancel()
                if not part.transfer.wait(PATIENCE_S):
                    _log.error("a copy of %d chunks has not ended", len(part.keys))
        self._bound, self._since = None, uuid.uuid4().hex

    def shutdown(self) -> None:
        for asked in self._asked.values():
            quietly(None, asked.request.close)
        self._asked.clear()
        quietly(None, self._cache.close)
        self._pages.clear()  # vLLM unmaps the memory behind them
        del self._view

    # within

    def _namespace(self) -> Bound | None:
        """None where vLLM's hashes are another process's nonsense. Bound when first needed: the root of the hashes is
        chosen late."""
        if self._bound is None and not self._off:
            origin = version.hash_origin("sha256") or version.hash_origin("sha256_cbor")
            if origin is None:
                self._off = (
                    "vLLM's block hashes differ between processes (prefix_caching_hash_algo, PYTHONHASHSEED, or a "
                    "version before 0.30): nothing is kept below host memory"
                )
                _log.error("%s", self._off)
                return None
            name, revision, facts = self._identity
            facts = {**facts, "digests": origin, **({"since": self._since} if self._since else {})}
            self._bound = self._cache.namespace(
                self._layout, model=name, revision=revision, tenant=self._options.tenant, facts=facts
            )
        return self._bound


def _identity(spec: Any, options: TierOptions) -> tuple[str, str, dict[str, Any]]:
    """Name, revision and facts: all that decides what the bytes of a chunk are."""
    config = spec.config
    name, revision = revision_of(config.model.name, options, str(config.engine_id))
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
