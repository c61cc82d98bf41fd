"""The model that an engine's ranks hold together, as it is named."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcache.connector.vllm import version
from kvcache.connector.vllm.config import Options
from kvcache.connector.vllm.identity import facts_of, model_of
from kvcache.connector.vllm.kv_layout import Model, Rank, combine
from kvcache.connector.vllm.metadata import Described
from kvcache.connector.vllm.namespaces import share_model
from kvcache.errors import LayoutError


def whole(config: Any, options: Options, ranks: Mapping[Rank, Described]) -> Model:
    """From what every rank says of its pages. LayoutError and ModelError say why its blocks cannot be cached."""
    refusals = sorted({rank.refusal for rank in ranks.values() if rank.refusal})
    if refusals:
        raise LayoutError("; ".join(refusals))
    layout, shards, of, packing = combine(
        {rank: told.shapes for rank, told in ranks.items()}, replicas=next(iter(ranks.values())).replicas
    )
    if options.share_across_engines:
        return share_model(config, options, Model("", "", {}, layout, shards, of))
    name, revision = model_of(config, options)
    facts = facts_of(config) | {"packing": packing}
    if any(kind != "plain" for kind in packing):
        facts["version"] = version.VERSION  # nobody promises that another one packs alike
    return Model(name, revision, facts, layout, shards, of)
