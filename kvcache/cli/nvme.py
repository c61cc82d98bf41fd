"""`kvcache nvme`: inspects, verifies, repairs and copies a directory of records that no cache has open."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcache.cli.daemon import AddressOption, find_one_cache
from kvcache.cli.output import JsonOption, OutputFormat, OutputOption, print_json, print_table
from kvcache.errors import ConfigError, NotFoundError
from kvcache.settings.types import show_bytes

if TYPE_CHECKING:
    from kvcache.tier.nvme import NvmeTier

DirectoryOption = Annotated[
    Path | None,
    typer.Option("--path", "-p", help="The store's directory. Default: the only directory of the effective settings."),
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Print the actions, and change nothing.")]
ProgressCallback = Callable[[int], object]


def inspect(
    path: DirectoryOption = None, output: OutputOption = OutputFormat.table, as_json: JsonOption = False
) -> None:
    """Count the records of a store by namespace and slot size, and describe its journal. Reads no record."""
    from kvcache.tier.nvme.inspect import store_summary

    with _opened(path) as tier:
        found = store_summary(tier.catalog)
    if as_json or output is OutputFormat.json:
        print_json(found)
        return
    print(
        f"{found['path']}: {found['records']:,} records, {show_bytes(found['record_bytes'])}, in "
        f"{found['segment_files']:,} segments, {show_bytes(found['segment_bytes'])}; "
        f"journal-{found['journal']['number']} with {found['journal']['entries']:,} entries"
    )
    rows = [(n["id"], f"{n['records']:,}", show_bytes(n["record_bytes"])) for n in found["namespaces"]]
    print_table(("namespace", "records", "bytes"), rows)
    names = ("segments", "slots", "records", "free", "quarantined")
    print_table(
        ("slot", *names), [(show_bytes(s["slot_bytes"]), *(f"{s[name]:,}" for name in names)) for s in found["slots"]]
    )


def check(path: DirectoryOption = None, output: OutputOption = OutputFormat.table, as_json: JsonOption = False) -> None:
    """Audit a store and verify every record, without changes. Exit code 1 if there is a fault."""
    with _opened(path) as tier, _progress("reading", tier.usage().records, of_bytes=False) as advance:
        faults = tier.check(lambda: advance(1))
    if as_json or output is OutputFormat.json:
        print_json({"faults": faults})
    elif faults:
        print_table(("fault",), [(fault,) for fault in faults])
    else:
        print("sound")
    if faults:
        raise typer.Exit(1)


def scrub(
    path: DirectoryOption = None,
    address: AddressOption = None,
    dry_run: DryRunOption = False,
    output: OutputOption = OutputFormat.table,
    as_json: JsonOption = False,
) -> None:
    """Verify every record and remove damaged ones. Their slots are not used again.

    With --address, a running cache scrubs its own drives while it serves. Suspect drives are trusted again afterwards.
    """
    if address is not None:
        if path is not None or dry_run:
            raise ConfigError("--address: a running cache scrubs its own directory, without --path and --dry-run")
        from kvcache.daemon.client.control import send_command

        found = send_command(find_one_cache(address), "scrub", timeout_s=None)
        if found.pop("busy"):
            print("kvcache: an audit or a scrub is running; try again when it has ended", file=sys.stderr)
            raise typer.Exit(1)
    else:
        with _opened(path) as tier, _progress("reading", _record_bytes(tier)) as advance:
            found = asdict(tier.scrub(advance, dry_run=dry_run))
    _print(found, output, as_json, dry_run)


def compact(
    path: DirectoryOption = None,
    dry_run: DryRunOption = False,
    output: OutputOption = OutputFormat.table,
    as_json: JsonOption = False,
) -> None:
    """Rewrite the journal with one entry for each record."""
    with _opened(path) as tier:
        found = {"entries": tier.catalog.journal.entries_behind, "records": tier.usage().records}
        if not dry_run and not tier.compact():
            print("kvcache: the drive refused it; see the log", file=sys.stderr)
            raise typer.Exit(1)
    _print(found, output, as_json, dry_run)


def export(
    file: Annotated[
        Path, typer.Argument(help="The archive to write. An existing archive is replaced once the new one is complete.")
    ],
    namespace: Annotated[
        str | None, typer.Option(help="Records of this namespace: its id, or the first digits. Default: all.")
    ] = None,
    path: DirectoryOption = None,
    output: OutputOption = OutputFormat.table,
    as_json: JsonOption = False,
) -> None:
    """Write the records of one namespace, or of all, to one file. Damaged records are skipped and counted."""
    import asyncio

    from kvcache.tier.nvme import archive
    from kvcache.tier.nvme.inspect import store_summary

    with _opened(path) as tier:
        wanted, total = None, _record_bytes(tier)
        if namespace is not None:
            spaces = store_summary(tier.catalog)["namespaces"]
            found = [n for n in spaces if n["id"].startswith(namespace.lower())]
            if not found:
                text = f"--namespace {namespace}: no namespace in this store matches: see `nvme inspect`"
                raise NotFoundError.like(text, namespace, [n["id"][: max(8, len(namespace))] for n in spaces])
            if len(found) != 1:
                raise ConfigError(
                    f"--namespace {namespace}: {len(found)} namespaces match, expected one: see `nvme inspect`"
                )
            wanted, total = bytes.fromhex(found[0]["id"]), found[0]["record_bytes"]
        with _progress("writing", total) as advance:
            carried = asyncio.run(archive.export_archive(tier, str(file), wanted, advance))
    _print({name: asdict(carried)[name] for name in ("records", "size_bytes", "left_out")}, output, as_json)


def import_(
    file: Annotated[Path, typer.Argument(help="The archive to read.")],
    path: DirectoryOption = None,
    dry_run: DryRunOption = False,
    output: OutputOption = OutputFormat.table,
    as_json: JsonOption = False,
) -> None:
    """Verify an archive's records and add them to a store. Exit code 1 if some did not fit."""
    import asyncio

    from kvcache.tier.nvme import archive

    with _progress("reading", file.stat().st_size) as advance:
        if dry_run:
            carried = asyncio.run(archive.import_archive(None, str(file), advance))
        else:
            with _opened(path, to_fill=True) as tier:
                carried = asyncio.run(archive.import_archive(tier, str(file), advance))
    found = asdict(carried)
    del found["left_out"]
    _print(found, output, as_json, dry_run)
    if carried.no_room or carried.refused:
        raise typer.Exit(1)


def rebuild(
    path: DirectoryOption = None,
    dry_run: DryRunOption = False,
    output: OutputOption = OutputFormat.table,
    as_json: JsonOption = False,
) -> None:
    """Rebuild the journal of a store from its sound records."""
    from kvcache.tier.nvme.rebuild import rebuild as made

    directory = _directory(path)
    total = sum(file.stat().st_size for file in directory.glob("segment-*"))
    with _progress("reading", total) as advance:
        found = made(str(directory), dry_run=dry_run, on_progress=advance)
    _print(asdict(found), output, as_json, dry_run)


def _directory(path: Path | None) -> Path:
    if path is None:
        from kvcache.settings.sources import load

        directories = load().nvme.directories
        if len(directories) != 1:
            raise ConfigError(f"nvme.paths names {len(directories)} directories: pick one with --path")
        path = directories[0]
    if not (path / "FORMAT").exists():
        raise ConfigError(f"{path}: has no FORMAT file, expected a store; give its directory with --path")
    return path


@contextmanager
def _opened(path: Path | None, *, to_fill: bool = False) -> Iterator[NvmeTier]:
    """Open the store for this process alone; StoreError, which names the other process, where it is in use.

    `to_fill` opens it with the capacity of the settings, and creates it where it is missing. Otherwise it keeps its
    size.
    """
    from kvcache.settings.sources import load
    from kvcache.settings.tiers import NvmeSettings
    from kvcache.tier.nvme import NvmeTier

    if to_fill:
        nvme = (load() if path is None else load(nvme__path=str(path), nvme__paths=())).nvme
        if len(nvme.directories) != 1:
            raise ConfigError(f"nvme.paths names {len(nvme.directories)} directories: pick one with --path")
        tier = NvmeTier(str(nvme.directories[0]), nvme)
    else:
        directory = _directory(path)
        tier = NvmeTier(str(directory), NvmeSettings(path=directory, capacity_bytes=1 << 60))
    try:
        yield tier
    finally:
        tier.close()


def _record_bytes(tier: NvmeTier) -> int:
    return int(tier.puts()[0]["record_bytes"].sum())


@contextmanager
def _progress(what: str, total: int, *, of_bytes: bool = True) -> Iterator[ProgressCallback]:
    """Show a progress bar on standard error while this lasts, where that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    count = DownloadColumn(binary_units=True) if of_bytes else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), count, TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda step: progress.advance(task, step)


def _print(found: dict[str, Any], output: OutputFormat, as_json: bool, dry_run: bool = False) -> None:
    if as_json or output is OutputFormat.json:
        print_json({**found, "dry_run": dry_run})
        return
    cells = ((name, show_bytes(n) if name.endswith("_bytes") else f"{n:,}") for name, n in found.items())
    print_table(("what", "would be" if dry_run else ""), [(name.replace("_", " "), value) for name, value in cells])


def register(app: typer.Typer) -> None:
    group = typer.Typer(no_args_is_help=True, help="Tools for an NVMe store that no cache has open.")
    for name, command in (("import", import_), *((c.__name__, c) for c in (inspect, check, scrub, compact, export))):
        group.command(name)(command)
    group.command("rebuild")(rebuild)
    app.add_typer(group, name="nvme")
