"""What an engine is refused for at start, and what makes it run without its cache."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvcache.connector.vllm.config import reject_unsupported, uncached_reason
from kvcache.errors import ConfigError


def config(**given: Any) -> SimpleNamespace:
    fields = {
        "parallel_config": SimpleNamespace(decode_context_parallel_size=1),
        "cache_config": SimpleNamespace(calculate_kv_scales=False),
        "speculative_config": None,
        "model_config": SimpleNamespace(use_mla=False),
        "device_config": SimpleNamespace(device_type="cpu"),
        "scheduler_config": SimpleNamespace(enable_chunked_prefill=False),
    }
    return SimpleNamespace(**{**fields, **given})


@pytest.mark.parametrize("name", ["decode_context_parallel_size", "prefill_context_parallel_size"])
def test_context_parallel_is_refused_with_the_reason(name: str) -> None:
    reject_unsupported(config())
    with pytest.raises(ConfigError, match=rf"{name} = 2: each rank would hold a part of every block"):
        reject_unsupported(config(parallel_config=SimpleNamespace(**{name: 2})))


@pytest.mark.parametrize(
    ("method", "reason"), [("ngram", ""), ("suffix", ""), ("eagle3", "'eagle3'"), ("draft_model", "'draft_model'")]
)
def test_draft_models_run_uncached(method: str, reason: str) -> None:
    said = uncached_reason(config(speculative_config=SimpleNamespace(method=method)))
    assert (reason in said) if reason else said == ""


def test_unstored_scales_and_cpu_latents_run_uncached() -> None:
    assert uncached_reason(config()) == ""
    assert "calculate_kv_scales" in uncached_reason(config(cache_config=SimpleNamespace(calculate_kv_scales=True)))
    latents = SimpleNamespace(use_mla=True)
    assert "from its first token only" in uncached_reason(config(model_config=latents))
    able = SimpleNamespace(enable_chunked_prefill=True)
    assert uncached_reason(config(model_config=latents, scheduler_config=able)) == ""
    assert uncached_reason(config(model_config=latents, device_config=SimpleNamespace(device_type="cuda"))) == ""
