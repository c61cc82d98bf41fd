"""Whatever selects what a model computes makes another namespace; where it lies, and when it was written, does not."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.block.checkpoint import UNUSED, checkpoint_digest, config_digest
from kvcache.block.layout import KVLayout
from kvcache.block.namespace import Namespace
from kvcache.block.shared_namespace import shared_identity
from kvcache.connector.sglang.config import Options as SGLangOptions
from kvcache.connector.sglang.config import identify_model
from kvcache.connector.vllm.config import Options, TierOptions
from kvcache.connector.vllm.identity import (
    AdapterNames,
    local_snapshot,
    model_facts,
    model_name_and_revision,
    resolve_revision,
)
from kvcache.errors import ModelError

LAYOUT = KVLayout.mha(layers=1, kv_heads=1, head_dim=8, dtype="fp16")
COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "hidden_act": "silu",
    "num_experts_per_tok": 2,
    "attn_logit_softcapping": 30.0,
    "tie_word_embeddings": False,
    "sliding_window": None,
    "text_config": {"query_pre_attn_scalar": 256},
}
SIZE = 512


def weights(path: Path, content: bytes, name: str = "w") -> None:
    header = json.dumps({name: {"dtype": "U8", "shape": [len(content)], "data_offsets": [0, len(content)]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + content)


def checkpoint(place: Path, content: bytes = bytes(SIZE), config: Mapping[str, Any] = CONFIG) -> Path:
    """Two shards with an index, and what else selects."""
    place.mkdir(parents=True, exist_ok=True)
    (place / "config.json").write_text(json.dumps(config))
    weights(place / "model-1.safetensors", content)
    weights(place / "model-2.safetensors", bytes(SIZE), "v")
    shards = {"w": "model-1.safetensors", "v": "model-2.safetensors"}
    (place / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    (place / "hf_quant_config.json").write_text('{"quant_algo": "FP8"}')
    (place / "README.md").write_text("a model")
    return place


def vllm_config(place: Path, **told: Any) -> Any:
    model = {
        "model": str(place),
        "revision": None,
        "dtype": "torch.float16",
        "quantization": None,
        "max_model_len": 512,
        "hf_text_config": SimpleNamespace(rope_theta=1e4),
        "hf_config": CONFIG,
    }
    load = {
        name: told.pop(name) for name in ("load_format", "model_loader_extra_config", "download_dir") if name in told
    }
    cache = told.pop("cache_dtype", "auto")
    return SimpleNamespace(
        model_config=SimpleNamespace(**model | told),
        cache_config=SimpleNamespace(cache_dtype=cache),
        load_config=SimpleNamespace(**load),
    )


def by_vllm(place: Path, **told: Any) -> bytes:
    config = vllm_config(place, **told)
    name, revision = model_name_and_revision(config, Options(model="m"))
    return Namespace(LAYOUT, model=name, revision=revision, facts=model_facts(config)).id


def by_sglang(place: Path, **told: Any) -> bytes:
    found = identify_model(SimpleNamespace(model_path=str(place), **told), None, SGLangOptions(model="m"))
    return Namespace(LAYOUT, model=found.model, revision=found.revision, facts=found.facts_of("kv", "")).id


def by_sharing(place: Path, **told: Any) -> bytes:
    found = shared_identity(place, changed=told)
    return Namespace(LAYOUT, model=found.model, revision=found.revision, facts=found.facts).id


ENGINES: Mapping[str, Callable[..., bytes]] = {"vllm": by_vllm, "sglang": by_sglang, "sharing": by_sharing}


@st.composite
def changes(draw: st.DrawFn) -> tuple[str, Any]:
    """One input that changes logits."""
    kind = draw(st.sampled_from(["weights", "config", "nested", "new field", "index", "quantisation", "shard"]))
    if kind == "weights":
        return kind, (draw(st.integers(0, SIZE - 1)), draw(st.integers(1, 255)))
    if kind == "config":
        return kind, draw(st.sampled_from(sorted(set(CONFIG) - {"text_config"})))
    return kind, draw(st.integers(1, 1000))


def change(place: Path, kind: str, what: Any) -> None:
    config = json.loads((place / "config.json").read_text())
    if kind == "weights":
        at, byte = what
        checkpoint(place, bytes(at) + bytes([byte]) + bytes(SIZE - at - 1))
    elif kind == "config":
        config[what] = ["other"] if what == "architectures" else f"other {config[what]}"
    elif kind == "nested":
        config["text_config"]["query_pre_attn_scalar"] = 256 + what
    elif kind == "new field":
        config[f"of_a_later_family_{what}"] = what
    elif kind == "index":
        index = place / "model.safetensors.index.json"
        index.write_text(index.read_text().replace("model-2.safetensors", "model-1.safetensors"))
    elif kind == "quantisation":
        (place / "hf_quant_config.json").write_text(json.dumps({"group_size": what}))
    else:
        weights(place / "model-2.safetensors", bytes(SIZE + what), "v")
    (place / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("engine", ENGINES)
@settings(max_examples=60, deadline=None)
@given(made=changes())
def test_every_input_that_changes_logits_changes_the_id(
    engine: str, made: tuple[str, Any], tmp_path_factory: Any
) -> None:
    place, named = checkpoint(tmp_path_factory.mktemp("model")), ENGINES[engine]
    before, times = named(place), {f: f.stat().st_mtime_ns for f in place.iterdir()}
    change(place, *made)
    for file, when in times.items():
        os.utime(file, ns=(when, when))
    assert named(place) != before


@pytest.mark.parametrize("engine", ENGINES)
def test_equal_files_in_another_folder_have_the_same_id(engine: str, tmp_path: Path) -> None:
    first, second = checkpoint(tmp_path / "one" / "model"), checkpoint(tmp_path / "two" / "other")
    os.utime(second / "model-1.safetensors", (1, 1))
    (second / "README.md").write_text("moved")
    (second / "config.json").write_text(json.dumps(dict(reversed(CONFIG.items())) | dict.fromkeys(UNUSED, 7)))
    assert ENGINES[engine](first) == ENGINES[engine](second)
    link = tmp_path / "link"
    link.symlink_to(first)
    assert ENGINES[engine](link) == ENGINES[engine](first)


def test_another_process_computes_the_same_ids(tmp_path: Path) -> None:
    place = checkpoint(tmp_path / "one" / "model")
    far = checkpoint(tmp_path / "two" / "model")
    name_all = f"print(*(named(t.Path({str(far)!r})).hex() for named in t.ENGINES.values()))"
    code = f"import tests.connector.test_identity as t; {name_all}"
    environ = {**os.environ, "PYTHONHASHSEED": "7"}
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ, check=True).stdout
    assert told.split() == [named(place).hex() for named in ENGINES.values()]


@pytest.mark.parametrize("engine", ENGINES)
def test_two_folders_of_one_snapshot_have_different_ids(engine: str, tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshots" / COMMIT
    places = [checkpoint(snapshot / name / "model", bytes([i]) * SIZE) for i, name in enumerate("xy")]
    assert len({ENGINES[engine](place) for place in places}) == 2


TOLD_VLLM: Mapping[str, Any] = {
    "dtype": "torch.bfloat16",
    "quantization": "fp8",
    "cache_dtype": "fp8",
    "hf_overrides": {"rope_theta": 5},
    "load_format": "bitsandbytes",
    "model_loader_extra_config": {"pattern": "x"},
    "disable_sliding_window": True,
    "code_revision": "main",
}
TOLD_SGLANG: Mapping[str, Any] = {
    "dtype": "bfloat16",
    "quantization": "fp8",
    "kv_cache_dtype": "fp8_e5m2",
    "json_model_override_args": '{"rope_theta": 5}',
    "load_format": "bitsandbytes",
    "model_loader_extra_config": '{"pattern": "x"}',
    "torchao_config": "int4wo-128",
}


@pytest.mark.parametrize("name", TOLD_VLLM)
def test_vllm_options_that_change_results_change_the_id(name: str, tmp_path: Path) -> None:
    place = checkpoint(tmp_path)
    assert by_vllm(place, **{name: TOLD_VLLM[name]}) != by_vllm(place)


@pytest.mark.parametrize("name", TOLD_SGLANG)
def test_sglang_options_that_change_results_change_the_id(name: str, tmp_path: Path) -> None:
    place = checkpoint(tmp_path)
    assert by_sglang(place, **{name: TOLD_SGLANG[name]}) != by_sglang(place)


def test_an_override_function_counts_by_its_result(tmp_path: Path) -> None:
    place = checkpoint(tmp_path)
    told = [by_vllm(place, hf_overrides=lambda c: c, hf_config=CONFIG | {"rms_norm_eps": eps}) for eps in (1, 1, 2)]
    assert told[0] == told[1] != told[2]


def test_other_scales_in_the_same_file_change_the_id(tmp_path: Path) -> None:
    place, scales = checkpoint(tmp_path / "m"), tmp_path / "scales.json"
    seen = set()
    for text in ("1", "2"):
        scales.write_text(text)
        seen.add(by_sglang(place, quantization_param_path=str(scales)))
    assert len(seen) == 2


def test_sglang_adapters_are_identified_by_weights(tmp_path: Path) -> None:
    place, adapter = checkpoint(tmp_path / "m"), tmp_path / "a"
    adapter.mkdir()
    seen = {by_sglang(place)}
    for byte in (b"1", b"2"):
        weights(adapter / "adapter_model.safetensors", byte)
        told: tuple[Any, ...] = (
            [f"a={adapter}"],
            {"a": str(adapter)},
            [SimpleNamespace(lora_name="a", lora_path=str(adapter))],
        )
        [named] = {by_sglang(place, lora_paths=paths) for paths in told}
        seen.add(named)
    assert len(seen) == 3
    with pytest.raises(ModelError, match="adapter b"):
        by_sglang(place, lora_paths=["b=/nowhere/at/all"])


def hub(folder: Path, *commits: str) -> Path:
    top = folder / "models--some--model"
    (top / "refs").mkdir(parents=True)
    (top / "refs" / "main").write_text(commits[0])
    for i, commit in enumerate(commits):
        checkpoint(top / "snapshots" / commit, bytes([i]) * SIZE)
    return top


def test_a_hub_name_resolves_to_its_cached_revision(tmp_path: Path) -> None:
    other = COMMIT[::-1]
    hub(tmp_path, COMMIT, other)
    named = {"model": "some/model", "download_dir": str(tmp_path)}
    main, by_commit = by_vllm(tmp_path, **named), by_vllm(tmp_path, revision=COMMIT, **named)
    assert main == by_commit != by_vllm(tmp_path, revision=other, **named)
    served = {"model_path": "some/model", "download_dir": str(tmp_path)}
    revisions = [
        identify_model(SimpleNamespace(**served, revision=r), None, SGLangOptions()).revision
        for r in (None, COMMIT, other)
    ]
    assert revisions[0] == revisions[1] != revisions[2]


def test_vllms_tier_refuses_several_snapshots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    top = hub(tmp_path, COMMIT)
    assert local_snapshot("some/model", cache=str(tmp_path)) == str(top / "snapshots" / COMMIT)
    monkeypatch.setattr(
        "kvcache.connector.vllm.identity.local_snapshot", lambda model: local_snapshot(model, cache=str(tmp_path))
    )
    assert resolve_revision("some/model", TierOptions(), "e")[1].startswith(COMMIT)
    checkpoint(top / "snapshots" / COMMIT[::-1])
    with pytest.raises(ModelError, match=r"several snapshots.*give `revision`"):
        resolve_revision("some/model", TierOptions(), "e")


@pytest.mark.parametrize(
    "told",
    [
        {"model": "nowhere/at-all"},
        {"model": "some/model:Q4_K_M"},
        {"load_format": "tensorizer"},
        {"model_weights": "s3://bucket/model"},
    ],
    ids=lambda told: next(iter(told)),
)
def test_vllm_weights_from_elsewhere_are_refused(told: dict[str, Any], tmp_path: Path) -> None:
    config = vllm_config(checkpoint(tmp_path), **told)
    with pytest.raises(ModelError, match="give `revision`"):
        model_name_and_revision(config, Options())
    assert model_name_and_revision(config, Options(revision="mine"))[1] == "mine"
    assert model_facts(config)["checkpoint"]


def test_sglang_weights_from_elsewhere_are_refused(tmp_path: Path) -> None:
    served = SimpleNamespace(model_path=str(checkpoint(tmp_path)), load_format="remote")
    with pytest.raises(ModelError, match="give `revision`"):
        identify_model(served, None, SGLangOptions())
    assert identify_model(served, None, SGLangOptions(revision="mine")).revision == "mine"


def test_a_setting_reads_every_byte_of_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, whole = checkpoint(tmp_path), {"identity": {"read_every_byte": True}}
    told = [model_name_and_revision(vllm_config(place), Options(settings=given))[1] for given in ({}, whole)]
    served = [
        identify_model(SimpleNamespace(model_path=str(place)), None, SGLangOptions(settings=s)).revision
        for s in ({}, whole)
    ]
    assert told == served
    assert told[1].startswith("sha256-whole:")
    monkeypatch.setenv("KVCACHE_IDENTITY__READ_EVERY_BYTE", "true")
    assert model_name_and_revision(vllm_config(place), Options(address="unix:/run/kv"))[1] == told[1]


def lora(path: Path, number: int, **more: Any) -> Any:
    return SimpleNamespace(lora_name="fluent", lora_path=str(path), adapter_id=number, **more)


def test_a_loaded_adapter_with_other_files_is_refused(tmp_path: Path) -> None:
    names = AdapterNames()
    weights(tmp_path / "adapter_model.safetensors", b"1")
    first = names.name(lora(tmp_path, 1))
    weights(tmp_path / "adapter_model.safetensors", b"2")
    with pytest.raises(ModelError, match="load it under another number"):
        names.name(lora(tmp_path, 1))
    second = names.name(lora(tmp_path, 2))
    assert second != first
    assert names.name(lora(tmp_path, 1, load_inplace=True)) == second
    weights(tmp_path / "adapter_model.safetensors", b"1")
    assert names.name(lora(tmp_path, 3)) == first
    with pytest.raises(ModelError, match="tensorizer"):
        names.name(lora(tmp_path, 4, tensorizer_config_dict={"uri": "s3://x"}))


def test_model_code_counts_if_the_config_names_it(tmp_path: Path) -> None:
    place = checkpoint(tmp_path)
    plain = checkpoint_digest(place)
    (place / "modeling_mine.py").write_text("1")
    assert checkpoint_digest(place) == plain
    checkpoint(place, config=CONFIG | {"auto_map": {"AutoModel": "modeling_mine.Mine"}})
    first = checkpoint_digest(place)
    (place / "modeling_mine.py").write_text("2")
    assert checkpoint_digest(place) != first


@pytest.mark.parametrize("text", ["[]", "{", ""])
def test_a_damaged_config_file_is_refused(text: str, tmp_path: Path) -> None:
    (checkpoint(tmp_path) / "hf_quant_config.json").write_text(text)
    with pytest.raises(ModelError, match=r"hf_quant_config\.json.*fetch the file again"):
        checkpoint_digest(tmp_path)


def test_any_config_values_have_a_digest() -> None:
    odd = {"nan": float("nan"), "big": 1 << 80, "set": {"b", "a"}, "tuple": (1,), "path": Path("x"), 3: None}
    assert config_digest(odd) == config_digest(dict(reversed(odd.items())))
