"""The options in `kv_connector_extra_config`, and the configurations that are refused or not cached."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvcache.errors import ConfigError


class Options(BaseModel):
    """Options of the connector, all optional. By default it caches in host memory and on the drive, as `kvcache.open`
    does."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    config: Path | None = Field(default=None, description="A settings file for the cache, `kvcache.toml`.")
    settings: dict[str, Any] = Field(
        default_factory=dict,
        description='Settings that override the file: `{"host": {"capacity_bytes": "8GiB"}}`.',
    )
    address: str | None = Field(
        default=None,
        description="Address of a daemon of this host, `unix:/...`. The daemon has its own settings.",
    )
    mode: Literal["cache", "observe"] = Field(
        default="cache", description="`observe` stores and loads nothing, and counts the hits that it would have had."
    )
    load: Literal["async", "sync", "layers"] = Field(
        default="async",
        description="`async`: a request waits for its blocks while others compute; `sync`: the step waits; "
        "`layers`: each layer waits for its own.",
    )
    lookup_s: float = Field(default=0.1, gt=0, description="Longest wait of a request for lookups in shared tiers.")
    load_s: float = Field(default=5.0, gt=0, description="Longest wait for a block; then the engine computes it.")
    share_across_engines: bool = Field(
        default=False, description="Identify blocks by SGLang's page chain, so that both engines share them."
    )
    tenant: str = Field(default="default", min_length=1, description="The tenant of requests that do not name one.")
    model: str | None = Field(default=None, description="The model's name in the namespace, instead of the engine's.")
    revision: str | None = Field(
        default=None, description="The revision of the weights, instead of the hub's commit or a sample of the files."
    )


class TierOptions(BaseModel):
    """Options of a tier below vLLM's own offloading, beside `type` and `module_path`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    config: Path | None = Field(default=None, description="A settings file for the cache, `kvcache.toml`.")
    settings: dict[str, Any] = Field(default_factory=dict, description="Settings that override the file.")
    address: str | None = Field(
        default=None, description="Address of a daemon that engines of this host share, `unix:/...`."
    )
    lookup_s: float = Field(default=0.1, gt=0, description="Longest wait of a lookup in shared tiers.")
    load_s: float = Field(default=5.0, gt=0, description="Longest wait for a chunk; then the engine computes it.")
    tenant: str = Field(default="default", min_length=1, description="Who pays.")
    model: str | None = Field(default=None, description="The model's name in the namespace, instead of the engine's.")
    revision: str | None = Field(
        default=None, description="The revision of the weights, instead of the hub's commit or a sample of the files."
    )


OptionsT = TypeVar("OptionsT", bound=BaseModel)


def parse_options(extra: dict[str, Any], made: type[OptionsT], *, where: str = "kv_connector_extra_config") -> OptionsT:
    """Parse options; ConfigError names the setting, its value and what is valid."""
    try:
        return made(**extra)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"])) or where
        if first["type"] == "extra_forbidden":
            known = ", ".join(made.model_fields)
            raise ConfigError(f"{where} has {name!r}: no such setting; expected one of {known}") from None
        raise ConfigError(f"{where}: {name} = {cast('Any', first['input'])!r}: {first['msg'].lower()}") from None


# Configurations that are refused at start, or run uncached, each with its reason.

_NO_DRAFT = {"ngram", "ngram_gpu", "suffix"}
"""Methods of speculation without keys and values of their own."""


def reject_unsupported(config: Any) -> None:
    """Raise ConfigError for a configuration that blocks of whole prefixes cannot serve."""
    parallel = config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel, name, 1) or 1
        if size > 1:
            raise ConfigError(
                f"{name} = {size}: each rank would hold a part of every block; "
                "start without this option, or without KVCacheConnector"
            )


def uncached_reason(config: Any) -> str:
    """Return why this engine runs without its cache; "" where it runs with it."""
    speculative = getattr(config, "speculative_config", None)
    method = getattr(speculative, "method", None)
    if speculative is not None and method not in _NO_DRAFT:
        return (
            f"speculation by {method!r}: the draft's keys and values of a block depend on the token behind it, "
            "so that a block is not whole when it is full"
        )
    if getattr(config.cache_config, "calculate_kv_scales", False):
        return "calculate_kv_scales: the scales are chosen while running and would not travel with the blocks"
    model, device = config.model_config, getattr(config.device_config, "device_type", "")
    if device == "cpu" and getattr(model, "use_mla", False) and not config.scheduler_config.enable_chunked_prefill:
        return (
            "this processor's attention over latents computes a prompt from its first token only, without what is "
            "cached: vLLM has taken its own prefix cache away as well"
        )
    return ""
