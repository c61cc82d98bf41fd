"""`kvcache warm`: loads prefixes before their requests arrive, each computed once in the fleet."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcache.cli.daemon import AddressOption, find_one_cache
from kvcache.cli.output import JsonOption, OutputFormat, OutputOption, print_json, print_table
from kvcache.errors import ConfigError, KVCacheError

if TYPE_CHECKING:
    from kvcache.fleet.warm import PromptResult

_POLL_S = 0.2
_REPLY_MARGIN_S = 5.0  # beyond the requested wait
_NAME = f"warm-{os.getpid()}"  # name under which caches record this process's requests


def warm(
    file: Annotated[
        Path | None,
        typer.Argument(help='A JSON value a line: {"text": ...}, {"messages": [...]} or {"token_ids": [...]}.'),
    ] = None,
    engine: Annotated[str, typer.Option(help="URL of this node's engine (OpenAI's API).")] = "",
    model: Annotated[
        str, typer.Option(help="The model's name in requests. Default: the first that the engine lists.")
    ] = "",
    hot: Annotated[
        int | None, typer.Option(min=1, max=256, help="Fetch this many of the fleet's most used prefixes.")
    ] = None,
    settings: Annotated[
        Path | None, typer.Option(help="The engine's settings file (TOML) with the fleet's Redis.")
    ] = None,
    max_bytes: Annotated[str | None, typer.Option(help="Most bytes to fetch: 4GiB.")] = None,
    patience_s: Annotated[float, typer.Option(min=0.1, help="Time limit for all prompts.")] = 3600.0,
    address: AddressOption = None,
    output: OutputOption = OutputFormat.table,
    as_json: JsonOption = False,
) -> None:
    """Warm this node's cache. Run it on each node, beside the engine. Exit code 1 if a prompt failed.

    Prompts of FILE are read from the fleet's shared tiers, or computed once in the fleet. --hot fetches the most used
    prefixes from the fleet's Redis.
    """
    if (file is None) == (hot is None):
        raise ConfigError("give a FILE of prompts with --engine, or --hot N: one of them")
    most = _bytes(max_bytes)
    quiet = as_json or output is OutputFormat.json
    if file is not None:
        named = None if address is None else find_one_cache(address)
        rows = prefill_prompts(file, engine, model, settings, most, patience_s, named, quiet=quiet)
    else:
        assert hot is not None, "one of them"
        rows = [fetch_chains(find_one_cache(address), hot, most, patience_s)]
    if quiet:
        print_json(rows)
    else:
        columns = tuple(rows[0]) if rows else ("prompt",)
        print_table(columns, [tuple(str(value) for value in row.values()) for row in rows])
    if any(row.get("what") == "failed" or row.get("fault") for row in rows):
        raise typer.Exit(1)


def fetch_chains(cache: Path, hot: int, max_bytes: int | None, patience_s: float) -> dict[str, Any]:
    """Let a running cache prefetch the most used chains; return its report."""
    from kvcache.daemon.client.control import send_command

    reply = send_command(cache, "warm", hot=hot, **({} if max_bytes is None else {"max_bytes": max_bytes}))
    end = time.monotonic() + patience_s
    while not reply["done"] and time.monotonic() < end:
        time.sleep(_POLL_S)
        reply = send_command(cache, "warm")
    return reply


def prefill_prompts(
    file: Path,
    url: str,
    model: str,
    path: Path | None,
    max_bytes: int | None,
    patience_s: float,
    cache: Path | None,
    *,
    quiet: bool,
) -> list[dict[str, Any]]:
    """Compute prompts by an engine; return one row for each prompt."""
    from kvcache.fleet.coordination import Coordination
    from kvcache.fleet.node import SETTLE_TIMEOUT_S
    from kvcache.fleet.warm import EngineClient, NodeCallbacks, WarmLimits, WarmUp, read_prompts
    from kvcache.os_env import OsEnv
    from kvcache.settings.sources import load

    if not url:
        raise ConfigError("--engine is missing: the URL of this node's engine, which computes missing prefixes")
    loaded, prompts, os_env = load(path), read_prompts(file), OsEnv()
    client = EngineClient(url, model, timeout_s=patience_s)
    _ = client.model  # reports at once where the engine does not answer
    coordination = Coordination(loaded.redis, os_env) if loaded.redis.enabled else None
    if coordination is None:
        typer.echo("kvcache: the settings have no Redis: other engines do not share this work", err=True)

    def on_result(step: PromptResult) -> None:
        if not quiet:
            why = f", {step.why}" if step.why else ""
            line = f"{step.what}: {step.usage.tokens} tokens, {step.usage.cached} of them cached{why}"
            typer.echo(f"{step.number + 1}/{len(prompts)} {line}", err=True)

    warm_up_run = WarmUp(
        client,
        prompts,
        coordination,
        os_env.clock,
        NodeCallbacks(
            begin=lambda: begin(cache),
            settle=lambda: wait_settled(cache, SETTLE_TIMEOUT_S),
            used_bytes=_used_host_bytes,
        ),
        WarmLimits(max_bytes=max_bytes, patience_s=patience_s, lease_s=loaded.warm.lease_s),
        on_result,
    )
    try:
        warm_up_run.run()
    finally:
        if coordination is not None:
            coordination.close()
    return [
        {
            "prompt": step.number + 1,
            "what": step.what,
            "tokens": step.usage.tokens,
            "cached": step.usage.cached,
            "why": step.why,
        }
        for step in sorted(warm_up_run.steps, key=lambda step: step.number)
    ]


def begin(cache: Path | None) -> None:
    """Mark the start: `wait_settled` waits for blocks that are stored from now on."""
    from kvcache.daemon.client.control import find_caches, send_command

    for path in [each.path for each in find_caches()] if cache is None else [cache]:
        with suppress(KVCacheError):  # `wait_settled` reports it
            send_command(path, "flush", seconds=0, fleet=_NAME)


def wait_settled(cache: Path | None, within_s: float) -> bool:
    """Return whether the engine's blocks since `begin` are in each tier that the fleet shares.

    `cache`: its address, or None for all running caches of this user. A cache that does not answer is asked again until
    the time limit.
    """
    from kvcache.daemon.client.control import find_caches, send_command

    def flushed(path: Path) -> bool:
        remaining_s = max(0.0, end - time.monotonic())
        try:
            return bool(
                send_command(path, "flush", seconds=remaining_s, timeout_s=remaining_s + _REPLY_MARGIN_S, fleet=_NAME)[
                    "flushed"
                ]
            )
        except KVCacheError:
            return False

    end = time.monotonic() + within_s
    while caches := [each.path for each in find_caches()] if cache is None else [cache]:
        if all(map(flushed, caches)):
            return True
        if time.monotonic() >= end:
            break
        time.sleep(_POLL_S)
    return False


def _used_host_bytes() -> int:
    """Return the bytes in host memory of all running caches of this user."""
    from kvcache.daemon.client.control import find_caches

    return sum(found.info["tiers"]["host"]["used_bytes"] for found in find_caches() if not found.fault)


def _bytes(text: str | None) -> int | None:
    from kvcache.settings.types import as_size

    if text is None:
        return None
    try:
        return int(as_size(text))
    except ValueError as error:
        raise ConfigError(f"--max-bytes {text}: {error}; expected a size such as 4GiB") from None


def register(app: typer.Typer) -> None:
    app.command("warm")(warm)
