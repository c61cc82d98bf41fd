"""Rotary frequencies against transformers, over settings that published models use."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvcache.engine.layers import RotaryEmbedding, apply_rotary

LLAMA31 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
SETTINGS: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.5},
    {"rope_type": "dynamic", "factor": 4.0},
    {"rope_type": "llama3", **LLAMA31},
    {"rope_type": "llama3", **LLAMA31, "factor": 32.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "attention_factor": 0.5},
    {"rope_type": "yarn", "original_max_position_embeddings": 4096, "beta_fast": 16, "beta_slow": 2, "truncate": False},
]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_frequencies_equal_transformers(settings: dict[str, Any], theta: float, head_dim: int) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    settings = {"rope_theta": theta, **settings}
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        max_position_embeddings=131072,
        rope_parameters={"factor": None, **settings} if settings["rope_type"] == "yarn" else settings,
    )
    peer = LlamaRotaryEmbedding(config)
    rope = RotaryEmbedding(settings, head_dim=head_dim, max_tokens=131072)
    torch.testing.assert_close(rope.rate, peer.inv_freq, rtol=1e-6, atol=0)
    assert rope.scale == pytest.approx(peer.attention_scaling, rel=1e-12)


def test_rotation_keeps_lengths_and_relative_distance() -> None:
    rope = RotaryEmbedding({"rope_type": "default", "rope_theta": 10000.0}, head_dim=64, max_tokens=4096)
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 64)

    def score(at: int, other: int) -> torch.Tensor:
        angles = (rope.angles(torch.tensor([position]), torch.float32) for position in (at, other))
        first, second = (apply_rotary(x, *angle) for x, angle in zip((q, k), angles, strict=True))
        torch.testing.assert_close(first.norm(), q.norm())
        return (first * second).sum()

    torch.testing.assert_close(score(5, 2), score(105, 102), atol=1e-3, rtol=0)
    assert (score(5, 2) - score(5, 3)).abs() > 1e-2
