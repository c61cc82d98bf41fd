"""What two servers must agree on to share a page. SGLang's own keys know tokens, adapter and salt, nothing else."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from kvcache.block.chain import IDENTITY
from kvcache.block.checkpoint import checkpoint_digest
from kvcache.block.hf import engine_facts, read_config
from kvcache.block.revision import KINDS, adapter_revision, loader_kinds, model_revision
from kvcache.block.shared_namespace import shared
from kvcache.connector.sglang.wishes import Wishes
from kvcache.errors import ModelError
from kvcache.settings.sources import load_identity

_SERVED = (
    "kv_cache_dtype",
    "quantization",
    "json_model_override_args",
    "load_format",
    "model_loader_extra_config",
    "torchao_config",
    "modelopt_quant",
)
_FILES = ("quantization_param_path", "decrypted_config_file", "modelopt_checkpoint_restore_path")
_DTYPES = {"half": "float16", "float": "float32"}
_AS_THE_FILES_SAY = frozenset({"", "auto", "{}"})


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
    """From the server's arguments, where there are any. ModelError where nothing identifies the weights.

    A path is named by its last part, since the revision identifies the weights; a name of the hub is kept.
    """
    path = str(getattr(served, "model_path", None) or name or "")
    place = _place(path, getattr(served, "revision", None), getattr(served, "download_dir", None))
    if wishes.revision is None and place is None:
        raise ModelError(
            f"model {path!r}: no file or directory and not in the hub's cache, so nothing identifies its weights; "
            'give "revision" under "kvcache" in the extra configuration'
        )
    model = wishes.model or (Path(path).name if path and Path(path).exists() else path) or "model"
    kinds = KINDS if wishes.revision else loader_kinds(_text(served, "load_format") or "auto")
    whole = load_identity(wishes.where, wishes.settings).read_every_byte
    given = _given(served, whole)
    if wishes.share_across_engines:
        if place is None or not place.is_dir():
            raise ModelError(f"model {path!r}: share_across_engines compares configurations; give its directory")
        given.pop("kv_cache_dtype", None)  # the layout has it
        if given.get("load_format") == "safetensors":
            given.pop("load_format")
        if "quantization_config" in engine_facts(place):
            given.pop("quantization", None)  # SGLang found it there
        dtype = given.pop("dtype", None)
        same = shared(
            place,
            model=wishes.model,
            revision=wishes.revision,
            changed=given,
            dtype=_DTYPES.get(str(dtype), dtype),
            kinds=kinds,
            read_every_byte=whole,
        )
        return Identity(same.model, same.revision, same.facts, shared=True)
    revision = wishes.revision or model_revision(place or path, kinds=kinds, read_every_byte=whole)
    directory = place if place is not None and place.is_dir() else None
    facts: dict[str, Any] = {
        "identity": IDENTITY,
        "engine": "sglang",
        "config": _config_facts(directory) if directory else None,
        "checkpoint": checkpoint_digest(directory) if directory else None,
        **given,
    }
    return Identity(model, revision, facts)


def _given(served: Any, whole: bool) -> dict[str, Any]:
    """What the server was told to load or compute otherwise than the model's files say."""
    given: dict[str, Any] = {name: value for name in (*_SERVED, "dtype") if (value := _text(served, name))}
    for name in _FILES:
        if value := _text(served, name):
            file = Path(value)
            given[name] = sha256(file.read_bytes()).hexdigest() if file.is_file() else value
    if adapters := _adapters(getattr(served, "lora_paths", None), whole):
        given["adapters"] = adapters
    return given


def _text(served: Any, name: str) -> str:
    """An argument of the server; "" where it was not given, or says no more than the files."""
    value = getattr(served, name, None)
    if value is None or value is False or (isinstance(value, Mapping) and not value):
        return ""
    if isinstance(value, Mapping):
        return json.dumps(value, sort_keys=True, default=str)
    text = str(getattr(value, "value", value))
    return "" if text in _AS_THE_FILES_SAY else text


def _adapters(told: Any, whole: bool) -> dict[str, str]:
    """The adapters that the server starts with, by name: SGLang numbers them by name and path, not by their weights."""
    paths: dict[str, str] = {}
    for item in told.items() if isinstance(told, Mapping) else told or ():
        if isinstance(item, str):
            name, _, path = item.partition("=")
            paths[name] = path or name
        elif isinstance(item, tuple):
            paths[str(item[0])] = str(getattr(item[1], "lora_path", item[1]))
        elif isinstance(item, Mapping):
            paths[str(item.get("lora_name"))] = str(item.get("lora_path"))
        else:
            paths[str(item.lora_name)] = str(item.lora_path)
    return {name: adapter_revision(_adapter(name, path), read_every_byte=whole) for name, path in paths.items()}


def _adapter(name: str, path: str) -> Path:
    place = Path(path) if Path(path).exists() else _cached(path, "adapter_config.json")
    if place is None:
        raise ModelError(f"adapter {name}: {path} is not on this machine; give its folder")
    return place


def _config_facts(snapshot: Path) -> dict[str, Any]:
    """What changes keys and values beside the weights, under the reference engine's names."""
    eps = read_config(snapshot).get("rms_norm_eps")
    return {**engine_facts(snapshot), "rms_norm_eps": eps, "windows": None}


def _place(path: str, revision: Any, cache: Any) -> Path | None:
    """Where the model's files lie, if they do on this machine."""
    if path and Path(path).exists():
        return Path(path)
    if os.environ.get("SGLANG_USE_MODELSCOPE", "").lower() in {"1", "true"}:
        return None  # whose cache is not read
    return _cached(path, "config.json", revision, cache) or _cached(path, "params.json", revision, cache)


def _cached(name: str, file: str, revision: Any = None, cache: Any = None) -> Path | None:
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(name, file, revision=revision or "main", cache_dir=cache)
    except Exception:  # noqa: BLE001  no hub, or a name that is none
        return None
    return Path(found).parent if isinstance(found, str) else None
