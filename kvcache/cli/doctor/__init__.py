"""`kvcache doctor`: checks that everything a cache needs is present and works. Each line is ok, warn or fail, with the
remedy."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcache.cli.output import JsonOption, OutputFormat, OutputOption, print_json
from kvcache.errors import KVCacheError

if TYPE_CHECKING:
    from kvcache.cli.doctor.machine import Finding
    from kvcache.settings import Settings


def doctor(
    settings: Annotated[
        Path | None, typer.Argument(help="A settings file (TOML). Default: the default settings.")
    ] = None,
    model: Annotated[Path | None, typer.Option(help="A model's directory. Reports how many of its tokens fit.")] = None,
    bundle: Annotated[
        Path | None, typer.Option(help="Write a bug report (tar.gz) without secrets to this file.")
    ] = None,
    output: OutputOption = OutputFormat.table,
    as_json: JsonOption = False,
) -> None:
    """Check memory, drive, software and settings, store and load through every tier; exit 1 if anything fails.

    Writes at most 256 MiB beside the directory of the NVMe tier, and removes it.
    """
    from kvcache.settings.sources import load

    table = not as_json and output is OutputFormat.table
    loaded: Settings | None = None
    findings: list[Finding] = []
    try:
        loaded = load(settings)
    except KVCacheError as error:
        refusal = str(error)
    else:
        refusal = ""
    for finding in run_checks(loaded, refusal, model):
        findings.append(finding)
        if table:
            _show(finding)
    if bundle is not None:
        from kvcache.cli.doctor.bundle import write_bundle

        write_bundle(bundle, findings, loaded)
    if not table:
        print_json([asdict(finding) for finding in findings])
    elif bundle is not None:
        print(f"\nbundle: {bundle}; review it before you send it")
    if any(finding.state == "fail" for finding in findings):
        raise typer.Exit(1)


def run_checks(settings: Settings | None, refusal: str, model: Path | None) -> Iterator[Finding]:
    """Yield every finding as it is made. `refusal` says why there are no settings."""
    from kvcache.cli.doctor.machine import fail, ok

    yield from _guarded("machine", "check_software")
    if settings is None:
        yield fail("settings", refusal, "correct it; checks that depend on settings were skipped")
        yield from _guarded("machine", "check_caches")
        return
    yield ok("settings", "valid; `kvcache config show` lists each setting with its source")
    yield from _guarded("machine", "check_memory", settings)
    if model is not None:
        yield from _guarded("machine", "check_model_capacity", settings, model)
    yield from _guarded("machine", "check_caches")
    if settings.redis.enabled:
        yield from _guarded("storage", "check_redis", settings)
    if settings.object.enabled:
        yield from _guarded("storage", "check_bucket", settings)
    try:
        for path in settings.nvme.directories if settings.nvme.enabled else ():
            with _scratch_directory(path) as directory:
                yield from _guarded("storage", "check_drive", settings, directory, path)
        with _scratch_directory(settings.nvme.directories[0] if settings.nvme.enabled else None) as directory:
            yield from _guarded("storage", "check_round_trip", settings, directory)
    except OSError as error:
        remedy = "give this user a writable directory: nvme.path, or the system's temporary directory"
        yield fail("directory", str(error), remedy)


def _guarded(module: str, name: str, *given: Any) -> Iterator[Finding]:
    """Yield the findings of a function of that module. A check that raises is a finding too, and the others
    continue."""
    from kvcache.cli.doctor.machine import fail

    try:
        yield from getattr(import_module(f"kvcache.cli.doctor.{module}"), name)(*given)
    except Exception as error:  # noqa: BLE001  boundary: one broken check must not hide the others
        text = str(error) if isinstance(error, (OSError, KVCacheError)) else repr(error)
        yield fail(name.removeprefix("check_"), text, "the check failed; see the message")


@contextmanager
def _scratch_directory(path: Path | None) -> Iterator[Path]:
    """Make an empty directory on the file system of an NVMe directory: inside it where that is a mount, else beside it.
    Without an NVMe directory, among temporary files."""
    above = Path(tempfile.gettempdir()) if path is None else path if path.is_mount() else path.parent
    above.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".kvcache-doctor-", dir=above) as made:
        yield Path(made)


def _show(finding: Finding) -> None:
    print(f"{finding.state:<5} {finding.name:<16} {finding.found}", flush=True)
    if finding.remedy:
        print(f"{'':<22} {finding.remedy}", flush=True)


def register(app: typer.Typer) -> None:
    app.command("doctor")(doctor)
