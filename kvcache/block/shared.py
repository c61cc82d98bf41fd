"""The namespace that engines of several makes share: what each of them can tell from the model alone.

An engine's own names (its cache type, its version, how it was called) are not in it, so that two engines meet; what an
engine was told to do otherwise than the model's files say is, so that they do not meet where they should not. Blocks
are named by `page_chain`, in the canonical order, in one group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcache.block.hf import engine_facts, read_config
from kvcache.block.layout import CANONICAL, Group, KVLayout
from kvcache.block.page_chain import IDENTITY
from kvcache.block.revision import model_revision
from kvcache.errors import LayoutError

_WINDOWS = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "sliding_window_pattern")


@dataclass(frozen=True, slots=True)
class Shared:
    model: str
    revision: str
    facts: Mapping[str, Any]


def shared(
    directory: str | Path,
    *,
    model: str | None = None,
    revision: str | None = None,
    changed: Mapping[str, Any] | None = None,
) -> Shared:
    """Of the model in a directory. `changed`: what the engine does otherwise than its files say, under the engine's
    names. ModelError where nothing can be read there."""
    config = read_config(directory)
    inner = config.get("text_config")
    text = inner if isinstance(inner, Mapping) else config
    kinds = config.get("architectures") or [config.get("model_type") or "model"]
    facts: dict[str, Any] = {
        **engine_facts(config),
        "rms_norm_eps": text.get("rms_norm_eps"),
        "identity": IDENTITY,
    }
    facts |= {name: text[name] for name in _WINDOWS if text.get(name) is not None}
    if changed:
        facts["changed"] = dict(changed)
    return Shared(model or str(kinds[0]), revision or model_revision(directory), facts)


def shared_layout(layout: KVLayout) -> KVLayout:
    """The same blocks in the order that all engines read; LayoutError where other engines cannot."""
    groups = layout.groups
    if len(groups) != 1 or groups[0].kind == "opaque" or groups[0].rule != "all":
        found = ", ".join(f"{group.name} ({group.kind}, {group.rule})" for group in groups)
        raise LayoutError(
            f"groups {found}: expected one of keys and values of full attention, which other engines can read; "
            "share_across_engines = false"
        )
    [only] = groups
    group = Group(
        layers=only.layers,
        kv_heads=only.kv_heads,
        head_dim=only.head_dim,
        dtype=only.dtype,
        kind=only.kind,
        order=CANONICAL[only.kind],
    )
    return KVLayout((group,), layout.block_tokens)
