"""`kvcache pin` and `kvcache unpin`: keep a prefix near, for a time; let it go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from time import time
from typing import Annotated, Any

import typer

from kvcache.cli.output import Format, Json, Output, print_json, print_table
from kvcache.cli.prompt import token_ids
from kvcache.cli.running import Address, the_one
from kvcache.settings.types import parse_seconds, show_seconds

_NEAR_S = 60.0  # for it to come near


def pin(
    prefix: Annotated[
        str | None,
        typer.Argument(
            help="A prefix as `kvcache top` names it, a request's id, a prompt, a JSON list of token ids, or @FILE "
            "with either; none: say what is pinned."
        ),
    ] = None,
    span: Annotated[str, typer.Option("--for", help="How long it is kept: 30min, 12h, 7d.")] = "24h",
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Whose tokenizer: a directory, a name, `smollm2`.")
    ] = None,
    namespace: Annotated[str, typer.Option(help="First digits of its id, to look for a prompt in no other.")] = "",
    address: Address = None,
    output: Output = Format.table,
    as_json: Json = False,
) -> None:
    """Bring the blocks of a prefix that are there into host memory, and keep them from leaving for a time. All pins
    together keep at most an eighth of each tier."""
    from kvcache.daemon.client.control import ask

    try:
        seconds = parse_seconds(span)
    except ValueError as error:
        raise typer.BadParameter(f"--for {error}") from None
    path = the_one(address)
    which = {} if prefix is None else _which(path, prefix, model, namespace)
    told = ask(path, "pin", seconds=seconds, timeout_s=_NEAR_S, **which)
    if as_json or output is Format.json:
        print_json(told)
        return
    made = told["made"]
    if made is not None and made["tokens"] < made["wanted_tokens"]:
        print(f"{made['tokens']:,} of {made['wanted_tokens']:,} tokens are kept: no more are there, or have room\n")
    _show(told["pins"])


def unpin(
    which: Annotated[str, typer.Argument(help="The number of a pin, or `all`.")],
    address: Address = None,
    output: Output = Format.table,
    as_json: Json = False,
) -> None:
    """Let a pinned prefix go: it leaves when its turn comes, like any other."""
    from kvcache.daemon.client.control import ask

    told = ask(the_one(address), "unpin", pin=int(which) if which.isdecimal() else which)
    if as_json or output is Format.json:
        print_json(told)
    else:
        _show(told["pins"])


def _which(path: Path, text: str, model: str | None, namespace: str) -> dict[str, Any]:
    """What the cache is asked for: the first reading of the text that it knows."""
    from kvcache.daemon.client.control import ask

    text = Path(text[1:]).read_text(encoding="utf-8") if text.startswith("@") else text
    if model is None and len(text) == 16 and set(text) <= set("0123456789abcdef"):
        return {"prefix": text}
    if model is None and len(text) < 256 and ask(path, "explain", request=text)["stories"]:
        return {"request": text}
    return {"ids": token_ids(text, model), "namespace": namespace}


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


def register(app: typer.Typer) -> None:
    app.command("pin")(pin)
    app.command("unpin")(unpin)
