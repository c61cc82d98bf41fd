"""Options, the identity of a model, and the cache of the process.

Two servers share a page where their identities agree. SGLang's own keys cover tokens, adapter and salt only.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from hashlib import sha256
from pathlib import Path
from typing import Any

import kvcache
from kvcache.block.chain import PAGE_CHAIN_ID
from kvcache.block.checkpoint import checkpoint_digest
from kvcache.block.hf import engine_facts, read_config
from kvcache.block.revision import WEIGHT_SUFFIXES, adapter_revision, loader_kinds, model_revision
from kvcache.block.shared_namespace import shared_identity
from kvcache.cache.api import KVCache
from kvcache.connector.guard import recover
from kvcache.connector.sglang.host_pools import Ranks
from kvcache.daemon.client.autostart import find_or_start
from kvcache.errors import ConfigError, ModelError
from kvcache.log import log_faults
from kvcache.settings.sources import load_identity

# Options under "kvcache" in SGLang's extra configuration.

MAX_DEADLINE_S = 4.0
"""A call may take twice as long, and beyond ten seconds SGLang cannot stop its threads, and fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the connector. All other names are settings of the cache, as in `kvcache.open`.

    where                   a settings file or a daemon ("unix:..."); by default a cache in this process, or for several
                            ranks a daemon of this engine
    model, revision         names of the model and its weights, where SGLang's own do not identify them
    tenant, cache_salt      owner of the memory; separates namespaces
    share_across_engines    store blocks in the order that all engines read
    deadline_s              longest duration of a call
    lookup_wait_s           longest time that a lookup of the linker blocks the scheduler
    """

    where: str | None = None
    model: str | None = None
    revision: str | None = None
    tenant: str = "default"
    cache_salt: str = ""
    share_across_engines: bool = False
    deadline_s: float = 3.0
    lookup_wait_s: float = 0.05
    settings: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, extra: Mapping[str, Any] | None) -> Options:
        """Read the extra configuration; ConfigError for invalid values."""
        given = (extra or {}).get("kvcache") or {}
        if not isinstance(given, Mapping):
            raise ConfigError(f"kvcache = {given!r}: expected a map of settings in the extra configuration")
        ours = {f.name: f.type for f in fields(cls) if f.name != "settings"}
        options = cls(
            **{name: value for name, value in given.items() if name in ours},
            settings={name: value for name, value in given.items() if name not in ours},
        )
        kinds: dict[str, Any] = {"share_across_engines": bool, "tenant": str, "cache_salt": str}
        for name, kind in kinds.items():
            value = getattr(options, name)
            if not isinstance(value, kind):
                raise ConfigError(f"kvcache.{name} = {value!r}: expected a {kind.__name__}")
        for name, least in (("deadline_s", 0.01), ("lookup_wait_s", 0.0)):
            value = getattr(options, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= MAX_DEADLINE_S:
                raise ConfigError(f"kvcache.{name} = {value!r}: expected seconds from {least} to {MAX_DEADLINE_S}")
        return options


_IDENTITY_ARGUMENTS = (
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
_UNSET_VALUES = frozenset({"", "auto", "{}"})


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    model: str
    revision: str
    facts: Mapping[str, Any]
    shared: bool = False

    def facts_of(self, pool: str, tag: str) -> dict[str, Any]:
        """Return the facts of one pool: SGLang's name for it, and the format it declares.

        Raises:
            ModelError: the model is shared and has a second pool, which other engines do not have.
        """
        if self.shared and pool != "kv":
            raise ModelError(f"pool {pool!r}: other engines do not have this pool; set share_across_engines = false")
        return dict(self.facts) if self.shared else {**self.facts, "pool": pool, "pool_format": tag}


def identify_model(served: Any, name: str | None, options: Options) -> ModelIdentity:
    """Return the identity, from the server's arguments where it has any; ModelError where nothing identifies the
    weights.

    A path is named by its last part, since the revision identifies the weights. A name on the hub is kept.
    """
    path = str(getattr(served, "model_path", None) or name or "")
    folder = _model_directory(path, getattr(served, "revision", None), getattr(served, "download_dir", None))
    if options.revision is None and folder is None:
        raise ModelError(
            f"model {path!r}: no file or directory, and not in the hub's cache; its weights have no identity; "
            'give "revision" under "kvcache" in the extra configuration'
        )
    model = options.model or (Path(path).name if path and Path(path).exists() else path) or "model"
    kinds = WEIGHT_SUFFIXES if options.revision else loader_kinds(_text(served, "load_format") or "auto")
    whole = load_identity(options.where, options.settings).read_every_byte
    given = _overrides(served, whole)
    if options.share_across_engines:
        if folder is None or not folder.is_dir():
            raise ModelError(f"model {path!r}: share_across_engines compares configurations; give its directory")
        given.pop("kv_cache_dtype", None)  # the layout has it
        if given.get("load_format") == "safetensors":
            given.pop("load_format")
        if "quantization_config" in engine_facts(folder):
            given.pop("quantization", None)  # SGLang found it there
        dtype = given.pop("dtype", None)
        same = shared_identity(
            folder,
            model=options.model,
            revision=options.revision,
            changed=given,
            dtype=_DTYPES.get(str(dtype), dtype),
            kinds=kinds,
            read_every_byte=whole,
        )
        return ModelIdentity(same.model, same.revision, same.facts, shared=True)
    revision = options.revision or model_revision(folder or path, kinds=kinds, read_every_byte=whole)
    directory = folder if folder is not None and folder.is_dir() else None
    facts: dict[str, Any] = {
        "identity": PAGE_CHAIN_ID,
        "engine": "sglang",
        "config": _config_facts(directory) if directory else None,
        "checkpoint": checkpoint_digest(directory) if directory else None,
        **given,
    }
    return ModelIdentity(model, revision, facts)


def _overrides(served: Any, whole: bool) -> dict[str, Any]:
    """Return the server's arguments that change what the model's files say."""
    given: dict[str, Any] = {name: value for name in (*_IDENTITY_ARGUMENTS, "dtype") if (value := _text(served, name))}
    for name in _FILES:
        if value := _text(served, name):
            file = Path(value)
            given[name] = sha256(file.read_bytes()).hexdigest() if file.is_file() else value
    if adapters := _adapters(getattr(served, "lora_paths", None), whole):
        given["adapters"] = adapters
    return given


def _text(served: Any, name: str) -> str:
    """Return an argument of the server; "" where it was not given, or adds nothing to the files."""
    value = getattr(served, name, None)
    if value is None or value is False or (isinstance(value, Mapping) and not value):
        return ""
    if isinstance(value, Mapping):
        return json.dumps(value, sort_keys=True, default=str)
    text = str(getattr(value, "value", value))
    return "" if text in _UNSET_VALUES else text


def _adapters(configured: Any, whole: bool) -> dict[str, str]:
    """Return the adapters that the server starts with, by name. SGLang numbers them by name and path, not by their
    weights."""
    paths: dict[str, str] = {}
    for item in configured.items() if isinstance(configured, Mapping) else configured or ():
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
    folder = Path(path) if Path(path).exists() else _cached(path, "adapter_config.json")
    if folder is None:
        raise ModelError(f"adapter {name}: {path} is not on this machine; give its folder")
    return folder


def _config_facts(snapshot: Path) -> dict[str, Any]:
    """Return what changes keys and values beside the weights, under the reference engine's names."""
    eps = read_config(snapshot).get("rms_norm_eps")
    return {**engine_facts(snapshot), "rms_norm_eps": eps, "windows": None}


def _model_directory(path: str, revision: Any, cache: Any) -> Path | None:
    """Return the directory of the model's files, where it is on this machine."""
    if path and Path(path).exists():
        return Path(path)
    if os.environ.get("SGLANG_USE_MODELSCOPE", "").lower() in {"1", "true"}:
        return None  # its cache is not read
    return _cached(path, "config.json", revision, cache) or _cached(path, "params.json", revision, cache)


def _cached(name: str, file: str, revision: Any = None, cache: Any = None) -> Path | None:
    def look() -> object:
        from huggingface_hub import try_to_load_from_cache

        return try_to_load_from_cache(name, file, revision=revision or "main", cache_dir=cache)

    found = recover(look, lambda error: None)  # without the hub's library, or for a name that is not the hub's
    return Path(found).parent if isinstance(found, str) else None


# The cache of a process, opened with SGLang's backend or linker, and closed with it in bounded time.

CLOSE_S = 5.0

_log = logging.getLogger("kvcache.sglang")
_closing: list[threading.Thread] = []  # a directory that one of these still uses cannot be opened again


def engine_name(served: Any, ranks: Ranks, options: Options) -> str | None:
    """Return the name that the processes of one server share; None for a single process."""
    replicas = getattr(served, "dp_size", 1) or 1
    if ranks.alone and replicas == 1:
        return None
    at = f"{getattr(served, 'host', '')}:{getattr(served, 'port', '')}"
    digest = sha256(repr((at, sorted(options.settings.items()))).encode()).hexdigest()
    return f"sglang-{digest[:16]}"


def open_cache(options: Options, engine: str | None = None) -> KVCache:
    """Open the cache.

    Args:
        engine: the server's name where it has several processes. They share a daemon, started here where none is given.

    Raises:
        ConfigError, StoreError: invalid settings, or a tier that cannot be opened. SGLang then does not start.
    """
    for thread in _closing[:]:
        thread.join(CLOSE_S)
        _closing.remove(thread)
    where, settings = options.where, dict(options.settings)
    if where is None and engine is not None:
        where, settings = find_or_start(engine, **settings), {}
    if where is not None and where.startswith("unix:") and engine is not None:
        settings["engine"] = engine
    return kvcache.open(where, **settings)


def close_cache(cache: KVCache) -> None:
    """Close the cache within `CLOSE_S`. Records that have not reached the drive by then are written in the
    background."""
    closer = run_detached(cache.close, "closing")
    if closer is not None:
        _closing.append(closer)


def run_detached(work: Callable[[], object], what: str) -> threading.Thread | None:
    """Run `work` and return within `CLOSE_S`, since SGLang's scheduler waits; return the thread if it still runs."""

    def run() -> None:
        with log_faults(_log, "%s failed", what):
            work()

    thread = threading.Thread(target=run, name=f"kvcache-{what}", daemon=True)
    thread.start()
    thread.join(CLOSE_S)
    if not thread.is_alive():
        return None
    _log.warning("%s exceeds %s s and continues in the background", what, CLOSE_S)
    return thread
