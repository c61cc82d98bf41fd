"""The namespace that different engines share, computed from the model alone.

It excludes an engine's own names (cache type, version, options), so that two engines get the same namespace. It
includes every setting in which an engine deviates from the model's files, so that different results stay separate.
Blocks are named by `page_digests`, in the canonical order, in one group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcache.block.chain import PAGE_CHAIN_ID
from kvcache.block.checkpoint import checkpoint_digest
from kvcache.block.hf import engine_facts, read_config
from kvcache.block.layout import CANONICAL_ORDERS, Group, KVLayout
from kvcache.block.revision import WEIGHT_SUFFIXES, model_revision
from kvcache.errors import LayoutError

_WINDOW_FACTS = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "sliding_window_pattern")


@dataclass(frozen=True, slots=True)
class SharedIdentity:
    model: str
    revision: str
    facts: Mapping[str, Any]


def shared_identity(
    directory: str | Path,
    *,
    model: str | None = None,
    revision: str | None = None,
    changed: Mapping[str, Any] | None = None,
    dtype: str | None = None,
    kinds: Sequence[str] = WEIGHT_SUFFIXES,
    read_every_byte: bool = False,
) -> SharedIdentity:
    """Return name, revision and facts of the model in a directory.

    Args:
        changed: what the engine computes otherwise than its files say, under the engine's names.
        dtype: what the engine computes in, by torch's name; a difference from the configuration is a change.
        kinds, read_every_byte: as `model_revision` takes them.

    Raises:
        ModelError: the directory has no weights or no configuration.
    """
    config = read_config(directory)
    inner = config.get("text_config")
    text = inner if isinstance(inner, Mapping) else config
    architectures = config.get("architectures") or [config.get("model_type") or "model"]
    facts: dict[str, Any] = {
        **engine_facts(config),
        "checkpoint": checkpoint_digest(directory),
        "rms_norm_eps": text.get("rms_norm_eps"),
        "identity": PAGE_CHAIN_ID,
    }
    facts |= {name: text[name] for name in _WINDOW_FACTS if text.get(name) is not None}
    changes = dict(changed or {})
    if dtype is not None and dtype != _dtype(config, text):
        changes["dtype"] = dtype
    if changes:
        facts["changed"] = changes
    found = revision or model_revision(directory, kinds=kinds, read_every_byte=read_every_byte)
    return SharedIdentity(model or str(architectures[0]), found, facts)


def _dtype(config: Mapping[str, Any], text: Mapping[str, Any]) -> str | None:
    found = (source.get(name) for source in (text, config) for name in ("dtype", "torch_dtype"))
    return next((str(dtype).removeprefix("torch.") for dtype in found if dtype), None)


def shared_layout(layout: KVLayout) -> KVLayout:
    """Return the layout of the same blocks in the canonical order that all engines read.

    Raises:
        LayoutError: other engines cannot read these blocks.
    """
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
        order=CANONICAL_ORDERS[only.kind],
    )
    return KVLayout((group,), layout.block_tokens)
