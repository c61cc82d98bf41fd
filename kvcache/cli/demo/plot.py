"""The picture of a demo: time to first token call by call, and where the prompt tokens came from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvcache.cli.demo.play import TIERS, Pass

# Told apart by colour-blind eyes, and in grey by their brightness.
_PASSES = ("#4d4d4d", "#d55e00", "#009e73", "#0072b2")
_SOURCES = {"computed": "#bdbdbd", "hbm": "#009e73", "host": "#56b4e9", "nvme": "#cc79a7"}


def draw(passes: Sequence[Pass], path: Path) -> None:
    """Write the picture, in the format that the name ends with."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (times, sources) = plt.subplots(1, 2, figsize=(11, 4.2), width_ratios=(3, 2), layout="constrained")
    _draw_times(times, passes)
    _draw_sources(sources, passes)
    for axes in (times, sources):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=144)
    plt.close(figure)


def _draw_times(axes: Any, passes: Sequence[Pass]) -> None:
    for this, colour in zip(passes, _PASSES, strict=True):
        numbers = range(1, len(this.calls) + 1)
        axes.plot(numbers, [1000 * c.ttft_s for c in this.calls], "o-", color=colour, markersize=4, label=this.name)
    axes.set(yscale="log", xlabel="call", ylabel="ms", title="Time to first token")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.grid(axis="y", which="major", alpha=0.3)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False, fontsize="small")


def _draw_sources(axes: Any, passes: Sequence[Pass]) -> None:
    """A stacked bar a pass: the parts of its prompt tokens, the computed one first."""
    left = [0.0] * len(passes)
    for source, colour in _SOURCES.items():
        parts = [_percent(this, source) for this in passes]
        axes.barh([this.name for this in passes], parts, left=left, color=colour, label=source)
        left = [a + b for a, b in zip(left, parts, strict=True)]
    axes.invert_yaxis()
    axes.set(xlim=(0, 100), xlabel="%", title="Where the prompt tokens came from")
    axes.legend(frameon=False, fontsize="small", ncols=1 + len(TIERS), loc="upper center", bbox_to_anchor=(0.5, -0.18))


def _percent(this: Pass, source: str) -> float:
    if source == "computed":
        return 100 * (1 - this.saved)
    return 100 * sum(call.reused.get(source, 0) for call in this.calls) / this.prompt_tokens
