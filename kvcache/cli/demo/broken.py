"""What `kvcache demo --break` shows: a row a fault, and at the end whether every answer was the one without a cache."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvcache.cli.demo.breaking import Trial

_COLUMNS = ("what broke", "how", "loaded", "computed", "noticed", "answer")


def follow(console: Console, trials: Iterable[Trial]) -> list[Trial]:
    """Try them all, and tell what is tried; then the table."""
    tried: list[Trial] = []
    with console.status("asking without a cache") as status:
        for trial in trials:
            tried.append(trial)
            status.update(f"{trial.fault}: {trial.done}")
    table = Table(*_COLUMNS, box=None, pad_edge=False)
    for trial in tried:
        same = trial.token_ids == tried[0].token_ids
        sound = same and not trial.faults
        table.add_row(
            Text(trial.fault),
            Text(trial.done, overflow="fold"),
            f"{trial.loaded:,}",
            f"{trial.prompt_tokens - trial.loaded:,}",
            Text("\n".join(f"{name}: {count:,}" for name, count in trial.noticed.items()), overflow="fold"),
            Text("same" if same else "ANOTHER", style="green" if sound else "bold red"),
        )
    console.print(table)
    return tried


def verdict(tried: list[Trial]) -> tuple[str, bool]:
    """Whether all is as it must be, in words."""
    others = [trial.fault for trial in tried if trial.token_ids != tried[0].token_ids]
    unsound = [f"{trial.fault}: {fault}" for trial in tried for fault in trial.faults]
    if others or unsound:
        said = [f"another answer after {fault}" for fault in others] + [
            f"after a scrub, after {fault}" for fault in unsound
        ]
        return f"FAILED: {'; '.join(said)}", False
    return (
        f"{len(tried) - 1} answers are the one without a cache, token for token; what a scrub left is sound.",
        True,
    )


def write(path: Path, tried: list[Trial]) -> None:
    document = {"same_answers": verdict(tried)[1], "trials": [asdict(trial) for trial in tried]}
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
