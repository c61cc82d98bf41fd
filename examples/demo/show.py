"""What the spectator sees: a progress bar, a row a call, and a summary beside what others have published."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from examples.demo.run import TIERS, DemoPass, ModelCall, differences
from examples.demo.stage import DemoOptions
from kvcache.errors import ConfigError

PUBLISHED_SAVED = "85 to 95 %"
PUBLISHED_FASTER = "3 to 6"
STYLES = {"hbm": "green", "host": "cyan", "nvme": "magenta"}

_WIDTHS = (("call", 7), ("agent", 9), ("prompt", 8), *((tier, 7) for tier in TIERS), ("first token", 13))


def run_passes(console: Console, passes: Iterator[tuple[DemoPass, Iterator[ModelCall]]], calls: int) -> list[DemoPass]:
    """Play the passes to their end, a row a call, and give them back."""
    played = []
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        for this, calls_to_come in passes:
            task = progress.add_task(this.name, total=calls)
            progress.console.print(_pass_header(this))
            for call in calls_to_come:
                this.calls.append(call)
                progress.console.print(_row(this, call), no_wrap=True, overflow="ellipsis", crop=True)
                progress.advance(task)
            progress.remove_task(task)
            for line in _pass_footer(this):
                progress.console.print(line)
            played.append(this)
    return played


def _pass_header(this: DemoPass) -> Text:
    text = Text(f"\n{this.name}: {this.about}\n", style="bold")
    for title, width in _WIDTHS:
        text.append(title.ljust(width) if title == "agent" else title.rjust(width - 2) + "  ", style="dim not bold")
    return text.append("answer", style="dim not bold")


def _row(this: DemoPass, call: ModelCall) -> Text:
    texts = {
        "call": f"{len(this.calls)}/{this.planned}",
        "agent": _line(call.agent),
        "prompt": f"{call.prompt_tokens:,}",
        "first token": f"{1000 * call.ttft_s:,.0f} ms",
        **{tier: f"{call.reused.get(tier, 0):,}" for tier in TIERS},
    }
    row = Text()
    for title, width in _WIDTHS:
        text = texts[title]
        style = "dim" if text == "0" else STYLES.get(title, "bold" if title == "first token" else "")
        row.append(text.ljust(width) if title == "agent" else text.rjust(width - 2) + "  ", style=style)
    return row.append(_line(call.text), style="italic")


def _line(text: str) -> str:
    """On one line, and nothing in it that a terminal would obey."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def _pass_footer(this: DemoPass) -> Iterator[Text]:
    if len(this.calls) < this.planned:
        yield Text(f"stopped after {len(this.calls)} of {this.planned} calls (--quick)", style="yellow")
    if this.start_s:
        yield Text(f"the process took {this.start_s:.1f} s to start and load the model: in no figure", style="dim")


def summary(passes: Sequence[DemoPass]) -> Table:
    """A row a pass, and one of what has been published about prefix caching for agents."""
    table = Table(title="Summary", title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column("pass", no_wrap=True)
    for name in (
        "calls",
        "prefill\nsaved",
        "TTFT ms\np50",
        "\np95",
        "\np99",
        "times\nfaster",
        "request\ns",
        "times\nfaster",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for this in passes:
        faster = ["", ""]
        if this is not passes[0]:
            faster = [f"{this.times_faster(passes[0], 'ttft_s'):.1f}", f"{this.times_faster(passes[0], 'total_s'):.1f}"]
        table.add_row(
            this.name,
            f"{len(this.calls)}",
            f"{100 * this.saved:.1f} %",
            *(f"{this.ttft_ms(percentile):,.0f}" for percentile in (50, 95, 99)),
            faster[0],
            f"{this.request_s:,.1f}",
            faster[1],
        )
    table.add_row("published", "", PUBLISHED_SAVED, "", "", "", PUBLISHED_FASTER, "", "", style="dim")
    return table


def explanation(passes: Sequence[DemoPass]) -> str:
    """What the figures of the summary mean, for those who do not know."""
    played = len(passes[0].calls)
    compared = "all calls" if played == passes[0].planned else f"the first {played} calls, which every pass played"
    return (
        "prefill saved: prompt tokens that were not computed. TTFT: time to first token. request: all calls, answers "
        f"included. Times faster than without the cache, over {compared}."
    )


# The picture of a demo: time to first token call by call, and where the prompt tokens came from.

# Told apart by colour-blind eyes, and in grey by their brightness.
_PASSES = ("#4d4d4d", "#d55e00", "#009e73", "#0072b2")
_SOURCES = {"computed": "#bdbdbd", "hbm": "#009e73", "host": "#56b4e9", "nvme": "#cc79a7"}


def draw_plot(passes: Sequence[DemoPass], path: Path) -> None:
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


def _draw_times(axes: Any, passes: Sequence[DemoPass]) -> None:
    for this, colour in zip(passes, _PASSES, strict=True):
        numbers = range(1, len(this.calls) + 1)
        axes.plot(numbers, [1000 * c.ttft_s for c in this.calls], "o-", color=colour, markersize=4, label=this.name)
    axes.set(yscale="log", xlabel="call", ylabel="ms", title="Time to first token")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.grid(axis="y", which="major", alpha=0.3)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False, fontsize="small")


def _draw_sources(axes: Any, passes: Sequence[DemoPass]) -> None:
    """A stacked bar a pass: the parts of its prompt tokens, the computed one first."""
    left = [0.0] * len(passes)
    for source, colour in _SOURCES.items():
        parts = [_percent(this, source) for this in passes]
        axes.barh([this.name for this in passes], parts, left=left, color=colour, label=source)
        left = [a + b for a, b in zip(left, parts, strict=True)]
    axes.invert_yaxis()
    axes.set(xlim=(0, 100), xlabel="%", title="Where the prompt tokens came from")
    axes.legend(frameon=False, fontsize="small", ncols=1 + len(TIERS), loc="upper center", bbox_to_anchor=(0.5, -0.18))


def _percent(this: DemoPass, source: str) -> float:
    if source == "computed":
        return 100 * (1 - this.saved)
    return 100 * sum(call.reused.get(source, 0) for call in this.calls) / this.prompt_tokens


# What a demo leaves behind: the judgement whether all passes answered alike, and a file of every call.

PICTURE_SUFFIXES = (".png", ".svg", ".pdf")


def check_targets(results: Path | None, plot: Path) -> None:
    """Refuse, before minutes are spent, files that could not be written at the end."""
    if plot.suffix.lower() not in PICTURE_SUFFIXES:
        raise ConfigError(f"--plot {plot}: expected a name that ends in {', '.join(PICTURE_SUFFIXES)}")
    for option, path in (("--plot", plot), ("--json", results)):
        if path is not None and (path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK)):
            raise ConfigError(f"{option} {path}: cannot be written; give a file in a directory that is there and yours")
    if find_spec("matplotlib") is None:
        raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")


def verdict(dtype: str, passes: Sequence[DemoPass]) -> tuple[str, bool]:
    """Whether the answers were the same in all passes, in words, and whether that is as it must be."""
    different = differences(passes)
    if not different:
        return "All passes gave the same answers, token for token.", True
    found = f"{len(different)} of {len(passes) - 1} passes answered otherwise than the first: {'; '.join(different)}"
    if dtype == "fp32":
        return f"FAILED: in float32 all passes must give the same answers. {found}", False
    return f"{found}. In {dtype} rounding may do that; only fp32 promises equal answers.", True


def write(path: Path, wish: DemoOptions, notes: Sequence[str], passes: Sequence[DemoPass]) -> None:
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
