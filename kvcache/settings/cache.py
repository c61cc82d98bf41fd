"""Settings of the cache itself: quotas, eviction, movement between tiers, load plans, explanations, warm start."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from kvcache.errors import ConfigError
from kvcache.settings.types import Bytes, Count, MiB, Seconds, Section, as_number, as_table, check_at_most


class Tenant(Section):
    """What a tenant may take of each tier."""

    host_quota_bytes: Bytes | None = Field(default=None, description="At most, of host memory.")
    host_guaranteed_bytes: Bytes = Field(default=0, description="Of host memory, what others cannot take from it.")
    nvme_quota_bytes: Bytes | None = Field(default=None, description="At most, of the drive.")
    nvme_guaranteed_bytes: Bytes = Field(default=0, description="Of the drive, what others cannot take from it.")

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
    """Who leaves a full tier."""

    policy: Literal["hazard", "lru"] = Field(default="hazard", description="`hazard`: expected use. `lru`: last use.")
    mrc_samples: Annotated[int, BeforeValidator(as_number), Field(ge=0, le=1 << 20)] = Field(
        default=2048,
        description="Blocks that stand for a tier where it is told what more memory would find "
        "(`kvcache stats --curve`). 0: it is not told.",
    )
    tenants: Annotated[dict[str, Tenant], BeforeValidator(as_table)] = Field(
        default_factory=dict,
        description="By tenant, what it may take at most (`host_quota_bytes`, `nvme_quota_bytes`), and what others "
        "cannot take from it (`host_guaranteed_bytes`, `nvme_guaranteed_bytes`): a table each, or all of them as JSON.",
    )


class FlowSettings(Section):
    """What moves between tiers, and when."""

    queue_blocks: Count = Field(default=4096, description="Blocks being demoted, beyond which more are dropped.")
    threads: Count = Field(default=2, description="Threads that move blocks between tiers.")
    deadline_s: Seconds = Field(
        default=2.0, description="After so long a block that has not come is a miss, unless the request says otherwise."
    )
    lookup_timeout_s: Seconds = Field(
        default=0.5, description="After so long a shared tier that has not said what it has of a prompt has nothing."
    )
    known_blocks: Count = Field(
        default=1 << 18, description="Blocks of a shared tier to remember, at about 100 bytes of memory each."
    )


class PlanSettings(Section):
    """Whether what was found is loaded, or computed again because that is sooner."""

    enabled: bool = Field(
        default=True,
        description="Load only what comes sooner than the engine would compute it, by rates measured here. Without "
        "effect until the engine tells what computing takes.",
    )


class ExplainSettings(Section):
    """What is remembered of the prompts that were asked for, so that a person can ask why one was not found."""

    memory_bytes: Bytes = Field(
        default=32 * MiB,
        description="Memory for their token ids and signatures, the newest of them. 0: none are kept, and it cannot be "
        "said where two prompts part.",
    )


class CanarySettings(Section):
    """Loaded blocks that the engine computes again, where it offers to, to compare them with what was loaded."""

    sample_rate: Annotated[int, BeforeValidator(as_number), Field(ge=0, le=1 << 30)] = Field(
        default=0,
        description="One loaded block in so many is computed again, which costs what computing costs. 0: none.",
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
        description="So many of the chains that the fleet uses most are fetched when an engine binds its namespace.",
    )
    max_bytes: Bytes = Field(
        default=1 << 60,
        description="Bytes that are brought near at most; half of host memory in any case.",
    )
    before_ready: bool = Field(
        default=False, description="Whether readiness (`/readyz`) waits for all of this, `warm.deadline_s` at most."
    )
    deadline_s: Seconds = Field(default=600.0, description="After so long warming up ends, whatever is left.")
    lease_s: Seconds = Field(
        default=10.0,
        description="For so long a node that died keeps the others from the prompt it was to compute; one that lives "
        "renews its lease.",
    )
    heat: bool = Field(
        default=True, description="Whether this node tells the fleet which chains its requests found, for `hot`."
    )
    popularity_interval_s: Seconds = Field(default=30.0, description="How often it tells.")
    popularity_half_life_s: Seconds = Field(
        default=3600.0, description="After so long a use counts half. The same on every node."
    )


# Identity of a model's weights


class IdentitySettings(Section):
    """Which bytes of a model's weights its revision covers."""

    read_every_byte: bool = Field(
        default=False,
        description="Read all bytes of the weights instead of a sample. The sample misses a change of a few weights "
        "that lies between its pieces; reading everything takes as long as the drive and SHA-256 take. Engines that "
        "share blocks need the same value.",
    )
