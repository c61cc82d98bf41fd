"""`kvcache replay` and `kvcache simulate`: a trace against a real cache, or against models of policies."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcache.cli.output import JsonOption, OutputFormat, OutputOption, print_json, print_table
from kvcache.errors import ConfigError
from kvcache.settings.types import parse_bytes, show_bytes

if TYPE_CHECKING:
    from kvcache.trace.simulate import TierSpec

# `kvcache replay`: drives a real cache with a trace, arrivals to scale.


def replay(
    trace: Annotated[
        Path, typer.Argument(help="JSON lines (.gz or not), as Mooncake publishes and `trace.path` records.")
    ],
    cache: Annotated[str | None, typer.Option(help="A settings file, or `unix:PATH`; without, defaults.")] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="Only this many requests.")] = None,
    speed: Annotated[
        float, typer.Option(min=0.001, help="Replay this many times faster, both arrivals and computation.")
    ] = 1.0,
    weight: Annotated[
        str, typer.Option("--token-bytes", help="Bytes of a token's keys and values, as `kvcache size` prints.")
    ] = "4KiB",
    prefill: Annotated[float, typer.Option(min=1, help="Tokens a second that the engine computes.")] = 10_000.0,
    output: OutputOption = OutputFormat.table,
    as_json: JsonOption = False,
) -> None:
    """Replay a trace on a real cache and report hits by tier and time to first token.

    One engine serves one request at a time. Its computation is replaced by a pause; all other work is real. Each loaded
    block is compared with the stored one. Exit code 1 if a block differs.
    """
    import numpy as np

    import kvcache
    from kvcache.trace.replay import Replay, read_arrivals

    size = _token_bytes(weight)
    arrivals, block_tokens = read_arrivals(trace, requests)
    with kvcache.open(cache) as opened:
        made = Replay(
            opened,
            block_tokens=block_tokens,
            max_blocks=max(1, *(len(arrival.names) for arrival in arrivals)),
            token_bytes=size,
            prefill_tokens_per_s=prefill,
            speed=speed,
        )
        result = made.run(arrivals)
        reasons = opened.stats().get("counters", {}).get("misses", {})
    times = np.percentile(result.ttft_s, (50, 90, 99)).tolist()
    alone = float(np.median([arrival.tokens for arrival in arrivals])) / (prefill * speed)
    results: dict[str, Any] = {
        "requests": len(arrivals),
        "tokens": result.tokens,
        "hit_rate": sum(result.hit_tokens.values()) / max(1, result.tokens),
        "hit_tokens": dict(result.hit_tokens),
        "loaded_tokens": result.loaded_tokens,
        "wrong_blocks": result.wrong_blocks,
        "ttft_s": dict(zip(("p50", "p90", "p99"), times, strict=True)),
        "prefill_alone_p50_s": alone,
        "misses": reasons,
    }
    if as_json or output is OutputFormat.json:
        print_json(results)
    else:
        print_table(("", ""), list(_rows(results)))
    if result.wrong_blocks:
        print(f"kvcache: {result.wrong_blocks} blocks were loaded with wrong bytes", file=sys.stderr)
        raise typer.Exit(1)


def _token_bytes(text: str) -> int:
    from kvcache.errors import ConfigError
    from kvcache.settings.types import parse_bytes

    try:
        size = parse_bytes(text)
    except ValueError as error:
        raise ConfigError(f"--token-bytes: {error}") from None
    if size < 4 or size % 4:
        raise ConfigError(f"--token-bytes {text}: expected a multiple of 4")
    return size


def _rows(results: dict[str, Any]) -> list[tuple[str, str]]:
    tokens = max(1, results["tokens"])
    return [
        ("requests", f"{results['requests']:,}"),
        ("input tokens", f"{results['tokens']:,}"),
        ("hit rate", f"{results['hit_rate']:.1%}"),
        *((f"found in {tier}", f"{found / tokens:.1%}") for tier, found in results["hit_tokens"].items()),
        ("loaded", f"{results['loaded_tokens'] / tokens:.1%}"),
        *((f"first token, {name}", f"{1000 * seconds:,.1f} ms") for name, seconds in results["ttft_s"].items()),
        ("median prefill of all tokens, alone", f"{1000 * results['prefill_alone_p50_s']:,.1f} ms"),
        *((f"missed: {reason}", f"{count:,} requests") for reason, count in results["misses"].items()),
    ]


DEFAULT_TOKEN_BYTES = 128 << 10  # Llama 3.1 8B in bf16


def simulate(
    trace: Annotated[Path, typer.Argument(help="A trace; may be compressed by gzip.", exists=True, dir_okay=False)],
    capacity: Annotated[
        list[str], typer.Option(help="Blocks, a size (64GiB), or a share of the trace's blocks (2%). Can be repeated.")
    ] = ["1%", "2%", "5%", "10%", "20%"],  # noqa: B006  typer copies it
    policy: Annotated[list[str], typer.Option(help="Policies to simulate. Default: all. Can be repeated.")] = [],  # noqa: B006
    format: Annotated[
        str | None, typer.Option(help="The trace's format. Default: detected from its first line.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The seed of session starts in an agentic trace.")] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="For text: a tokenizer.json. Default: one token per byte.", exists=True)
    ] = None,
    token_bytes: Annotated[int, typer.Option(min=1, help="Bytes of a token's keys and values.")] = DEFAULT_TOKEN_BYTES,
    tiers: Annotated[
        str | None, typer.Option(help="Price a hierarchy instead: host:64GiB,nvme:2TiB, with rates nvme:2TiB@5GB.")
    ] = None,
    measured: Annotated[
        Path | None,
        typer.Option(help="A file with `kvcache stats --json` of a cache, for rates that are not given.", exists=True),
    ] = None,
    prefill: Annotated[float, typer.Option(min=1, help="Tokens that the engine computes in a second.")] = 8000.0,
    as_json: Annotated[Path | None, typer.Option("--json", help="Write the rows to this file; - prints them.")] = None,
    png: Annotated[Path | None, typer.Option(help="Draw hit rates by size into this file.")] = None,
) -> None:
    """Simulate eviction policies on a trace: hit rates by capacity, with the optimal policy (opt) as upper limit."""
    from kvcache.trace.formats import read_trace
    from kvcache.trace.simulate import POLICIES
    from kvcache.trace.simulate import simulate as play

    options: dict[str, Any] = {} if seed is None else {"seed": seed}
    if tokenizer is not None:
        from tokenizers import Tokenizer

        loaded = Tokenizer.from_file(str(tokenizer))
        options["tokenize"] = lambda text: loaded.encode(text, add_special_tokens=False).ids
    try:
        result = read_trace(trace, format, **options)
    except TypeError:
        raise ConfigError(f"{', '.join(options)}: not an option of this format; remove it") from None
    if tiers is not None:
        _price(result, _levels(tiers, measured), policy or ["hazard"], token_bytes, prefill, as_json)
        return
    rows: list[dict[str, Any]] = []
    for text in capacity:
        blocks = _blocks(text, result.unique, token_bytes * result.block_tokens)
        for name in policy or POLICIES:
            rate = play(result, name, blocks).hit_rate
            rows.append({"policy": name, "capacity": text, "blocks": blocks, "hit_rate": rate})
    if png is not None:
        _draw(rows, capacity, result.name, png)
    if as_json is not None:
        _write({"trace": result.name, "requests": len(result), "unique_blocks": result.unique, "rows": rows}, as_json)
    if str(as_json) != "-":
        names = list(dict.fromkeys(row["policy"] for row in rows))
        rates = {(row["policy"], row["capacity"]): f"{100 * row['hit_rate']:.1f}" for row in rows}
        print_table(("hit rate, %", *capacity), [(name, *(rates[name, size] for size in capacity)) for name in names])


def _blocks(text: str, unique: int, block_bytes: int) -> int:
    try:
        if text.endswith("%"):
            return max(1, round(unique * float(text[:-1]) / 100))
        return int(text) if text.isdecimal() else max(1, parse_bytes(text) // block_bytes)
    except ValueError:
        raise ConfigError(f"capacity {text!r}: expected blocks (5000), a size (64GiB) or a share (2%)") from None


def _levels(tiers: str, stats: Path | None) -> list[TierSpec]:
    from kvcache.trace.simulate import DEFAULT_RATES, TierSpec, measured_rates

    try:
        rates = DEFAULT_RATES if stats is None else measured_rates(json.loads(stats.read_text(encoding="utf-8")))
    except (json.JSONDecodeError, AttributeError) as error:
        raise ConfigError(f"{stats}: {error}; expected what `kvcache stats --json` says") from None
    return [TierSpec.parse(text, rates) for text in tiers.split(",")]


def _price(
    trace: Any, levels: list[TierSpec], policies: list[str], token_bytes: int, prefill: float, as_json: Path | None
) -> None:
    import numpy as np

    from kvcache.trace.simulate import price_tiers

    rows, shown = [], []
    for name in policies:
        priced = price_tiers(trace, levels, name, token_bytes=token_bytes, prefill_per_s=prefill)
        times = {
            "mean_s": float(priced.first_token_s.mean()),
            "p50_s": float(np.quantile(priced.first_token_s, 0.5)),
            "p90_s": float(np.quantile(priced.first_token_s, 0.9)),
            "without_mean_s": float(priced.without_s.mean()),
        }
        rows.append({"policy": name, "found": priced.hit_rates, **times})
        rates = [f"{100 * rate:.1f} %" for rate in priced.hit_rates.values()]
        shown.append((name, *rates, *(f"{t:.3f}" for t in times.values())))
    if as_json is not None:
        named = {level.name: [level.capacity_bytes, level.bytes_per_s] for level in levels}
        _write({"trace": trace.name, "tiers": named, "rows": rows}, as_json)
    if str(as_json) != "-":
        found = (f"from {level.name}, {show_bytes(level.capacity_bytes)}" for level in levels)
        print_table(("policy", *found, "first token, s: mean", "p50", "p90", "without a cache"), shown)


def _write(value: Any, path: Path) -> None:
    text = json.dumps(value, indent=2)
    if str(path) == "-":
        print(text)
    else:
        path.write_text(text + "\n", encoding="utf-8")


def _draw(rows: list[dict[str, Any]], capacities: list[str], title: str, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for name in dict.fromkeys(row["policy"] for row in rows):
        mine = sorted((row["blocks"], 100 * row["hit_rate"]) for row in rows if row["policy"] == name)
        strong = name in ("hazard", "opt")
        axes.plot(*zip(*mine, strict=True), marker="o", label=name, linewidth=2.5 if strong else 1)
    axes.set(
        xscale="log", xlabel="blocks", ylabel="hit rate, %", title=f"{title}: prefixes found, {', '.join(capacities)}"
    )
    axes.legend()
    figure.savefig(path, dpi=120)


def register(app: typer.Typer) -> None:
    app.command("replay")(replay)
    app.command("simulate")(simulate)
