"""`kvcache bypass`, `clear`, `pin`, `unpin`, `prune` and `sync`: commands that change a running cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from time import time
from typing import Annotated, Any

import typer

from kvcache.cli.daemon import AddressOption, find_one_cache, running_caches
from kvcache.cli.explain import parse_token_ids
from kvcache.cli.output import JsonOption, OutputFormat, OutputOption, print_json, print_table
from kvcache.errors import ConfigError, NotFoundError
from kvcache.settings.types import parse_seconds, show_bytes, show_seconds

# `kvcache bypass`: disables a running cache for its engine at once, and enables it again.


class BypassMode(str, Enum):
    on = "on"
    off = "off"
    loads = "loads"
    stores = "stores"


def bypass(
    mode: Annotated[
        BypassMode | None,
        typer.Argument(
            help="on: bypass loads and stores; loads, stores: bypass one; off: end the bypass. Default: print the mode."
        ),
    ] = None,
    address: AddressOption = None,
    everyone: Annotated[bool, typer.Option("--all", help="Apply to every running cache of this user.")] = False,
    output: OutputOption = OutputFormat.table,
    as_json: JsonOption = False,
) -> None:
    """Bypass a running cache: matches find nothing and stores are dropped. Stored blocks are kept.

    The bypass ends with `bypass off` or with the process.
    """
    from kvcache.daemon.client.control import send_command

    if everyone and address is not None:
        raise typer.BadParameter("--all and --address: give one or the other")
    paths = [found.path for found in running_caches()] if everyone else [find_one_cache(address)]
    wanted = None if mode is None else mode.value
    rows = [{"address": path.stem, **send_command(path, "bypass", mode=wanted)} for path in paths]
    if as_json or output is OutputFormat.json:
        print_json(rows)
    else:
        print_table(("address", "bypass", "before"), [(row["address"], row["mode"], row["was"]) for row in rows])


# `kvcache clear`: erases the records of a tenant, a cache salt or a namespace from every tier of a running cache.


def clear(
    tenant: Annotated[str | None, typer.Option(help="Records of this tenant.")] = None,
    namespace: Annotated[
        str | None, typer.Option(help="Records of this namespace: its id, or at least the first 8 digits.")
    ] = None,
    cache_salt: Annotated[str | None, typer.Option(help="Records stored under this cache salt.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the records to remove, and remove nothing.")] = False,
    everyone: Annotated[bool, typer.Option("--all", help="Apply to every running cache of this user.")] = False,
    address: AddressOption = None,
    output: OutputOption = OutputFormat.table,
    as_json: JsonOption = False,
) -> None:
    """Erase records from host memory, drives, Redis and the object store, and overwrite the freed space.

    Selects records that fit all given options. Exit code 1 if a tier could not be erased, or if no cache knows a given
    name. Host memory and drives of other hosts are not erased: run the command there too.
    """
    from kvcache.daemon.client.control import send_command

    given = {"tenant": tenant, "namespace": namespace, "cache_salt": cache_salt}
    if not any(value is not None for value in given.values()):
        raise ConfigError("found no filter: give --tenant, --namespace or --cache-salt")
    if everyone and address is not None:
        raise typer.BadParameter("--all and --address: give one or the other")
    paths = [found.path for found in running_caches()] if everyone else [find_one_cache(address)]
    replies, unknown = dict[str, dict[str, Any]](), list[NotFoundError]()
    for path in paths:
        try:
            replies[path.stem] = send_command(path, "erase", timeout_s=None, dry_run=dry_run, **given)
        except NotFoundError as error:
            unknown.append(error)
    if not replies:
        raise unknown[0]
    failures = [(name, tier, why) for name, done in replies.items() for tier, why in done["left"].items()]
    if as_json or output is OutputFormat.json:
        print_json(replies)
    else:
        removed = sum((Counter(done["records"]) for done in replies.values()), Counter[str]())
        spaces = {space for done in replies.values() for space in done["namespaces"]}
        print_table(("tier", "records"), [(tier, f"{count:,}") for tier, count in removed.items()])
        if failures:
            print_table(("cache", "tier", "not done"), failures)
        elif dry_run:
            print(
                f"dry run: nothing was removed; without --dry-run these records of {len(spaces)} namespaces are removed"
            )
        else:
            print(f"removed: no record of {len(spaces)} namespaces remains")
    if failures:
        raise typer.Exit(1)


_PIN_TIMEOUT_S = 60.0  # for the promotion of its blocks


def pin(
    prefix: Annotated[
        str | None,
        typer.Argument(
            help="A prefix as `kvcache top` names it, a request's id, a prompt, a JSON list of token ids, or @FILE "
            "with either. Default: list the pins."
        ),
    ] = None,
    span: Annotated[str, typer.Option("--for", help="Duration of the pin: 30min, 12h, 7d.")] = "24h",
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="The tokenizer's model: a directory, a name, or `smollm2`.")
    ] = None,
    namespace: Annotated[
        str, typer.Option(help="The first digits of a namespace id. Only that namespace is searched.")
    ] = "",
    address: AddressOption = None,
    output: OutputOption = OutputFormat.table,
    as_json: JsonOption = False,
) -> None:
    """Load the cached blocks of a prefix into host memory and protect them from eviction for a time.

    All pins together hold at most an eighth of each tier.
    """
    from kvcache.daemon.client.control import send_command

    try:
        seconds = parse_seconds(span)
    except ValueError as error:
        raise typer.BadParameter(f"--for {error}") from None
    path = find_one_cache(address)
    which = {} if prefix is None else _prefix_arguments(path, prefix, model, namespace)
    replies = send_command(path, "pin", seconds=seconds, timeout_s=_PIN_TIMEOUT_S, **which)
    if as_json or output is OutputFormat.json:
        print_json(replies)
        return
    made = replies["made"]
    if made is not None and made["tokens"] < made["wanted_tokens"]:
        tokens = f"{made['tokens']:,} of {made['wanted_tokens']:,} tokens"
        print(f"{tokens} are pinned: others are not cached or exceed the limit\n")
    _show(replies["pins"])


def unpin(
    which: Annotated[str, typer.Argument(help="The number of a pin, or `all`.")],
    address: AddressOption = None,
    output: OutputOption = OutputFormat.table,
    as_json: JsonOption = False,
) -> None:
    """End a pin. The blocks can be evicted again."""
    from kvcache.daemon.client.control import send_command

    replies = send_command(find_one_cache(address), "unpin", pin=int(which) if which.isdecimal() else which)
    if as_json or output is OutputFormat.json:
        print_json(replies)
    else:
        _show(replies["pins"])


def _prefix_arguments(path: Path, text: str, model: str | None, namespace: str) -> dict[str, Any]:
    """Return the arguments of the request: the first reading of the text that the cache knows."""
    from kvcache.daemon.client.control import send_command

    text = Path(text[1:]).read_text(encoding="utf-8") if text.startswith("@") else text
    if model is None and len(text) == 16 and set(text) <= set("0123456789abcdef"):
        return {"prefix": text}
    if model is None and len(text) < 256 and send_command(path, "explain", request=text)["stories"]:
        return {"request": text}
    return {"ids": parse_token_ids(text, model), "namespace": namespace}


def _show(pins: Sequence[Mapping[str, Any]]) -> None:
    rows = [
        (
            str(row["pin"]),
            row["prefix"],
            row["namespace"][:8],
            f"{row['tokens']:,}",
            ", ".join(f"{tokens:,} in {tier}" for tier, tokens in row["by_tier"].items()),
            f"in {show_seconds(row['ends'] - time())}",
        )
        for row in pins
    ]
    print_table(("pin", "prefix", "namespace", "tokens", "where", "ends"), rows)


# `kvcache prune`: removes namespaces that have not been used for a long time.


def prune(
    unused: Annotated[str, typer.Option("--unused", help="Least time since the last use: 12h, 7d, 2w.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the records to remove, and remove nothing.")] = False,
    address: AddressOption = None,
    output: OutputOption = OutputFormat.table,
    as_json: JsonOption = False,
) -> None:
    """Remove unused namespaces of a running cache from host memory and drives.

    A namespace without a known use counts from the start of the cache. Shared tiers are not changed.
    """
    from kvcache.daemon.client.control import send_command

    try:
        seconds = parse_seconds(unused)
    except ValueError as error:
        raise typer.BadParameter(f"--unused {error}") from None
    done = send_command(find_one_cache(address), "prune", timeout_s=None, unused_s=seconds, dry_run=dry_run)
    if as_json or output is OutputFormat.json:
        print_json(done)
        return
    rows = [
        (row["id"][:8], row["model"] or "?", f"{row['records']:,}", show_bytes(row["bytes"])) for row in done["pruned"]
    ]
    print_table(("namespace", "model", "records", "bytes"), rows)
    if dry_run:
        print("\ndry run: nothing was removed; without --dry-run these are removed")


# `kvcache sync`: waits until stored blocks are in each intended tier, and counts those that are not.

ANSWER_S = 5.0
"""Time for the answer, beyond the requested wait."""


def sync(
    address: AddressOption = None,
    timeout_s: Annotated[float, typer.Option(min=0, max=60, help="Longest wait.")] = 60.0,
    output: OutputOption = OutputFormat.table,
    as_json: JsonOption = False,
) -> None:
    """Wait until every block stored before is in each tier that its write mode intends. Exit code 1 otherwise.

    Blocks that a tier refused are offered again. A block evicted from host memory before the tier took it fails one
    sync.
    """
    from kvcache.daemon.client.control import send_command

    replies = send_command(find_one_cache(address), "flush", timeout_s=timeout_s + ANSWER_S, seconds=timeout_s)
    done, tiers = bool(replies["flushed"]), replies.get("tiers", {})
    if as_json or output is OutputFormat.json:
        print_json({"done": done, "tiers": tiers, "fault": replies.get("fault", "")})
    else:
        rows = [
            (
                name,
                *(f"{tier[count]:,}" for count in ("reached", "refused", "waiting")),
                "" if tier["synced"] else "not durable",
            )
            for name, tier in tiers.items()
        ]
        if rows:
            print_table(("tier", "reached", "refused", "waiting", ""), rows)
        if replies.get("fault"):
            print(replies["fault"])
        print("all of it is there" if done else f"not all of it is there after at most {timeout_s:g} s")
    if not done:
        raise typer.Exit(1)


def register(app: typer.Typer) -> None:
    app.command("bypass")(bypass)
    app.command("clear")(clear)
    app.command("pin")(pin)
    app.command("unpin")(unpin)
    app.command("prune")(prune)
    app.command("sync")(sync)
