"""Does the object store answer, and does a record come back from it?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

from kvcache.cli.doctor.finding import Finding
from kvcache.cli.doctor.server import trip
from kvcache.settings import Settings
from kvcache.tier.object import ObjectTier


def checks(settings: Settings) -> Iterator[Finding]:
    """Writes one record of 1 MiB under a prefix of its own, and removes it."""
    given = settings.object.model_dump(exclude={"enabled", "write"})
    with closing(ObjectTier(**{**given, "prefix": f"{settings.object.prefix}/doctor"})) as tier:
        faults = "object.url, object.endpoint and the credentials, which must allow to list, get, put and delete"
        yield trip(tier, f"look at {faults}; until then everything there is a miss")
