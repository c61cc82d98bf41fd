"""`scripts/demo`: a real model answers for three agents over one long text, with the cache and without."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvcache.cli.main import run

if TYPE_CHECKING:
    from examples.demo.stage import DemoOptions


class Dtype(str, Enum):
    fp32 = "fp32"
    bf16 = "bf16"


def demo(
    quick: Annotated[bool, typer.Option("--quick", help="Less than two minutes: short answers, fewer calls.")] = False,
    broken: Annotated[
        bool,
        typer.Option(
            "--break", help="Break the store in every way at hand instead, and ask again each time: a minute."
        ),
    ] = False,
    prompts: Annotated[
        Path | None, typer.Option(help="Play these instead: JSON lines, gzip or not, the prompt in `input`.")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write every call and figure there.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw times and sources there (PNG, SVG or PDF).")] = None,
    model: Annotated[str, typer.Option(help="A directory of safetensors, a GGUF file, or smollm2.")] = "smollm2",
    dtype: Annotated[Dtype, typer.Option(help="What the model computes in.")] = Dtype.fp32,
    directory: Annotated[
        Path | None, typer.Option(help="NVMe directory, which is kept; without it one that is removed at the end.")
    ] = None,
    daemon: Annotated[
        bool, typer.Option("--daemon", help="Over a daemon, which outlives the engine that is played and its process.")
    ] = False,
    child: Annotated[bool, typer.Option("--child", hidden=True)] = False,
    where: Annotated[str | None, typer.Option("--where", hidden=True)] = None,
) -> None:
    """Play a planner, a critic and an executor that share a long prompt: without the cache, cold, warm, restarted."""
    from examples.demo.run import run_daemon
    from examples.demo.stage import DemoOptions, run_child

    with _place(directory) as place, run_daemon(place) if daemon else nullcontext(where) as there:
        wish = DemoOptions(directory=place, model=model, dtype=dtype.value, prompts=prompts, quick=quick, where=there)
        if child:
            run_child(wish)
        elif broken:
            _break(wish, json)
        else:
            _play(wish, json, plot)


@contextmanager
def _place(directory: Path | None) -> Iterator[Path]:
    """The directory of the NVMe tier: the one given, or one beside this user's caches, which lie on a disk."""
    from kvcache.machine import cache_directory

    if directory is not None:
        yield directory
        return
    above = cache_directory()
    above.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="demo-", dir=above) as made:
        yield Path(made)


def _play(wish: DemoOptions, json: Path | None, plot: Path | None) -> None:
    from rich.console import Console

    from examples.demo import show
    from examples.demo.show import draw_plot
    from examples.demo.stage import DemoEnvironment
    from kvcache.machine import cache_directory

    plot = plot or cache_directory() / "demo.png"
    show.check_targets(json, plot)
    console = Console(highlight=False)
    with console.status(f"loading {wish.model}"):
        stage = DemoEnvironment(wish)
    for note in stage.notes:
        console.print(note, style="dim", markup=False)
    passes = show.run_passes(console, stage.passes(), stage.calls)
    console.print()
    console.print(show.summary(passes))
    console.print(show.explanation(passes), style="dim")
    draw_plot(passes, plot)
    console.print(f"plot: {plot}", markup=False, soft_wrap=True)
    if json is not None:
        show.write(json, wish, stage.notes, passes)
        console.print(f"json: {json}", markup=False, soft_wrap=True)
    verdict, sound = show.verdict(wish.dtype, passes)
    console.print(verdict, markup=False, soft_wrap=True, style="green" if sound else "bold red")
    if not sound:
        raise typer.Exit(1)


def _break(wish: DemoOptions, json: Path | None) -> None:
    from rich.console import Console

    from examples.demo import breaking
    from examples.demo.breaking import FaultInjector
    from examples.demo.stage import DemoEnvironment

    console = Console(highlight=False)
    with console.status(f"loading {wish.model}"):
        stage = DemoEnvironment(wish)
    tried = breaking.run_trials(console, FaultInjector(stage, wish.directory).trials())
    said, sound = breaking.verdict(tried)
    if json is not None:
        breaking.write(json, tried)
        console.print(f"json: {json}", markup=False, soft_wrap=True)
    console.print(said, markup=False, soft_wrap=True, style="green" if sound else "bold red")
    if not sound:
        raise typer.Exit(1)


def application() -> typer.Typer:
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(demo)
    return app


if __name__ == "__main__":
    run(application)
