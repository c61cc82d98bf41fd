"""Who a block belongs to: the namespace of a request, from vLLM's configuration and the request."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from kvcache.block.revision import model_revision
from kvcache.connector.vllm.options import Options, TierOptions
from kvcache.errors import ModelError

_log = logging.getLogger("kvcache.connector.vllm")


@dataclass(frozen=True, slots=True)
class Who:
    """What of a namespace may differ from request to request."""

    tenant: str = "default"
    adapter: str | None = None
    salt: str = ""  # where the digests do not contain it
    since: str = ""  # set by a reset: what was stored before it is another namespace


def model_of(config: Any, options: Options) -> tuple[str, str]:
    """Name and revision of the model.

    A path is named by its last part, since the weights are told by the revision; a name of the hub is kept.
    """
    model = config.model_config
    return revision_of(model.model, options, str(config.kv_transfer_config.engine_id), model.revision)


def revision_of(
    model: str, options: Options | TierOptions, engine_id: str, commit: str | None = None
) -> tuple[str, str]:
    """The same, of a path or a name of the hub."""
    name = options.model or (Path(model).name if Path(model).exists() else model)
    if options.revision:
        return name, options.revision
    try:
        return name, model_revision(local_model(model, commit))
    except (ModelError, OSError) as error:
        unique = f"engine:{engine_id}"
        _log.warning(
            "which weights these are cannot be told (%s): blocks are not shared beyond this engine; "
            "kv_connector_extra_config.revision names them",
            error,
        )
        return name, unique


def local_model(model: str, commit: str | None = None) -> str:
    """Where the weights are on this machine."""
    if Path(model).exists():
        return model
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model, "config.json", revision=commit)
    if not isinstance(found, str):
        raise ModelError(f"{model}: not on this machine")
    return str(Path(found).parent)


def facts_of(config: Any) -> dict[str, Any]:
    """What else changes the bytes of a block: settings of the model that vLLM can override."""
    model, cache = config.model_config, config.cache_config
    hf = model.hf_text_config
    rope = {k: getattr(hf, k) for k in ("rope_theta", "rope_scaling", "rope_parameters") if getattr(hf, k, None)}
    return {
        "engine": "vllm",
        "dtype": str(model.dtype),
        "kv_cache_dtype": str(cache.cache_dtype),
        "quantization": str(model.quantization),
        "rope": plain(rope),
        "max_tokens": int(model.max_model_len) if depends_on_length(rope) else 0,
        "hf_overrides": plain(getattr(model, "hf_overrides", None)),
    }


def depends_on_length(rope: Mapping[str, Any]) -> bool:
    return any(kind in str(rope).lower() for kind in ("dynamic", "longrope", "su'"))


def plain(value: Any) -> Any:
    """What a namespace can encode; what it cannot, by its text."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value if value is None or type(value) in {bool, int, float, str, bytes} else str(value)


class Adapters:
    """An adapter's name in a namespace: what it is called and which weights it has, looked at again when its files
    change, so that a reload under the same name is another adapter."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str, tuple[tuple[str, int, int], ...]], str] = {}

    def name(self, lora: Any) -> str | None:
        """ModelError where the adapter's files cannot be read: such a request is not cached."""
        if lora is None:
            return None
        path = Path(lora.lora_path)
        if not path.exists():
            raise ModelError(f"adapter {lora.lora_name}: {path} is not there; expected its folder")
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        stats = tuple((f.name, s.st_size, s.st_mtime_ns) for f in files if f.is_file() for s in [f.stat()])
        key = (lora.lora_name, str(path), stats)
        if key not in self._known:
            config = path / "adapter_config.json"
            how = sha256(config.read_bytes()).hexdigest()[:16] if config.is_file() else ""
            self._known[key] = f"{lora.lora_name} {model_revision(path)} {how}"
        return self._known[key]
