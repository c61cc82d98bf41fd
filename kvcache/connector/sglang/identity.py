"""What two servers must agree on to share a page. SGLang's own keys know tokens, adapter and salt, nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcache.block.hf import engine_facts, read_config
from kvcache.block.page_chain import IDENTITY
from kvcache.block.revision import model_revision
from kvcache.block.shared import shared
from kvcache.connector.sglang.wishes import Wishes
from kvcache.errors import ModelError

_SERVED = ("kv_cache_dtype", "quantization", "quantization_param_path", "json_model_override_args", "load_format")


@dataclass(frozen=True, slots=True)
class Identity:
    model: str
    revision: str
    facts: Mapping[str, Any]
    shared: bool = False

    def facts_of(self, pool: str, tag: str) -> dict[str, Any]:
        """Of one pool: the name that SGLang gives it, and what format it says it has. Others know no pools: ModelError
        where there are more than the first."""
        if self.shared and pool != "kv":
            raise ModelError(f"pool {pool!r}: no other engine has such pools; share_across_engines = false")
        return dict(self.facts) if self.shared else {**self.facts, "pool": pool, "pool_format": tag}


def identify(served: Any, name: str | None, wishes: Wishes) -> Identity:
    """From the server's arguments, as far as there are any. ModelError where nothing tells which weights these are."""
    path = str(getattr(served, "model_path", None) or name or "")
    snapshot = _snapshot(path, getattr(served, "revision", None))
    if wishes.revision is None and snapshot is None:
        raise ModelError(
            f"model {path!r}: no directory and not in the hub's cache, so nothing tells which weights these are; "
            'give "revision" under "kvcache" in the extra configuration'
        )
    model = wishes.model or path or "model"
    revision = wishes.revision or model_revision(snapshot or path)
    config = _config_facts(snapshot) if snapshot is not None else None
    told = {name: getattr(served, name, None) for name in _SERVED}
    given = {
        name: value
        for name, value in told.items()
        if isinstance(value, (str, int, float)) and value not in {"", "auto", "{}"}
    }
    if wishes.share_across_engines:
        if snapshot is None:
            raise ModelError(f"model {path!r}: share_across_engines compares configurations; give its directory")
        given.pop("kv_cache_dtype", None)  # the layout has it
        if "quantization_config" in engine_facts(snapshot):
            given.pop("quantization", None)  # SGLang found it there
        same = shared(snapshot, model=wishes.model, revision=wishes.revision, changed=given)
        return Identity(same.model, same.revision, same.facts, shared=True)
    facts: dict[str, Any] = {"identity": IDENTITY, "engine": "sglang", "config": config, **given}
    return Identity(model, revision, facts)


def _config_facts(snapshot: Path) -> dict[str, Any]:
    """What changes keys and values beside the weights, under the reference engine's names."""
    eps = read_config(snapshot).get("rms_norm_eps")
    return {**engine_facts(snapshot), "rms_norm_eps": eps, "windows": None}


def _snapshot(path: str, revision: Any) -> Path | None:
    """Where the model's files lie, if they do on this machine."""
    if path and Path(path).is_dir():
        return Path(path)
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(path, "config.json", revision=revision or "main")
    except Exception:  # noqa: BLE001  no hub, or a name that is none
        return None
    return Path(found).parent if isinstance(found, str) else None
