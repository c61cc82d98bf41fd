"""Identity of a block: the namespace and the digests of a request, from vLLM's configuration and the request."""

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
    """The fields of a namespace that may differ between requests."""

    tenant: str = "default"
    adapter: str | None = None
    salt: str = ""  # set by a reset, so that blocks stored before it have another namespace
    epoch: str = ""  # set by a reset: what was stored before it is another namespace


def model_name_and_revision(config: Any, options: Options) -> tuple[str, str]:
    """Return name and revision of the model; ModelError where nothing identifies its weights.

    A path is named by its last part, since the revision identifies the weights. A name on the hub is kept.
    """
    model = config.model_config.model
    if options.revision:
        return _named(model, options), options.revision
    folder, kinds = weights_path(config), loader_kinds(load_format(config))
    return _named(model, options), model_revision(folder, kinds=kinds, read_every_byte=read_every_byte(options))


def resolve_revision(model: str, options: Options | TierOptions, engine_id: str) -> tuple[str, str]:
    """Return name and revision for a tier. vLLM gives a tier only the model's path or its name on the hub.

    Raises:
        ModelError: the hub's cache has several snapshots, and the engine may have loaded any of them.
    """
    if options.revision:
        return _named(model, options), options.revision
    try:
        folder = local_snapshot(model)
        if not Path(model).exists() and len(list(Path(folder).parent.iterdir())) > 1:
            raise ModelError(f"{model}: the hub's cache has several snapshots of it, and vLLM does not name one")
        return _named(model, options), model_revision(folder, read_every_byte=read_every_byte(options))
    except ModelError as error:
        raise ModelError(f"engine {engine_id}: {error}; {_REVISION_HINT}") from None


def _named(model: str, options: Options | TierOptions) -> str:
    return options.model or (Path(model).name if Path(model).exists() else model)


def checkpoint_of(model: str) -> str:
    """Return the digest of the files beside the weights, for a tier; "" where this machine has none."""
    try:
        folder = Path(local_snapshot(model))
        return checkpoint_digest(folder) if folder.is_dir() else ""
    except ModelError:
        return ""


def read_every_byte(options: Options | TierOptions) -> bool:
    """Return the setting of that name from the options, their file or the environment."""
    where = getattr(options, "address", None) or getattr(options, "config", None)
    return load_identity(where, getattr(options, "settings", None)).read_every_byte


def weights_path(config: Any) -> str:
    """Return the directory or file that vLLM loaded the weights from; ModelError where it is not on this machine."""
    model = config.model_config
    elsewhere = getattr(model, "model_weights", None)
    if elsewhere and str(elsewhere) != str(model.model):
        raise ModelError(f"the weights are read from {elsewhere}, which is not on this machine; {_REVISION_HINT}")
    return local_snapshot(model.model, getattr(model, "revision", None), _loading(config, "download_dir"))


def local_snapshot(model: str, commit: str | None = None, cache: str | None = None) -> str:
    """Return the local path of the weights of a path or a name on the hub.

    Args:
        commit: the revision that the engine was given, a branch or a commit.
        cache: the hub's cache, where the engine keeps it elsewhere (`--download-dir`).
    """
    if Path(model).exists():
        return model
    if os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in {"1", "true"}:
        raise ModelError(f"{model}: loaded from ModelScope, whose cache is not supported; {_REVISION_HINT}")
    found = hub_file(model, ("config.json", "params.json"), commit, cache)
    if found is None:
        raise ModelError(f"{model}: no file or directory, and not in the hub's cache; {_REVISION_HINT}")
    return str(found.parent)


def hub_file(name: str, files: tuple[str, ...], commit: str | None = None, cache: str | None = None) -> Path | None:
    """Return the first of these files of a repository that the hub's cache has."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    for file in files:
        try:
            found = try_to_load_from_cache(name, file, cache_dir=cache, revision=commit)
        except HFValidationError:  # not a name on the hub, such as "repository:quantisation"
            return None
        if isinstance(found, str):
            return Path(found)
    return None


def load_format(config: Any) -> str:
    """Return vLLM's load format for weights; "auto" by default."""
    found = _loading(config, "load_format")
    return str(getattr(found, "value", found) or "auto")


def _loading(config: Any, name: str) -> Any:
    return getattr(getattr(config, "load_config", None), name, None)


def model_facts(config: Any) -> dict[str, Any]:
    """Return what else changes the bytes of a block: the model's configuration, and vLLM's options that override it."""
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
    """Return the digest of the checkpoint's files, or of the configuration that vLLM made where there are no files."""
    model = config.model_config
    try:
        folder = Path(getattr(model, "hf_config_path", None) or weights_path(config))
    except ModelError:  # `revision` names the weights
        return config_digest(model.hf_config)
    return checkpoint_digest(folder) if folder.is_dir() else config_digest(model.hf_config)


def model_overrides(config: Any) -> dict[str, Any]:
    """Return vLLM's options that change what the model's files say, where any are set."""
    model = config.model_config
    hf = getattr(model, "hf_overrides", None)
    facts = {
        "hf_overrides": config_digest(model.hf_config) if callable(hf) else encodable(hf),
        "load_format": None if load_format(config) in _PLAIN_FORMATS else load_format(config),
        "model_loader_extra_config": encodable(_loading(config, "model_loader_extra_config")),
        "disable_sliding_window": bool(getattr(model, "disable_sliding_window", False)),
        "code_revision": getattr(model, "code_revision", None),
        "additional_config": encodable(getattr(config, "additional_config", None)),
        "lora_dtype": str(getattr(getattr(config, "lora_config", None), "lora_dtype", "") or ""),
    }
    return {name: value for name, value in facts.items() if value}


def depends_on_length(rope: Mapping[str, Any]) -> bool:
    return any(kind in str(rope).lower() for kind in ("dynamic", "longrope", "su'"))


def encodable(value: Any) -> Any:
    """Convert a value to what a namespace can encode; other values become text."""
    if isinstance(value, Mapping):
        return {str(k): encodable(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [encodable(v) for v in value]
    return value if value is None or type(value) in {bool, int, float, str, bytes} else str(value)


class AdapterNames:
    """An adapter's name in a namespace: its name in the engine, and a digest of its weights and configuration.

    vLLM keeps a loaded adapter under its number, even when the files change. A number whose files have changed is
    refused, since its weights in the engine are unknown.
    """

    def __init__(self, *, read_every_byte: bool = False) -> None:
        self._whole = read_every_byte
        self._loaded: dict[int, str] = {}

    def name(self, lora: Any) -> str | None:
        """Return the adapter's name, None without an adapter.

        Raises:
            ModelError: nothing identifies the adapter's weights; such a request is not cached.
        """
        if lora is None:
            return None
        if getattr(lora, "tensorizer_config_dict", None):
            raise ModelError(f"adapter {lora.lora_name}: tensorizer loads it from a remote location; give its folder")
        path: Path | None = Path(lora.lora_path).expanduser()
        if path is not None and not path.exists():
            found = hub_file(str(lora.lora_path), ("adapter_config.json",))
            path = found and found.parent
        if path is None:
            raise ModelError(f"adapter {lora.lora_name}: {lora.lora_path} does not exist; expected its folder")
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


# The digests that name a request's blocks, before they are bound to a namespace (`docs/spec/key.md`). The namespace
# names their origin as a fact:
#
# - vllm: the engine's own block hashes, where every process computes the same. They bind media, salt and embeddings.
# - chain: our chain of tokens, with media and salt as extras, where vLLM's hashes have a random seed or are not safe.
# - pages: the page chain of SGLang, for blocks that both engines share.

CHAIN_ROOT = sha256(b"kvcache vllm chain 1\n").digest()

DigestOrigin = Literal["vllm", "chain", "pages"]


class BlockDigests:
    """The digests of one request, which grow with its tokens. Each full block is hashed once."""

    def __init__(self, request: Any, origin: DigestOrigin, block_tokens: int, hash_tokens: int) -> None:
        self._request, self._origin = request, origin
        self._block_tokens, self._hashes = block_tokens, block_tokens // hash_tokens
        self._known: list[bytes] = []
        self._chain = Chain(CHAIN_ROOT, block_tokens)

    def up_to(self, blocks: int) -> Sequence[bytes]:
        """Return the digests of the first `blocks` blocks, or of those that are full."""
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
    """Return why the blocks of a request have no name, as a label of the reasons table; "" where they have one."""
    if origin != "vllm" and getattr(request, "prompt_embeds", None) is not None:
        return "embeddings"
    if origin == "pages" and request.mm_features:
        return "media"
    if getattr(request, "resumable", False):
        return "streamed input"
    return ""


def _extras(request: Any, block: int, size: int) -> list[tuple[bytes, bytes]]:
    """Return what identifies a block beside its tokens: the salt in the first block, media by hash and offset."""
    extras = []
    if block == 0 and request.cache_salt:
        extras.append((b"salt", request.cache_salt.encode()))
    start, end = block * size, (block + 1) * size
    for feature in request.mm_features or ():
        at, length = feature.mm_position.offset, feature.mm_position.length
        if at < end and at + length > start:
            extras.append((b"media", f"{at - start} {feature.identifier}".encode()))
    return extras
