"""How the cache works: who leaves, what moves, what is remembered and compared."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from kvcache.values import Bytes, Count, MiB, Seconds, Section, as_number, as_table, no_larger


class Tenant(Section):
    """What a tenant may take of each tier."""

    host_quota_bytes: Bytes | None = Field(default=None, description="At most, of host memory.")
    host_least_bytes: Bytes = Field(default=0, description="Of host memory, what others cannot take from it.")
    nvme_quota_bytes: Bytes | None = Field(default=None, description="At most, of the drive.")
    nvme_least_bytes: Bytes = Field(default=0, description="Of the drive, what others cannot take from it.")

    @model_validator(mode="after")
    def _fits(self) -> Tenant:
        for tier in ("host", "nvme"):
            quota, least = getattr(self, f"{tier}_quota_bytes"), getattr(self, f"{tier}_least_bytes")
            if quota is not None:
                no_larger(f"{tier}_least_bytes of a tenant in evict.tenants", least, f"its {tier}_quota_bytes", quota)
        return self


class Evict(Section):
    """Who leaves a full tier."""

    policy: Literal["hazard", "lru"] = Field(default="hazard", description="`hazard`: expected use. `lru`: last use.")
    curve_samples: Annotated[int, BeforeValidator(as_number), Field(ge=0, le=1 << 20)] = Field(
        default=2048,
        description="Blocks that stand for a tier where it is told what more memory would find "
        "(`kvcache stats --curve`). 0: it is not told.",
    )
    tenants: Annotated[dict[str, Tenant], BeforeValidator(as_table)] = Field(
        default_factory=dict,
        description="By tenant, what it may take at most (`host_quota_bytes`, `nvme_quota_bytes`), and what others "
        "cannot take from it (`host_least_bytes`, `nvme_least_bytes`): a table each, or all of them as JSON.",
    )


class Flow(Section):
    """What moves between tiers, and when."""

    queue_blocks: Count = Field(default=4096, description="Blocks on their way down, beyond which more are dropped.")
    threads: Count = Field(default=2, description="Threads that move blocks between tiers.")
    deadline_s: Seconds = Field(
        default=2.0, description="After so long a block that has not come is a miss, unless the request says otherwise."
    )
    ask_deadline_s: Seconds = Field(
        default=0.5, description="After so long a shared tier that has not said what it has of a prompt has nothing."
    )
    known_blocks: Count = Field(
        default=1 << 18, description="Blocks of a shared tier to remember, at about 100 bytes of memory each."
    )


class Plan(Section):
    """Whether what was found is loaded, or computed again because that is sooner."""

    enabled: bool = Field(
        default=True,
        description="Load only what comes sooner than the engine would compute it, by rates measured here. Without "
        "effect until the engine tells what computing takes.",
    )


class Explain(Section):
    """What is remembered of the prompts that were asked for, so that a person can ask why one was not found."""

    memory_bytes: Bytes = Field(
        default=32 * MiB,
        description="Memory for their token ids and signatures, the newest of them. 0: none are kept, and it cannot be "
        "said where two prompts part.",
    )


class Canary(Section):
    """Loaded blocks that the engine computes again, where it offers to, to compare them with what was loaded."""

    one_in: Annotated[int, BeforeValidator(as_number), Field(ge=0, le=1 << 30)] = Field(
        default=0,
        description="One loaded block in so many is computed again, which costs what computing costs. 0: none.",
    )
