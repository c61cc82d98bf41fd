"""`kvcache replay`: a trace against a real cache, arrivals to scale."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from kvcache.cli.output import Format, Json, Output, print_json, print_table


def replay(
    trace: Annotated[
        Path, typer.Argument(help="JSON lines (.gz or not), as Mooncake publishes and `trace.path` records.")
    ],
    cache: Annotated[str | None, typer.Option(help="A settings file, or `unix:PATH`; without, defaults.")] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="The first so many.")] = None,
    speed: Annotated[float, typer.Option(min=0.001, help="So many times as fast: arrivals and computing.")] = 1.0,
    weight: Annotated[
        str, typer.Option("--token-bytes", help="Of a token's keys and values; `kvcache size` tells.")
    ] = "4KiB",
    prefill: Annotated[float, typer.Option(min=1, help="Tokens a second that the engine computes.")] = 10_000.0,
    output: Output = Format.table,
    as_json: Json = False,
) -> None:
    """Drive a real cache with a trace: what it hits, from which tier, and the time to the first token.

    One engine serves one request at a time; what it would compute is a pause, everything else is done. Each block that
    is loaded is compared with what was stored; exit 1 if one differs.
    """
    import numpy as np

    import kvcache
    from kvcache.errors import ConfigError
    from kvcache.settings.types import parse_bytes
    from kvcache.trace.replay import Replay, read

    try:
        size = parse_bytes(weight)
    except ValueError as error:
        raise ConfigError(f"--token-bytes: {error}") from None
    if size < 4 or size % 4:
        raise ConfigError(f"--token-bytes {weight}: expected a multiple of 4")
    arrivals, block_tokens = read(trace, requests)
    with kvcache.open(cache) as opened:
        made = Replay(
            opened,
            block_tokens=block_tokens,
            most_blocks=max(1, *(len(arrival.names) for arrival in arrivals)),
            token_bytes=size,
            tokens_a_second=prefill,
            speed=speed,
        )
        played = made.play(arrivals)
        reasons = opened.stats().get("counters", {}).get("misses", {})
    times = np.percentile(played.ttft_s, (50, 90, 99)).tolist()
    alone = float(np.median([arrival.tokens for arrival in arrivals])) / (prefill * speed)
    told: dict[str, Any] = {
        "requests": len(arrivals),
        "tokens": played.tokens,
        "hit_rate": sum(played.found.values()) / max(1, played.tokens),
        "hit_tokens": dict(played.found),
        "loaded_tokens": played.loaded_tokens,
        "wrong_blocks": played.wrong_blocks,
        "ttft_s": dict(zip(("p50", "p90", "p99"), times, strict=True)),
        "prefill_alone_p50_s": alone,
        "misses": reasons,
    }
    if as_json or output is Format.json:
        print_json(told)
    else:
        print_table(("", ""), list(_rows(told)))
    if played.wrong_blocks:
        print(f"kvcache: {played.wrong_blocks} blocks came back with other bytes", file=sys.stderr)
        raise typer.Exit(1)


def _rows(told: dict[str, Any]) -> list[tuple[str, str]]:
    tokens = max(1, told["tokens"])
    return [
        ("requests", f"{told['requests']:,}"),
        ("input tokens", f"{told['tokens']:,}"),
        ("hit rate", f"{told['hit_rate']:.1%}"),
        *((f"found in {tier}", f"{found / tokens:.1%}") for tier, found in told["hit_tokens"].items()),
        ("loaded", f"{told['loaded_tokens'] / tokens:.1%}"),
        *((f"first token, {name}", f"{1000 * seconds:,.1f} ms") for name, seconds in told["ttft_s"].items()),
        ("median prefill of all tokens, alone", f"{1000 * told['prefill_alone_p50_s']:,.1f} ms"),
        *((f"missed: {reason}", f"{count:,} requests") for reason, count in told["misses"].items()),
    ]


def register(app: typer.Typer) -> None:
    app.command("replay")(replay)
