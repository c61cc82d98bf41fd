"""What may stand under "kvcache" in SGLang's extra configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from kvcache.errors import ConfigError

LONGEST_S = 4.0
"""A call may take twice as long, and beyond ten seconds SGLang cannot stop its threads, and fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """Ours; whatever else stands there is a setting of the cache, as `kvcache.open` takes them.

    where                   a settings file, or a daemon ("unix:..."); else a cache in this process, or a daemon of this
                            engine's own where it has several ranks
    model, revision         names of the model and its weights, where SGLang's own do not tell
    tenant, cache_salt      who pays; what keeps apart
    share_across_engines    keep blocks in the order that all engines read
    deadline_s              the longest that a call takes
    lookup_wait_s           the longest that a lookup of the linker's keeps the scheduler
    """

    where: str | None = None
    model: str | None = None
    revision: str | None = None
    tenant: str = "default"
    cache_salt: str = ""
    share_across_engines: bool = False
    deadline_s: float = 3.0
    lookup_wait_s: float = 0.05
    settings: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, extra: Mapping[str, Any] | None) -> Wishes:
        """From the extra configuration; ConfigError for what makes no sense."""
        given = (extra or {}).get("kvcache") or {}
        if not isinstance(given, Mapping):
            raise ConfigError(f"kvcache = {given!r}: expected a map of settings in the extra configuration")
        ours = {f.name: f.type for f in fields(cls) if f.name != "settings"}
        wishes = cls(
            **{name: value for name, value in given.items() if name in ours},
            settings={name: value for name, value in given.items() if name not in ours},
        )
        kinds: dict[str, Any] = {"share_across_engines": bool, "tenant": str, "cache_salt": str}
        for name, kind in kinds.items():
            value = getattr(wishes, name)
            if not isinstance(value, kind):
                raise ConfigError(f"kvcache.{name} = {value!r}: expected a {kind.__name__}")
        for name, least in (("deadline_s", 0.01), ("lookup_wait_s", 0.0)):
            value = getattr(wishes, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= LONGEST_S:
                raise ConfigError(f"kvcache.{name} = {value!r}: expected seconds from {least} to {LONGEST_S}")
        return wishes
