"""What the spectator sees: a progress bar, a row a call, and a summary beside what others have published."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from kvcache.cli.demo.play import TIERS, Call, Pass

PUBLISHED_SAVED = "85 to 95 %"
PUBLISHED_FASTER = "3 to 6"
STYLES = {"hbm": "green", "host": "cyan", "nvme": "magenta"}

_WIDTHS = (("call", 7), ("agent", 9), ("prompt", 8), *((tier, 7) for tier in TIERS), ("first token", 13))


def follow(console: Console, passes: Iterator[tuple[Pass, Iterator[Call]]], calls: int) -> list[Pass]:
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
        for this, coming in passes:
            task = progress.add_task(this.name, total=calls)
            progress.console.print(_head(this))
            for call in coming:
                this.calls.append(call)
                progress.console.print(_row(this, call), no_wrap=True, overflow="ellipsis", crop=True)
                progress.advance(task)
            progress.remove_task(task)
            for line in _foot(this):
                progress.console.print(line)
            played.append(this)
    return played


def _head(this: Pass) -> Text:
    text = Text(f"\n{this.name}: {this.about}\n", style="bold")
    for title, width in _WIDTHS:
        text.append(title.ljust(width) if title == "agent" else title.rjust(width - 2) + "  ", style="dim not bold")
    return text.append("answer", style="dim not bold")


def _row(this: Pass, call: Call) -> Text:
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


def _foot(this: Pass) -> Iterator[Text]:
    if len(this.calls) < this.planned:
        yield Text(f"stopped after {len(this.calls)} of {this.planned} calls (--quick)", style="yellow")
    if this.start_s:
        yield Text(f"the process took {this.start_s:.1f} s to start and load the model: in no figure", style="dim")


def summary(passes: Sequence[Pass]) -> Table:
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


def explanation(passes: Sequence[Pass]) -> str:
    """What the figures of the summary mean, for those who do not know."""
    played = len(passes[0].calls)
    compared = "all calls" if played == passes[0].planned else f"the first {played} calls, which every pass played"
    return (
        "prefill saved: prompt tokens that were not computed. TTFT: time to first token. request: all calls, answers "
        f"included. Times faster than without the cache, over {compared}."
    )
