"""Builds the identity of the model that an engine's ranks hold together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcache.connector.vllm import version
from kvcache.connector.vllm.config import Options
from kvcache.connector.vllm.identity import model_facts, model_name_and_revision
from kvcache.connector.vllm.kv_layout import ModelIdentity, Rank, combine_ranks
from kvcache.connector.vllm.metadata import HandshakeMetadata
from kvcache.connector.vllm.namespaces import share_model
from kvcache.errors import LayoutError


def build_model_identity(config: Any, options: Options, ranks: Mapping[Rank, HandshakeMetadata]) -> ModelIdentity:
    """Return the identity, from what every rank reports of its pages.

    Raises:
        LayoutError, ModelError: the blocks cannot be cached; the message says why.
    """
    refusals = sorted({rank.refusal for rank in ranks.values() if rank.refusal})
    if refusals:
        raise LayoutError("; ".join(refusals))
    layout, shards, vllm_groups, packing = combine_ranks(
        {rank: handshake.shapes for rank, handshake in ranks.items()}, replicas=next(iter(ranks.values())).replicas
    )
    if options.share_across_engines:
        return share_model(config, options, ModelIdentity("", "", {}, layout, shards, vllm_groups))
    name, revision = model_name_and_revision(config, options)
    facts = model_facts(config) | {"packing": packing}
    if any(kind != "plain" for kind in packing):
        facts["version"] = version.VERSION  # another version may pack differently
    return ModelIdentity(name, revision, facts, layout, shards, vllm_groups)
