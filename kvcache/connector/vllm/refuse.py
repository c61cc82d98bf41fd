"""What is refused at start, and what goes by uncached, each with its reason."""

from __future__ import annotations

from typing import Any

from kvcache.errors import ConfigError

_NO_DRAFT = {"ngram", "ngram_gpu", "suffix"}
"""Ways of speculation without keys and values of their own."""


def refuse(config: Any) -> None:
    """ConfigError for what cannot be served by blocks of whole prefixes, however one tried."""
    parallel = config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel, name, 1) or 1
        if size > 1:
            raise ConfigError(
                f"{name} = {size}: a rank would hold tokens of every block and no block whole; "
                "start without it, or without KVCacheConnector"
            )


def declines(config: Any) -> str:
    """Why this engine runs without its cache; "" where it runs with it."""
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
