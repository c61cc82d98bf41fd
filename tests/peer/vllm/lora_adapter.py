"""An adapter of random weights for the small Llama: python lora_adapter.py FOLDER SEED."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

HIDDEN, HEADS, DIM, LAYERS, RANK = 256, 8, 32, 4, 8


def make(place: Path, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(LAYERS):
        for name, width in (("q_proj", HEADS * DIM), ("o_proj", HIDDEN)):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{prefix}.lora_A.weight"] = torch.randn(RANK, HIDDEN, generator=generator)
            weights[f"{prefix}.lora_B.weight"] = torch.randn(width, RANK, generator=generator) * 0.1
    place.mkdir(parents=True, exist_ok=True)
    save_file(weights, place / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 16, "target_modules": ["q_proj", "o_proj"], "bias": "none"}
    (place / "adapter_config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    make(Path(sys.argv[1]), int(sys.argv[2]))
