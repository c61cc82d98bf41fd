"""Settings of the cache itself: quotas, eviction, movement between tiers, load plans, explanations, warm start."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from kvcache.errors import ConfigError
from kvcache.settings.types import Bytes, Count, MiB, Seconds, Section, as_number, as_table, check_at_most


class Tenant(Section):
    """Quota and guaranteed share of a tenant in each tier."""

    host_quota_bytes: Bytes | None = Field(default=None, description="Most bytes of host memory.")
    host_guaranteed_bytes: Bytes = Field(default=0, description="Guaranteed bytes of host memory.")
    nvme_quota_bytes: Bytes | None = Field(default=None, description="Most bytes of the NVMe tier.")
    nvme_guaranteed_bytes: Bytes = Field(default=0, description="Guaranteed bytes of the NVMe tier.")

    @model_validator(mode="before")
    @classmethod
    def _current_names(cls, given: Any) -> Any:
        for tier in ("host", "nvme"):
            if isinstance(given, dict) and f"{tier}_least_bytes" in given:
                raise ConfigError(
                    f"{tier}_least_bytes of a tenant is called {tier}_guaranteed_bytes now; give that instead "
                    "(docs/migration.md)"
                )
        return given

    @model_validator(mode="after")
    def _fits(self) -> Tenant:
        for tier in ("host", "nvme"):
            quota, least = getattr(self, f"{tier}_quota_bytes"), getattr(self, f"{tier}_guaranteed_bytes")
            if quota is not None:
                check_at_most(
                    f"{tier}_guaranteed_bytes of a tenant in evict.tenants", least, f"its {tier}_quota_bytes", quota
                )
        return self


class EvictSettings(Section):
    """Eviction: the policy, the miss-ratio curve and tenants' quotas."""

    policy: Literal["hazard", "lru"] = Field(
        default="hazard", description="`hazard` ranks blocks by expected use, `lru` by last use."
    )
    mrc_samples: Annotated[int, BeforeValidator(as_number), Field(ge=0, le=1 << 20)] = Field(
        default=2048,
        description="Sampled blocks per tier for the miss-ratio curve (`kvcache stats --curve`). 0 disables the curve.",
    )
    tenants: Annotated[dict[str, Tenant], BeforeValidator(as_table)] = Field(
        default_factory=dict,
        description="By tenant, its quotas (`host_quota_bytes`, `nvme_quota_bytes`) and guaranteed shares "
        "(`host_guaranteed_bytes`, `nvme_guaranteed_bytes`): one table per tenant, or all of them as JSON.",
    )


class FlowSettings(Section):
    """Movement of blocks between tiers."""

    queue_blocks: Count = Field(
        default=4096,
        description="Most blocks that wait to be written to a lower tier. Further blocks are dropped and counted.",
    )
    threads: Count = Field(default=2, description="Threads that copy blocks between pages and host memory.")
    deadline_s: Seconds = Field(
        default=2.0, description="Deadline of a load. Later blocks are misses. A request can override it."
    )
    lookup_timeout_s: Seconds = Field(
        default=0.5, description="Deadline of a lookup in a shared tier. A later answer counts as a miss."
    )


class PlanSettings(Section):
    """The load plan: loads a block only if that is faster than recomputation."""

    enabled: bool = Field(
        default=True,
        description="Load a block only if that is expected to be faster than recomputation, by measured rates. Has no "
        "effect until the engine reports its compute rate.",
    )


class ExplainSettings(Section):
    """Recent requests, from which `kvcache explain` finds why a prompt was not found."""

    memory_bytes: Bytes = Field(
        default=32 * MiB,
        description="Memory for token ids and signatures of recent requests. 0 keeps none, so that `kvcache explain` "
        "cannot show where prompts diverge.",
    )


class CanarySettings(Section):
    """The canary: an engine recomputes some loaded blocks, and the cache compares both."""

    sample_rate: Annotated[int, BeforeValidator(as_number), Field(ge=0, le=1 << 30)] = Field(
        default=0,
        description="The canary recomputes one of this many loaded blocks. 0 disables it.",
    )


# Warm start of a node


class WarmSettings(Section):
    """Prefixes that a node of a fleet has near when it begins. Needs `redis.enabled`."""

    file: str = Field(
        default="",
        description="A file of prompts, as `kvcache warm` takes it, that `kvcache serve` warms up with: fetched where "
        "the fleet has them, computed once in the fleet where not.",
    )
    hot: Annotated[int, BeforeValidator(as_number), Field(ge=0, le=256)] = Field(
        default=0,
        description="Number of the fleet's most used prefixes to fetch when an engine binds its namespace.",
    )
    max_bytes: Bytes = Field(
        default=1 << 60,
        description="Most bytes that the warm-up fetches, and at most half of host memory.",
    )
    before_ready: bool = Field(
        default=False, description="Whether readiness (`/readyz`) waits for the warm-up, at most `warm.deadline_s`."
    )
    deadline_s: Seconds = Field(default=600.0, description="Time limit of the warm-up.")
    lease_s: Seconds = Field(
        default=10.0,
        description="Lease on a prompt. Another node computes it if the lease ends; a live node renews its lease.",
    )
    report_popularity: bool = Field(
        default=True, description="Whether this node publishes the use counts of its prefixes, for `hot`."
    )
    popularity_interval_s: Seconds = Field(default=30.0, description="Interval between publications.")


# Identity of a model's weights


class IdentitySettings(Section):
    """Which bytes of a model's weights its revision covers."""

    read_every_byte: bool = Field(
        default=False,
        description="Hash all bytes of the weights instead of a sample. A sample can miss a change of a few weights. "
        "Hashing all bytes takes as long as the drive and SHA-256 take. Engines that share blocks need the "
        "same value.",
    )
