from __future__ import annotations

import json

import pytest

from kvcache.block.hf import FAMILIES, engine_facts, layout_from_hf
from kvcache.block.layout import Group, KVLayout
from kvcache.block.namespace import Namespace
from kvcache.errors import LayoutError, ModelError

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}


def windows(layout):
    return [(g.name, g.layers, g.rule, g.window_tokens) for g in layout.groups]


def test_a_llama_config_gives_its_layout():
    layout = layout_from_hf(LLAMA)
    assert layout == KVLayout.mha(layers=4, kv_heads=2, head_dim=8)
    assert layout.max_tokens == 8192
    assert layout_from_hf(LLAMA, dtype="fp8_e4m3", block_tokens=64) == KVLayout.mha(
        layers=4, kv_heads=2, head_dim=8, dtype="fp8_e4m3", block_tokens=64
    )
    assert layout_from_hf(LLAMA, dtype="torch.float16").groups[0].dtype == "fp16"


@pytest.mark.parametrize("as_file", [True, False])
def test_a_config_is_read_from_a_directory_or_a_file(tmp_path, as_file):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert layout_from_hf(tmp_path / "config.json" if as_file else str(tmp_path)) == layout_from_hf(LLAMA)


@pytest.mark.parametrize(
    ("change", "group"),
    [
        ({"head_dim": 16}, {"head_dim": 16}),
        ({"head_dim": None, "num_key_value_heads": None}, {"kv_heads": 8}),
        ({"torch_dtype": None, "dtype": "float32"}, {"dtype": "fp32"}),
        ({"model_type": "mistral", "sliding_window": None}, {}),
        ({"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 128}, {}),
        ({"model_type": "qwen2", "sliding_window": 128}, {}),
        ({"model_type": "qwen3"}, {"head_dim": 128}),
        ({"layer_types": ["full_attention"] * 4, "sliding_window": 128}, {}),
    ],
)
def test_config_fields_give_one_group(change, group):
    expected = {"layers": 4, "kv_heads": 2, "head_dim": 8} | group
    assert layout_from_hf(LLAMA | change) == KVLayout((Group(**expected),))


@pytest.mark.parametrize(
    ("change", "groups"),
    [
        ({"model_type": "mistral", "sliding_window": 128}, [("window", 4, "window", 128)]),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 128, "max_window_layers": 1},
            [("full", 1, "all", 0), ("window", 3, "window", 128)],
        ),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 128, "max_window_layers": 0},
            [("window", 4, "window", 128)],
        ),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 128},
            [("full", 4, "all", 0)],
        ),
        ({"model_type": "gemma2", "sliding_window": 64}, [("full", 2, "all", 0), ("window", 2, "window", 64)]),
        (
            {"model_type": "gemma3_text", "sliding_window": 64, "num_hidden_layers": 13},
            [("full", 2, "all", 0), ("window", 11, "window", 64)],
        ),
        (
            {"model_type": "gemma3_text", "sliding_window": 64, "sliding_window_pattern": 2},
            [("full", 2, "all", 0), ("window", 2, "window", 64)],
        ),
        (
            {"sliding_window": 9, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
            [("full", 1, "all", 0), ("window", 3, "window", 9)],
        ),
    ],
)
def test_windowed_layers_form_a_separate_group(change, groups):
    assert windows(layout_from_hf(LLAMA | change)) == groups


def test_an_mla_config_gives_a_latent_layout():
    config = {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "hidden_size": 7168,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "torch_dtype": "bfloat16",
    }
    assert layout_from_hf(config) == KVLayout((Group(kind="mla", layers=61, head_dim=576),))


def test_a_multimodal_config_gives_the_text_decoder_layout():
    text = {name: value for name, value in LLAMA.items() if name != "torch_dtype"}
    outer = {"model_type": "llava", "torch_dtype": "float16", "text_config": text, "vision_config": {"hidden_size": 3}}
    assert layout_from_hf(outer) == layout_from_hf(LLAMA, dtype="fp16")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "mamba2"}, "model_type 'mamba2': expected one of llama"),
        ({"model_type": None}, "model_type None"),
        ({"model_type": ["llama"]}, "model_type"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers = '4'"),
        ({"num_attention_heads": 7}, "hidden_size = 64 and 7 heads"),
        ({"num_key_value_heads": True}, "num_key_value_heads = True"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"torch_dtype": None}, "dtype None.*give dtype="),
        ({"torch_dtype": "int4"}, "dtype 'int4'"),
        ({"layer_types": ["full_attention"] * 3}, "3 layer_types of 4 layers"),
        ({"layer_types": ["linear_attention"] * 4}, "linear_attention"),
        ({"layer_types": ["sliding_attention"] * 4}, "sliding_window is missing"),
        ({"model_type": "mistral", "sliding_window": -1}, "sliding_window = -1"),
        ({"model_type": "deepseek_v3"}, "kv_lora_rank is missing"),
    ],
)
def test_a_config_of_another_kind_is_refused(change, said):
    with pytest.raises(LayoutError, match=said):
        layout_from_hf(LLAMA | change)


@pytest.mark.parametrize(
    ("contents", "said"),
    [
        (None, "No such file"),
        (b"{", "no JSON"),
        (b"\xff\xfe", "no JSON"),
        (b"[1]", "a JSON list"),
        (b"[" * 200_000, "no JSON"),
    ],
)
def test_a_directory_without_a_model_config_is_refused(tmp_path, contents, said):
    if contents is not None:
        (tmp_path / "config.json").write_bytes(contents)
    with pytest.raises(ModelError, match=said):
        layout_from_hf(tmp_path)


def test_a_missing_directory_is_refused(tmp_path):
    with pytest.raises(ModelError, match="No such file"):
        layout_from_hf(tmp_path / "nothing")


def test_omitted_fields_get_the_defaults_of_transformers():
    """Nested configurations are written without what equals the family's defaults."""
    transformers = pytest.importorskip("transformers", reason="an extra of the tests; gives the families' defaults")
    base = {"num_hidden_layers": 12, "hidden_size": 4096, "dtype": "bfloat16"}
    for name, family in FAMILIES.items():
        explicit = {"sliding_window": 64} if family.full_attention_every else {"sliding_window": None}
        if family.mla:
            explicit = {"kv_lora_rank": 64, "qk_rope_head_dim": 8}
        short = base | explicit | {"model_type": name}
        full = transformers.CONFIG_MAPPING[name](**base | explicit)
        mine, theirs = layout_from_hf(short), layout_from_hf(full)
        assert mine == theirs, name
        assert theirs.max_tokens == full.max_position_embeddings


# facts


def test_facts_hold_the_fields_that_change_keys_and_values():
    assert engine_facts(LLAMA) == {}
    rope = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}
    quantised = {"quant_method": "fp8", "kv_cache_scheme": {"num_bits": 8}}
    config = LLAMA | {"rope_theta": 500000.0, "rope_scaling": rope, "quantization_config": quantised, "bos_token_id": 1}
    assert engine_facts(config) == {"rope_theta": 500000.0, "rope_scaling": rope, "quantization_config": quantised}


@pytest.mark.parametrize(
    ("settings", "depends"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, False),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, True),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, True),
        ({"rope_parameters": {"full_attention": {"rope_type": "longrope"}, "other": {"rope_type": "default"}}}, True),
        ({"rope_parameters": {"rope_type": "default"}}, False),
        ({}, False),
    ],
)
def test_max_length_is_a_fact_only_if_rope_depends_on_it(settings, depends):
    facts = engine_facts(LLAMA | settings)
    assert facts == settings | ({"max_position_embeddings": 8192} if depends else {})


def test_facts_of_a_nested_config_are_found():
    outer = {"text_config": LLAMA | {"rope_theta": 1.0}, "quantization_config": {"bits": 4}}
    assert engine_facts(outer) == {"rope_theta": 1.0, "quantization_config": {"bits": 4}}


def test_facts_can_be_encoded():
    config = LLAMA | {"rope_scaling": {"rope_type": "dynamic", "factor": 2, "long": [1.0, 2.0], "none": None}}
    layout = layout_from_hf(config)
    namespaces = {Namespace(layout, model="m", revision="r", facts=engine_facts(c)) for c in (config, LLAMA, config)}
    assert len(namespaces) == 2


@pytest.mark.parametrize("config", [8, None, 1.5, [], b"config.json"])
def test_a_config_of_a_wrong_type_is_refused(config: object) -> None:
    with pytest.raises(ModelError, match=type(config).__name__):
        layout_from_hf(config)
