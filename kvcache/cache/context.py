"""The components of one cache that its other components share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from kvcache.cache.canary import Canary
from kvcache.cache.expiry import Expiry
from kvcache.cache.holds import Holds
from kvcache.cache.load_plan import LoadPlan
from kvcache.cache.miss_explainer import MissExplainer
from kvcache.cache.pins import Pins
from kvcache.cache.shared_lookup import SharedLookup
from kvcache.cache.usage import UsageLog
from kvcache.errors import ConfigError
from kvcache.index.cost_classes import CostClasses
from kvcache.index.index import Index
from kvcache.index.mrc import MissRatioCurve
from kvcache.observe.events import EventLog
from kvcache.observe.metrics import Counters
from kvcache.os_env import Executor, OsEnv
from kvcache.settings import Settings
from kvcache.tier.host.tier import HostTier
from kvcache.tier.record_codec import RecordCodec
from kvcache.tier.tier import Tier

# Bypass: an operator's switch that takes a cache out of an engine's path without ending either. With loads bypassed, a
# match finds nothing, a load is a miss, and a load in progress ends with the blocks it has. With stores bypassed,
# offered blocks are dropped and counted. Stored blocks stay, and are still written to lower tiers.

BypassMode = Literal["off", "on", "loads", "stores"]

BYPASS = "bypass"
"""The reason given for bypassed work."""


class Bypass:
    """Two flags, read on every path without a lock, so that setting one never waits."""

    def __init__(self) -> None:
        self.loads = False
        self.stores = False

    def set(self, mode: BypassMode) -> None:
        if mode not in get_args(BypassMode):
            raise ConfigError(f"bypass = {mode!r}: expected one of {', '.join(get_args(BypassMode))}")
        self.loads, self.stores = mode in {"on", "loads"}, mode in {"on", "stores"}

    @property
    def mode(self) -> BypassMode:
        if self.loads:
            return "on" if self.stores else "loads"
        return "stores" if self.stores else "off"


@dataclass(frozen=True, kw_only=True)
class CacheContext:
    """What requests, loads, stores and the movement between tiers use. `factory.build_context` makes it.

    Each component is thread-safe. `Cache.close` closes them.
    """

    settings: Settings
    os_env: OsEnv
    background: Executor
    """One thread for work that nothing waits for: the miss-ratio curve, the policy state, usage counts."""

    index: Index
    tenants: dict[bytes, str]
    """Tenants by namespace id, of bound namespaces. `Cache` updates it."""
    host: HostTier
    lower_tiers: Sequence[Tier]
    """Tiers under host memory, the fastest first."""
    record_codec: RecordCodec
    cost_classes: CostClasses

    counters: Counters
    events: EventLog
    miss_explainer: MissExplainer
    usage_log: UsageLog
    curve: MissRatioCurve

    bypass: Bypass
    canary: Canary
    expiry: Expiry
    holds: Holds
    pins: Pins
    plan: LoadPlan
    shared_lookup: SharedLookup

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """All tiers, host first."""
        return (self.host, *self.lower_tiers)
