"""`kvcache clear`: erases what is a tenant's, of a cache salt or of a namespace from every tier of a running cache."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any

import typer

from kvcache.cli.output import Format, Json, Output, print_json, print_table
from kvcache.cli.running import Address, all_of_them, the_one
from kvcache.errors import ConfigError, NotFoundError


def clear(
    tenant: Annotated[str | None, typer.Option(help="What is this tenant's.")] = None,
    namespace: Annotated[
        str | None, typer.Option(help="What is of this namespace: its id, or 8 digits or more that it begins with.")
    ] = None,
    cache_salt: Annotated[str | None, typer.Option(help="What was stored under this cache salt.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Tell what would go, and remove nothing.")] = False,
    everyone: Annotated[bool, typer.Option("--all", help="In every running cache of this user.")] = False,
    address: Address = None,
    output: Output = Format.table,
    as_json: Json = False,
) -> None:
    """Erase records from host memory, drives, Redis and the object store, overwrite what they left, and say when it is
    done; exit 1 where a tier could not be cleared, or no cache knows what is named.

    What is given must all fit. Memory and drives of other hosts are theirs to clear: run it there too."""
    from kvcache.daemon.client.control import ask

    given = {"tenant": tenant, "namespace": namespace, "cache_salt": cache_salt}
    if not any(value is not None for value in given.values()):
        raise ConfigError("which records: give --tenant, --namespace or --cache-salt")
    if everyone and address is not None:
        raise typer.BadParameter("--all and --address: give one or the other")
    paths = [found.path for found in all_of_them()] if everyone else [the_one(address)]
    told, unknown = dict[str, dict[str, Any]](), list[NotFoundError]()
    for path in paths:
        try:
            told[path.stem] = ask(path, "erase", timeout_s=None, dry_run=dry_run, **given)
        except NotFoundError as error:
            unknown.append(error)
    if not told:
        raise unknown[0]
    left = [(name, tier, why) for name, done in told.items() for tier, why in done["left"].items()]
    if as_json or output is Format.json:
        print_json(told)
    else:
        removed = sum((Counter(done["records"]) for done in told.values()), Counter[str]())
        spaces = {space for done in told.values() for space in done["namespaces"]}
        print_table(("tier", "records"), [(tier, f"{count:,}") for tier, count in removed.items()])
        if left:
            print_table(("cache", "tier", "not done"), left)
        elif dry_run:
            print(f"nothing was removed: without --dry-run these records of {len(spaces)} namespaces go")
        else:
            print(f"done: nothing of {len(spaces)} namespaces is left")
    if left:
        raise typer.Exit(1)


def register(app: typer.Typer) -> None:
    app.command("clear")(clear)
