"""What is near before it is asked for."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from kvcache.values import Bytes, Seconds, Section, as_number


class Warm(Section):
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
    heat_every_s: Seconds = Field(default=30.0, description="How often it tells.")
    heat_half_life_s: Seconds = Field(
        default=3600.0, description="After so long a use counts half. The same on every node."
    )
