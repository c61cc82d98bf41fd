"""`kvcache object`: lists the object store of these settings, and deletes old or excess objects."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from kvcache.cli.output import JsonOption, OutputFormat, OutputOption, print_json, print_table
from kvcache.errors import ConfigError, KVCacheError
from kvcache.settings.types import parse_bytes, parse_seconds, show_bytes, show_seconds

if TYPE_CHECKING:
    from kvcache.tier.object import ObjectTier

ConfigOption = Annotated[str | None, typer.Option("--config", "-c", help="The settings file that names the store.")]


def ls(config: ConfigOption = None, output: OutputOption = OutputFormat.table, as_json: JsonOption = False) -> None:
    """List the namespaces in the store, of all writers: objects, bytes, ages. Reads only the listing."""
    with _opened(config) as tier:
        spaces = tier.inspector.spaces()
    if as_json or output is OutputFormat.json:
        print_json(
            [
                {
                    "namespace": space.namespace.hex(),
                    "packs": space.packs,
                    "bytes": space.size_bytes,
                    "oldest_s": space.oldest_s,
                    "newest_s": space.newest_s,
                }
                for space in spaces
            ]
        )
        return
    rows = [
        (
            space.namespace.hex()[:8],
            f"{space.packs:,}",
            show_bytes(space.size_bytes),
            show_seconds(space.oldest_s),
            show_seconds(space.newest_s),
        )
        for space in spaces
    ]
    print_table(("namespace", "objects", "bytes", "oldest", "newest"), rows)


def prune(
    older: Annotated[
        str | None, typer.Option("--older-than", help="Objects written at least this long ago: 12h, 7d.")
    ] = None,
    most: Annotated[str | None, typer.Option("--most", help="The oldest objects beyond this total size: 2TiB.")] = None,
    expired: Annotated[bool, typer.Option("--expired", help="Objects in which every record has expired.")] = False,
    config: ConfigOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the records to remove, and remove nothing.")] = False,
    output: OutputOption = OutputFormat.table,
    as_json: JsonOption = False,
) -> None:
    """Delete old or excess objects of all writers. Their blocks become misses."""
    if older is None and most is None and not expired:
        raise ConfigError("found no filter: give --older-than, --most or --expired")
    try:
        older_s = None if older is None else parse_seconds(older)
        max_bytes = None if most is None else parse_bytes(most)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    with _opened(config) as tier:
        pruned = tier.inspector.prune(older_s=older_s, max_bytes=max_bytes, expired=expired, dry_run=dry_run)
    if as_json or output is OutputFormat.json:
        print_json({"packs": pruned.packs, "bytes": pruned.size_bytes, "oldest_s": pruned.oldest_s, "dry_run": dry_run})
        return
    print_table(
        ("objects", "bytes", "oldest"),
        [(f"{pruned.packs:,}", show_bytes(pruned.size_bytes), show_seconds(pruned.oldest_s) if pruned.packs else "")],
    )
    if dry_run:
        print("\ndry run: nothing was removed; without --dry-run these are removed")


@contextmanager
def _opened(config: str | None) -> Iterator[ObjectTier]:
    from kvcache.settings.sources import load
    from kvcache.tier.object import ObjectTier

    settings = load(config, nvme={"enabled": False})
    if not settings.object.url:
        raise ConfigError("object.url: found no URL; give a settings file with --config, or KVCACHE_OBJECT__URL")
    tier = ObjectTier(settings.object)
    try:
        yield tier
    except TimeoutError:
        raise KVCacheError(f"object {tier.where}: it did not answer in time") from None
    finally:
        tier.close()


def register(app: typer.Typer) -> None:
    group = typer.Typer(no_args_is_help=True, help="Tools for the object store of these settings.")
    group.command("ls")(ls)
    group.command("prune")(prune)
    app.add_typer(group, name="object")
