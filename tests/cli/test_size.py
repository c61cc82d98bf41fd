"""`kvcache size`: the figures, where they come from, and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from kvcache.cli import main as frame

GIB = 1 << 30
SHAPE = ("--layers", "80", "--head-dim", "128", "--dtype", "bf16", "--tokens", "32768")
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "torch_dtype": "bfloat16",
}


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["kvcache", "size", *arguments])
    with pytest.raises(SystemExit) as left:
        frame.main()
    return int(left.value.code or 0)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def of(*arguments: str) -> dict:
        assert run(monkeypatch, *arguments, "--json") == 0
        return json.loads(capsys.readouterr().out)

    return of


@pytest.mark.parametrize(
    ("heads", "token_bytes", "context_bytes"),
    [
        (("--heads", "64"), 2560 << 10, 80 * GIB),
        (("--heads", "64", "--kv-heads", "8"), 320 << 10, 10 * GIB),
        (("--kv-heads", "8"), 320 << 10, 10 * GIB),
        (("--mla-latent", "576"), 80 * 576 * 2, 80 * 576 * 2 * 32768),
    ],
)
def test_size_accepts_a_shape_without_a_model(told, heads, token_bytes, context_bytes):
    got = told(*SHAPE, *heads)
    assert (got["token_bytes"], got["context_bytes"]) == (token_bytes, context_bytes)
    assert got["block_bytes"] == 16 * token_bytes
    assert (got["model"], got["weights_bytes"], got["fit"]) == (None, None, {})


def test_size_reports_the_contexts_that_fit(told):
    places = ("--weights", "40GiB", "--hbm", "80GiB", "--host", "256GiB", "--nvme", "2TiB")
    fit = told(*SHAPE, "--kv-heads", "8", *places)["fit"]
    assert {tier: row["contexts"] for tier, row in fit.items()} == {"hbm": 4, "host": 25, "nvme": 204}
    assert fit["nvme"]["capacity_bytes"] == 2 << 40
    # Records have headers: what fits exactly as bare blocks does not as records.
    assert told(*SHAPE, "--kv-heads", "8", "--hbm", "20GiB", "--host", "20GiB")["fit"] == {
        "hbm": {"capacity_bytes": 20 * GIB, "contexts": 2},
        "host": {"capacity_bytes": 20 * GIB, "contexts": 1},
    }
    assert told(*SHAPE, "--kv-heads", "8", "--weights", "40GiB", "--hbm", "24GiB")["fit"]["hbm"]["contexts"] == 0


def test_size_reads_a_model_directory(told, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    got = told(str(tmp_path))
    assert (got["tokens"], got["token_bytes"], got["weights_bytes"]) == (1024, 2 * 4 * 2 * 8 * 2, None)
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    for place in (tmp_path, tmp_path / "config.json"):
        assert told(str(place))["weights_bytes"] == 1000
    assert told(str(tmp_path), "--weights", "2000")["weights_bytes"] == 2000
    assert told(str(tmp_path), "--dtype", "fp32", "--tokens", "17", "--block-tokens", "8")["context_bytes"] == 24 * 512


def test_size_counts_windowed_layers(told, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"model_type": "gemma2", "sliding_window": 32}))
    got = told(str(tmp_path), "--tokens", "1024")
    head_dim, a_layer = 256, 2 * 2 * 256 * 2
    assert [(g["name"], g["layers"], g["head_dim"]) for g in got["groups"]] == [
        ("full", 2, head_dim),
        ("window", 2, head_dim),
    ]
    assert got["token_bytes"] == 2 * a_layer
    assert got["context_bytes"] == 2 * a_layer * (1024 + 32)


def test_the_table_equals_the_json(monkeypatch, capsys, tmp_path: Path):
    monkeypatch.setenv("COLUMNS", "120")
    assert run(monkeypatch, *SHAPE, "--heads", "64", "--nvme", "2TiB") == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "full 80 layers 64 KV heads of 128, bf16, all tokens",
        "a token 2.5 MiB",
        "a block 40 MiB 16 tokens",
        "a context 80 GiB 32,768 tokens",
        "in nvme 25 contexts 2 TiB",
    ]
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"model_type": "gemma2", "sliding_window": 32}))
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    assert run(monkeypatch, str(tmp_path), "--hbm", "1GiB") == 0
    out = capsys.readouterr().out
    assert str(tmp_path) in out.replace("\n", "")
    assert "the last 32 tokens" in out
    assert "beside the weights" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "give a model's directory, or --layers"),
        (("--layers", "80"), "give a model's directory, or --layers"),
        (("--layers", "0", "--heads", "8"), "layers = 0"),
        (("--layers", "8", "--heads", "8", "--dtype", "int3"), "dtype 'int3'"),
        (("/nowhere/at/all",), "No such file"),
        ((".", "--layers", "8"), "give one or the other"),
        (("--layers", "8", "--heads", "8", "--hbm", "much"), "'much' is not a size"),
        (("--layers", "8", "--heads", "8", "--tokens", "0"), "--tokens"),
    ],
)
def test_invalid_arguments_are_refused(monkeypatch, capsys, arguments, said):
    monkeypatch.setenv("COLUMNS", "200")
    assert run(monkeypatch, *arguments) == 2
    assert said in capsys.readouterr().err
