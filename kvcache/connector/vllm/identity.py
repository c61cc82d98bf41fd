"""Who a block belongs to: the namespace of a request, from vLLM's configuration and the request."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from kvcache.block.chain import Chain, page_digests
from kvcache.block.checkpoint import checkpoint_digest, config_digest
from kvcache.block.revision import adapter_revision, loader_kinds, model_revision
from kvcache.connector.vllm.config import Options, TierOptions
from kvcache.errors import ModelError
from kvcache.settings.sources import load_identity

_REVISION_HINT = "give `revision` in kv_connector_extra_config, a name that changes with the weights"
_PLAIN_FORMATS = frozenset({"auto", "hf", "safetensors"})
"""Load formats that read the same tensors of a checkpoint."""


@dataclass(frozen=True, slots=True)
class NamespaceKey:
    """What of a namespace may differ from request to request."""

    tenant: str = "default"
    adapter: str | None = None
    salt: str = ""  # where the digests do not contain it
    epoch: str = ""  # set by a reset: what was stored before it is another namespace


def model_name_and_revision(config: Any, options: Options) -> tuple[str, str]:
    """Name and revision of the model. ModelError where nothing identifies its weights.

    A path is named by its last part, since the revision identifies the weights; a name of the hub is kept.
    """
    model = config.model_config.model
    if options.revision:
        return _named(model, options), options.revision
    place, kinds = weights_path(config), loader_kinds(load_format(config))
    return _named(model, options), model_revision(place, kinds=kinds, read_every_byte=read_every_byte(options))


def resolve_revision(model: str, options: Options | TierOptions, engine_id: str) -> tuple[str, str]:
    """Name and revision for a tier, which vLLM tells nothing but the model's path or its name on the hub.

    ModelError where the hub's cache has several snapshots, of which the engine may have loaded any.
    """
    if options.revision:
        return _named(model, options), options.revision
    try:
        place = local_snapshot(model)
        if not Path(model).exists() and len(list(Path(place).parent.iterdir())) > 1:
            raise ModelError(f"{model}: the hub's cache has several snapshots of it, of which vLLM tells none")
        return _named(model, options), model_revision(place, read_every_byte=read_every_byte(options))
    except ModelError as error:
        raise ModelError(f"engine {engine_id}: {error}; {_REVISION_HINT}") from None


def _named(model: str, options: Options | TierOptions) -> str:
    return options.model or (Path(model).name if Path(model).exists() else model)


def checkpoint_of(model: str) -> str:
    """The digest of what stands beside the weights, for a tier; "" where no such files are on this machine."""
    try:
        place = Path(local_snapshot(model))
        return checkpoint_digest(place) if place.is_dir() else ""
    except ModelError:
        return ""


def read_every_byte(options: Options | TierOptions) -> bool:
    """As the settings say that stand in the options, their file or the environment."""
    where = getattr(options, "address", None) or getattr(options, "config", None)
    return load_identity(where, getattr(options, "settings", None)).read_every_byte


def weights_path(config: Any) -> str:
    """The directory or file that vLLM loaded the weights from. ModelError where that is not on this machine."""
    model = config.model_config
    elsewhere = getattr(model, "model_weights", None)
    if elsewhere and str(elsewhere) != str(model.model):
        raise ModelError(f"the weights are read from {elsewhere}, which is not on this machine; {_REVISION_HINT}")
    return local_snapshot(model.model, getattr(model, "revision", None), _loading(config, "download_dir"))


def local_snapshot(model: str, commit: str | None = None, cache: str | None = None) -> str:
    """Where the weights of a path or a name of the hub are on this machine.

    Args:
        commit: the revision that the engine was told, a branch or a commit.
        cache: the hub's cache where the engine keeps it elsewhere (`--download-dir`).
    """
    if Path(model).exists():
        return model
    if os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in {"1", "true"}:
        raise ModelError(f"{model}: loaded from ModelScope, whose cache is not read; {_REVISION_HINT}")
    found = hub_file(model, ("config.json", "params.json"), commit, cache)
    if found is None:
        raise ModelError(f"{model}: no file or directory, and not in the hub's cache; {_REVISION_HINT}")
    return str(found.parent)


def hub_file(name: str, files: tuple[str, ...], commit: str | None = None, cache: str | None = None) -> Path | None:
    """The first of these files of a repository that the hub's cache has."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    for file in files:
        try:
            found = try_to_load_from_cache(name, file, cache_dir=cache, revision=commit)
        except HFValidationError:  # no name that the hub takes, as "repository:quantisation"
            return None
        if isinstance(found, str):
            return Path(found)
    return None


def load_format(config: Any) -> str:
    """How vLLM was told to load weights; "auto" where it was told nothing."""
    found = _loading(config, "load_format")
    return str(getattr(found, "value", found) or "auto")


def _loading(config: Any, name: str) -> Any:
    return getattr(getattr(config, "load_config", None), name, None)


def model_facts(config: Any) -> dict[str, Any]:
    """What else changes the bytes of a block: the model's configuration, and what vLLM was told otherwise."""
    model, cache = config.model_config, config.cache_config
    hf = model.hf_text_config
    rope = {k: getattr(hf, k) for k in ("rope_theta", "rope_scaling", "rope_parameters") if getattr(hf, k, None)}
    return {
        "engine": "vllm",
        "dtype": str(model.dtype),
        "kv_cache_dtype": str(cache.cache_dtype),
        "quantization": str(model.quantization),
        "rope": encodable(rope),
        "max_tokens": int(model.max_model_len) if depends_on_length(rope) else 0,
        "checkpoint": _checkpoint(config),
        **model_overrides(config),
    }


def _checkpoint(config: Any) -> str:
    """Of the files where there are some, else of the configuration that vLLM made."""
    model = config.model_config
    try:
        place = Path(getattr(model, "hf_config_path", None) or weights_path(config))
    except ModelError:  # `revision` names the weights
        return config_digest(model.hf_config)
    return checkpoint_digest(place) if place.is_dir() else config_digest(model.hf_config)


def model_overrides(config: Any) -> dict[str, Any]:
    """What vLLM was told to load or compute otherwise than the model's files say, where it was told anything."""
    model = config.model_config
    hf = getattr(model, "hf_overrides", None)
    told = {
        "hf_overrides": config_digest(model.hf_config) if callable(hf) else encodable(hf),
        "load_format": None if load_format(config) in _PLAIN_FORMATS else load_format(config),
        "model_loader_extra_config": encodable(_loading(config, "model_loader_extra_config")),
        "disable_sliding_window": bool(getattr(model, "disable_sliding_window", False)),
        "code_revision": getattr(model, "code_revision", None),
        "additional_config": encodable(getattr(config, "additional_config", None)),
        "lora_dtype": str(getattr(getattr(config, "lora_config", None), "lora_dtype", "") or ""),
    }
    return {name: value for name, value in told.items() if value}


def depends_on_length(rope: Mapping[str, Any]) -> bool:
    return any(kind in str(rope).lower() for kind in ("dynamic", "longrope", "su'"))


def encodable(value: Any) -> Any:
    """What a namespace can encode; what it cannot, by its text."""
    if isinstance(value, Mapping):
        return {str(k): encodable(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [encodable(v) for v in value]
    return value if value is None or type(value) in {bool, int, float, str, bytes} else str(value)


class AdapterNames:
    """An adapter's name in a namespace: its name in the engine, and a digest of its weights and configuration.

    vLLM keeps an adapter that it has loaded under its number, whatever becomes of the files. So a number whose files
    have changed is refused: nothing says which weights it computes with.
    """

    def __init__(self, *, read_every_byte: bool = False) -> None:
        self._whole = read_every_byte
        self._loaded: dict[int, str] = {}

    def name(self, lora: Any) -> str | None:
        """ModelError where nothing identifies the adapter's weights: such a request is not cached."""
        if lora is None:
            return None
        if getattr(lora, "tensorizer_config_dict", None):
            raise ModelError(f"adapter {lora.lora_name}: read by tensorizer from elsewhere; give its folder")
        path: Path | None = Path(lora.lora_path).expanduser()
        if path is not None and not path.exists():
            found = hub_file(str(lora.lora_path), ("adapter_config.json",))
            path = found and found.parent
        if path is None:
            raise ModelError(f"adapter {lora.lora_name}: {lora.lora_path} is not there; expected its folder")
        revision = adapter_revision(path, read_every_byte=self._whole)
        number = getattr(lora, "adapter_id", None)
        if number is not None:
            if getattr(lora, "load_inplace", False):
                self._loaded[number] = revision
            if self._loaded.setdefault(number, revision) != revision:
                raise ModelError(
                    f"adapter {lora.lora_name}: {path} has other weights than when vLLM loaded it as {number}; "
                    "load it under another number"
                )
        return f"{lora.lora_name} {revision}"


# The digests by which a request's blocks are named, before they are bound to a namespace (`docs/spec/key.md`). Three
# origins, each a fact of the namespace: vllm the engine's own block hashes, where every process makes the same: they
# bind media, salt and embeddings chain our chain of tokens, with media and salt as extras, where vLLM's hashes are
# seeded by chance or not safe pages the page chain of SGLang, for blocks that both engines are to find

CHAIN_ROOT = sha256(b"kvcache vllm chain 1\n").digest()

DigestOrigin = Literal["vllm", "chain", "pages"]


class BlockDigests:
    """Those of one request, which grow as its tokens do. Each full block is hashed once."""

    def __init__(self, request: Any, origin: DigestOrigin, block_tokens: int, hash_tokens: int) -> None:
        self._request, self._origin = request, origin
        self._block_tokens, self._hashes = block_tokens, block_tokens // hash_tokens
        self._known: list[bytes] = []
        self._chain = Chain(CHAIN_ROOT, block_tokens)

    def up_to(self, blocks: int) -> Sequence[bytes]:
        """The digests of so many blocks, or of as many as are full."""
        full = min(blocks, self._request.num_tokens // self._block_tokens)
        if len(self._known) < full:
            {"vllm": self._vllm, "chain": self._tokens, "pages": self._pages}[self._origin](full)
        return self._known[:blocks]

    def _vllm(self, full: int) -> None:
        hashes = self._request.block_hashes
        full = min(full, len(hashes) // self._hashes)
        self._known += [bytes(hashes[(i + 1) * self._hashes - 1]) for i in range(len(self._known), full)]

    def _tokens(self, full: int) -> None:
        size, known = self._block_tokens, len(self._known)
        tokens = self._request.all_token_ids[known * size : full * size]
        self._chain.extend(list(tokens), [_extras(self._request, i, size) for i in range(known, full)])
        self._known += self._chain.signatures[known:full]

    def _pages(self, full: int) -> None:
        size, known = self._block_tokens, len(self._known)
        tokens = self._request.all_token_ids[known * size : full * size]
        self._known += page_digests(list(tokens), size, self._known[-1] if known else b"")


def unnamed_reason(request: Any, origin: DigestOrigin) -> str:
    """Why the blocks of a request have no name, as the table of reasons calls it; "" where they have."""
    if origin != "vllm" and getattr(request, "prompt_embeds", None) is not None:
        return "embeddings"
    if origin == "pages" and request.mm_features:
        return "media"
    if getattr(request, "resumable", False):
        return "streamed input"
    return ""


def _extras(request: Any, block: int, size: int) -> list[tuple[bytes, bytes]]:
    """What identifies a block beside its tokens: the salt in the first one, media by hash and where they begin."""
    extras = []
    if block == 0 and request.cache_salt:
        extras.append((b"salt", request.cache_salt.encode()))
    start, end = block * size, (block + 1) * size
    for feature in request.mm_features or ():
        at, length = feature.mm_position.offset, feature.mm_position.length
        if at < end and at + length > start:
            extras.append((b"media", f"{at - start} {feature.identifier}".encode()))
    return extras
