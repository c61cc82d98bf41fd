"""What may stand under "kvcache" in SGLang's extra configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from kvcache.errors import ConfigError

LONGEST_S = 8.0
"""Beyond ten seconds SGLang cannot stop its threads, and fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """Ours; whatever else stands there is a setting of the cache, as `kvcache.open` takes them.

    where                   a settings file, or a daemon ("unix:..."); else a cache in this process, or a daemon of this
                            engine's own where it has several ranks
    model, revision         names of the model and its weights, where SGLang's own do not tell
    tenant, cache_salt      who pays; what keeps apart
    share_across_engines    keep blocks in the order that all engines read
    deadline_s              the longest that a call takes
    """

    where: str | None = None
    model: str | None = None
    revision: str | None = None
    tenant: str = "default"
    cache_salt: str = ""
    share_across_engines: bool = False
    deadline_s: float = 3.0
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
        for name, kind in (("deadline_s", (int, float)), ("share_across_engines", bool), ("tenant", str)):
            value = getattr(wishes, name)
            if not isinstance(value, kind) or (name == "deadline_s" and isinstance(value, bool)):
                raise ConfigError(
                    f"kvcache.{name} = {value!r}: expected a {'number' if name == 'deadline_s' else kind}"
                )
        if not 0 < wishes.deadline_s <= LONGEST_S:
            raise ConfigError(f"kvcache.deadline_s = {wishes.deadline_s}: expected more than 0 and at most {LONGEST_S}")
        return wishes
