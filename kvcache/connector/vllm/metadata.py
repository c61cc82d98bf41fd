"""The messages between the sides: from the scheduler to the ranks each step, from a rank once about its pages."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvcache.connector.vllm.identity import NamespaceKey
from kvcache.connector.vllm.kv_layout import LayerGroup, ModelIdentity, Rank

LOAD_FAILED = -1
"""`TransferSpec.known_digests` of a load that failed before a rank received it; the rank reports the failure."""


@dataclass(frozen=True, slots=True)
class TransferSpec:
    """Blocks `first` to `first + count` of one request, to be loaded into pages or stored from them."""

    request_id: str
    namespace_key: NamespaceKey
    known_digests: int  # digests that the ranks have received before
    digests: tuple[bytes, ...]  # of the following blocks, at least to the last one moved
    first: int
    pages: tuple[tuple[int, ...], ...]  # one tuple for each group of the layout
    ttl_s: float | None = None
    agent: str | None = None
    session: str | None = None

    @property
    def count(self) -> int:
        return len(self.pages[0])


@dataclass
class ConnectorMetadata(KVConnectorMetadata):
    model: ModelIdentity | None = None  # sent until a rank could have received it
    loads: list[TransferSpec] = field(default_factory=list)
    stores: list[TransferSpec] = field(default_factory=list)
    assigned_pages: set[int] = field(default_factory=set)
    """Pages that this step assigns. Stores that read them have to end first."""
    finished_requests: set[str] = field(default_factory=set)
    acknowledged_failures: set[str] = field(default_factory=set)
    """Requests whose failed load the scheduler knows of: they now compute the blocks that were not loaded."""
    idle: bool = False  # this step computes nothing
    wait: bool = False  # loads end before anything is computed
    by_layer: bool = False  # or before the layer that needs them


@dataclass
class HandshakeMetadata(KVConnectorHandshakeMetadata):
    """A rank's pages, sent before any request."""

    shapes: tuple[LayerGroup, ...] = ()
    replicas: int = 1  # tensor ranks that hold the same heads
    refusal: str = ""  # why these pages cannot be cached


@dataclass
class WorkerMetadata(KVConnectorWorkerMetadata):
    """What a rank sends within a step: its pages, where vLLM did not collect them at start (a child of
    MultiConnector)."""

    ranks: dict[Rank, HandshakeMetadata] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, WorkerMetadata)
        return WorkerMetadata({**self.ranks, **other.ranks})
