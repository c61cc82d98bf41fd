"""The tree of settings: names, types, bounds, defaults, and descriptions.

Each setting has a default; some defaults depend on the machine. `kvcache.settings.sources.load` builds the tree from a
file, variables and keywords. `docs/configuration.md` is generated from this package.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, get_origin

from pydantic import BaseModel, Field, PrivateAttr
from pydantic.fields import FieldInfo

from kvcache.settings.cache import (
    CanarySettings,
    EvictSettings,
    ExplainSettings,
    FlowSettings,
    IdentitySettings,
    PlanSettings,
    WarmSettings,
)
from kvcache.settings.service import ControlSettings, DaemonSettings, HttpSettings, LogSettings, TraceSettings
from kvcache.settings.tiers import (
    EncryptionSettings,
    HostSettings,
    NvmeSettings,
    ObjectSettings,
    RedisSettings,
    WriteMode,
)
from kvcache.settings.types import Count, Section

PREFIX = "KVCACHE_"


class Settings(Section):
    """All of them. Made by `load`; frozen."""

    block_tokens: Annotated[Count, Field(le=65535)] = Field(
        default=16, description="Tokens in a block, for engines that read this setting. A layout has its own value."
    )
    host: HostSettings = Field(default_factory=HostSettings)
    nvme: NvmeSettings = Field(default_factory=NvmeSettings)
    redis: RedisSettings = Field(default_factory=RedisSettings)
    object: ObjectSettings = Field(default_factory=ObjectSettings)
    encryption: EncryptionSettings = Field(default_factory=EncryptionSettings)
    evict: EvictSettings = Field(default_factory=EvictSettings)
    flow: FlowSettings = Field(default_factory=FlowSettings)
    plan: PlanSettings = Field(default_factory=PlanSettings)
    warm: WarmSettings = Field(default_factory=WarmSettings)
    identity: IdentitySettings = Field(default_factory=IdentitySettings)
    explain: ExplainSettings = Field(default_factory=ExplainSettings)
    canary: CanarySettings = Field(default_factory=CanarySettings)
    daemon: DaemonSettings = Field(default_factory=DaemonSettings)
    http: HttpSettings = Field(default_factory=HttpSettings)
    trace: TraceSettings = Field(default_factory=TraceSettings)
    control: ControlSettings = Field(default_factory=ControlSettings)
    log: LogSettings = Field(default_factory=LogSettings)
    _origins: dict[str, str] = PrivateAttr(default_factory=dict)

    def origin(self, name: str) -> str:
        """Return the source of a value: a file, a variable, a keyword, or the default."""
        return self._origins.get(name, TABLE[name].origin)

    def given(self, name: str) -> bool:
        """Return whether a file, a variable or a keyword set it."""
        return name in self._origins

    def write_mode(self, tier: str) -> WriteMode:
        """Return when blocks are written to a lower tier."""
        mode: WriteMode = self.value(f"{tier}.write")
        return mode

    def value(self, name: str) -> Any:
        section, _, last = name.rpartition(".")
        return getattr(getattr(self, section) if section else self, last)


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table of settings."""

    name: str
    field: FieldInfo

    @property
    def made(self) -> str:
        extra = self.field.json_schema_extra
        return str(extra.get("made", "")) if isinstance(extra, dict) else ""

    @property
    def is_table(self) -> bool:
        """Whether its value is itself a table."""
        return get_origin(self.field.annotation) is dict

    @property
    def origin(self) -> str:
        return f"default: {self.made}" if self.made else "default"

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper().replace(".", "__")


def _rows(section: type[BaseModel], above: str = "") -> Iterator[Setting]:
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _rows(field.annotation, f"{above}{name}.")
        else:
            yield Setting(above + name, field)


TABLE: Mapping[str, Setting] = {row.name: row for row in _rows(Settings)}
SECTIONS = frozenset(name.split(".")[0] for name in TABLE if "." in name)
