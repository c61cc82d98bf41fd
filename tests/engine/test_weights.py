"""Bad directories: one line that says what was found and what to do. Good ones in other forms: the same model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from kvcache.engine.model import load_model
from kvcache.errors import ModelError
from tests.engine import tiny_model
from tests.engine.greedy_decode import greedy

PROMPT = [list(range(40))]
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(tiny_model.make(tmp_path_factory.mktemp("models") / "llama"))


@pytest.fixture
def directory(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "model"))


def refused(directory: Path, match: str) -> None:
    with pytest.raises(ModelError, match=match) as error:
        load_model(str(directory))
    assert "\n" not in str(error.value)
    assert str(directory) in str(error.value)


def change(path: Path, **fields: Any) -> None:
    config = json.loads(path.read_text())
    config.update(fields)
    path.write_text(json.dumps(config))


def test_a_missing_directory_is_refused(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "not found; give a directory")


def test_an_empty_directory_is_refused(tmp_path: Path) -> None:
    refused(tmp_path, r"config.json: no such file: expected a directory with config.json")


def test_a_directory_without_weights_is_refused(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    refused(directory, "no weights; expected files that end in .safetensors")


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"llama"', "\x00"])
def test_an_invalid_config_is_refused(directory: Path, text: str) -> None:
    (directory / "config.json").write_text(text)
    refused(directory, "JSON")


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2': expected one of llama, mistral, qwen2, qwen3"),
        ({"model_type": None}, "model_type = None: expected str"),
        ({"hidden_size": "48"}, "hidden_size = '48': expected int"),
        ({"hidden_size": None}, "hidden_size = None: expected int"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0: expected at least 1"),
        ({"num_hidden_layers": True}, "num_hidden_layers = True: expected int"),
        ({"num_key_value_heads": 3}, "4 heads over 3 KV heads"),
        ({"head_dim": 11}, "head_dim = 11: expected an even number"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu': expected 'silu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"eos_token_id": ["2"]}, "eos_token_id"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope type 'longrope': expected one of default"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope type 'linear' without factor"),
        ({"rope_parameters": {"rope_type": "linear", "factor": "2"}}, "factor = '2': expected a number"),
    ],
)
def test_a_config_of_another_kind_is_refused(directory: Path, fields: dict[str, Any], match: str) -> None:
    (directory / "generation_config.json").unlink()
    change(directory / "config.json", **fields)
    refused(directory, match)


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "1 tensors missing, first model.layers.1.mlp.up_proj"),
        (lambda t: t.update({"model.norm.weight": torch.ones(47)}), r"has shape \(47,\), config.json says \(48,\)"),
        (lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(48)}), "does not describe"),
        (lambda t: t.update({"model.norm.weight": torch.ones(48, dtype=torch.int8)}), "is I8: expected F32, F16, BF16"),
    ],
)
def test_mismatched_weights_are_refused(directory: Path, edit: Callable[[Tensors], Any], match: str) -> None:
    tensors = load_file(directory / "model.safetensors")
    edit(tensors)
    save_file(tensors, directory / "model.safetensors")
    refused(directory, match)


@settings(max_examples=20)
@given(st.floats(0, 1, exclude_max=True))
def test_a_truncated_file_is_refused(good: Path, tmp_path_factory: pytest.TempPathFactory, part: float) -> None:
    directory = tmp_path_factory.mktemp("model")
    shutil.copy(good / "config.json", directory)
    whole = (good / "model.safetensors").read_bytes()
    (directory / "model.safetensors").write_bytes(whole[: int(part * len(whole))])
    refused(directory, "model.safetensors: .*; fetch the file again|not a whole safetensors file")


def test_sharded_weights_load_as_one_model(good: Path, directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"model-1-of-2.safetensors": names[::2], "model-2-of-2.safetensors": names[1::2]}
    for file, held in shards.items():
        save_file({name: tensors[name] for name in held}, directory / file)
    index = {"weight_map": {name: file for file, held in shards.items() for name in held}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    assert greedy(load_model(str(directory)), PROMPT, 5) == greedy(load_model(str(good)), PROMPT, 5)
    (directory / "model-2-of-2.safetensors").unlink()
    refused(directory, "model-2-of-2.safetensors: not a whole safetensors file")
    (directory / "model.safetensors.index.json").write_text("{}")
    refused(directory, "not an index of safetensors")


def test_extra_tensors_of_old_checkpoints_are_ignored(good: Path, directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(6)
    save_file(tensors, directory / "model.safetensors")
    assert greedy(load_model(str(directory)), PROMPT, 5) == greedy(load_model(str(good)), PROMPT, 5)


def test_files_may_change_after_the_load(directory: Path) -> None:
    model = load_model(str(directory))
    before = greedy(model, PROMPT, 5)
    with (directory / "model.safetensors").open("r+b") as file:
        size = file.seek(0, 2)
        file.seek(size // 2)
        file.write(bytes(size - size // 2))
    assert greedy(model, PROMPT, 5) == before


def test_eos_ids_of_the_generation_config_are_used(directory: Path) -> None:
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4]}))
    assert load_model(str(directory)).eos_token_ids == {3, 4}
    (directory / "generation_config.json").write_text("{}")
    assert load_model(str(directory)).eos_token_ids == {tiny_model.EOS}
