"""`benchmarks/codec.py` on a tiny model: its rows are there, and say what the codecs promise."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from kvcache.codec.codec import codec
from tests.engine import tiny_model

ROOT = Path(__file__).parents[2]


def test_every_codec_is_measured(tmp_path: Path) -> None:
    model, target = tiny_model.make(tmp_path / "model", "smollm2"), tmp_path / "codec.json"
    command = [sys.executable, ROOT / "benchmarks" / "codec.py", "--quick", "--model", model, "--json", target]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environ)
    rows = {row["id"]: row for row in json.loads(target.read_text())["rows"]}
    for name in ("zstd", "fp8", "int8"):
        for dtype, most in (("bf16", 2), ("fp32", 4)):
            of = {what: rows.pop(f"codec/{name}/{dtype}/{what}") for what in ("ratio", "encode", "decode")}
            assert 1 < of["ratio"]["value"] < most
            assert of["encode"]["value"] > 0
            assert of["encode"]["floor"] == of["decode"]["floor"] > 0
            if name == "zstd":
                continue
            of = {
                w: rows.pop(f"codec/{name}/{dtype}/{w}") for w in ("max_error", "rms_error", "perplexity", "agreement")
            }
            assert 0 < of["max_error"]["value"] <= 100 * codec(name).error_bound
            assert 0 < of["rms_error"]["value"] < 100
            assert of["perplexity"]["peer"] == rows["codec/raw/fp32/perplexity"]["value"]
            assert 50 < of["agreement"]["value"] <= 100
    assert set(rows) == {"codec/raw/fp32/perplexity", "codec/raw/bf16/perplexity", "codec/raw/bf16/agreement"}
