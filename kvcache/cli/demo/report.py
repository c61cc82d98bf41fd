"""What a demo leaves behind: the judgement whether all passes answered alike, and a file of every call."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from kvcache.cli.demo.play import Pass, differences
from kvcache.cli.demo.show import PUBLISHED_FASTER, PUBLISHED_SAVED
from kvcache.cli.demo.stage import Wish
from kvcache.errors import ConfigError

PICTURES = (".png", ".svg", ".pdf")


def check_targets(results: Path | None, plot: Path) -> None:
    """Refuse, before minutes are spent, files that could not be written at the end."""
    if plot.suffix.lower() not in PICTURES:
        raise ConfigError(f"--plot {plot}: expected a name that ends in {', '.join(PICTURES)}")
    for option, path in (("--plot", plot), ("--json", results)):
        if path is not None and (path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK)):
            raise ConfigError(f"{option} {path}: cannot be written; give a file in a directory that is there and yours")
    if find_spec("matplotlib") is None:
        raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")


def verdict(dtype: str, passes: Sequence[Pass]) -> tuple[str, bool]:
    """Whether the answers were the same in all passes, in words, and whether that is as it must be."""
    different = differences(passes)
    if not different:
        return "All passes gave the same answers, token for token.", True
    found = f"{len(different)} of {len(passes) - 1} passes answered otherwise than the first: {'; '.join(different)}"
    if dtype == "fp32":
        return f"FAILED: in float32 all passes must give the same answers. {found}", False
    return f"{found}. In {dtype} rounding may do that; only fp32 promises equal answers.", True


def write(path: Path, wish: Wish, notes: Sequence[str], passes: Sequence[Pass]) -> None:
    """Every call and figure, as JSON."""
    document = {
        "model": wish.model,
        "dtype": wish.dtype,
        "quick": wish.quick,
        "notes": list(notes),
        "same_answers": not differences(passes),
        "published": {"saved": PUBLISHED_SAVED, "times_faster": PUBLISHED_FASTER},
        "passes": [
            {
                **this.plain(),
                "ttft_times_faster": this.times_faster(passes[0], "ttft_s"),
                "request_times_faster": this.times_faster(passes[0], "total_s"),
            }
            for this in passes
        ],
    }
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
