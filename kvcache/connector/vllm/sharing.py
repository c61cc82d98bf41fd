"""The namespace of blocks that other engines are to find too, as vLLM's configuration has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcache.block.hf import engine_facts
from kvcache.block.shared import shared, shared_layout
from kvcache.connector.vllm.identity import depends_on_length, local_model, plain
from kvcache.connector.vllm.model import Model
from kvcache.connector.vllm.options import Options


def share_model(config: Any, options: Options, mine: Model) -> Model:
    """The model as every engine names it. LayoutError where no other engine reads its blocks (on a processor vLLM packs
    them), ModelError where its configuration is not on this machine."""
    layout, place = shared_layout(mine.layout), local_model(config.model_config.model, config.model_config.revision)
    same = shared(place, model=options.model, revision=options.revision, changed=_changed(config.model_config, place))
    return Model(same.model, same.revision, same.facts, layout, mine.shards, mine.of)


def _changed(model: Any, place: str) -> Mapping[str, Any]:
    """What vLLM was told to do otherwise than the model's files say."""
    found = engine_facts(place)
    told = {
        "hf_overrides": plain(getattr(model, "hf_overrides", None)) or None,
        "quantization": None if "quantization_config" in found else model.quantization,
        "max_model_len": int(model.max_model_len) if depends_on_length(found) else None,
    }
    return {name: value if isinstance(value, (int, Mapping)) else str(value) for name, value in told.items() if value}
