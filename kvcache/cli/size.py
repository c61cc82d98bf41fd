"""`kvcache size`: the memory of a model's keys and values, and how many contexts fit into each tier."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from kvcache.block.hf import layout_from_hf
from kvcache.block.layout import DTYPE_BYTES, Group, KVLayout, blocks_needed
from kvcache.block.record import record_bytes
from kvcache.block.revision import weight_bytes
from kvcache.cli.output import JsonOption, OutputFormat, OutputOption, print_json
from kvcache.errors import ConfigError, ModelError
from kvcache.settings.types import parse_bytes, show_bytes

DEFAULT_TOKENS = 32_768


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _bytes(help: str) -> Any:
    return typer.Option(parser=_size, metavar="SIZE", help=help)


def size(
    model: Annotated[Path | None, typer.Argument(help="A model's directory or its config.json.")] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help=f"Length of a context; by default the model's, else {DEFAULT_TOKENS}.")
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Without a model: layers.")] = None,
    heads: Annotated[int | None, typer.Option(help="Without a model: attention heads.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="Heads that are cached; by default all of --heads.")] = None,
    head_dim: Annotated[int, typer.Option(help="Elements of a head.")] = 128,
    mla_latent: Annotated[
        int | None, typer.Option(help="Elements of a latent that all heads share (MLA), in place of heads.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help=f"{', '.join(DTYPE_BYTES)}; by default the model's, else bf16.")
    ] = None,
    block_tokens: Annotated[int, typer.Option(help="Tokens in a block.")] = 16,
    weights: Annotated[int | None, _bytes("Size of the weights; by default that of the model's files.")] = None,
    hbm: Annotated[int | None, _bytes("GPU memory, which holds the weights too.")] = None,
    host: Annotated[int | None, _bytes("Host memory for the cache.")] = None,
    nvme: Annotated[int | None, _bytes("Room on a drive for the cache.")] = None,
    output: OutputOption = OutputFormat.table,
    as_json: JsonOption = False,
) -> None:
    """Show the bytes of keys and values of a token, a block and a context, and the contexts that fit into a capacity.

    A token takes 2 x layers x KV heads x head size x bytes of an element. With MLA it takes layers x latent x bytes.
    """
    shape = (layers, heads, kv_heads, mla_latent)
    if model is not None:
        if any(value is not None for value in shape):
            raise ConfigError("a model and --layers, --heads, --kv-heads or --mla-latent: give one or the other")
        layout = layout_from_hf(model, dtype=dtype, block_tokens=block_tokens)
        weights = _weights(model) if weights is None else weights
    elif layers is not None and any(value is not None for value in shape[1:]):
        group = (
            Group(layers=layers, kv_heads=kv_heads or heads or 0, head_dim=head_dim, dtype=dtype or "bf16")
            if mla_latent is None
            else Group(layers=layers, head_dim=mla_latent, dtype=dtype or "bf16", kind="mla")
        )
        layout = KVLayout((group,), block_tokens)
    else:
        raise ConfigError("no model and no shape: give a model's directory, or --layers and --heads (or --mla-latent)")
    report = sizes(
        layout, tokens or layout.max_tokens or DEFAULT_TOKENS, weights, {"hbm": hbm, "host": host, "nvme": nvme}
    )
    if as_json or output is OutputFormat.json:
        print_json({"model": model and str(model)} | report)
    else:
        _show(str(model) if model else "", report)


def sizes(
    layout: KVLayout, tokens: int, weights_bytes: int | None, capacity_bytes: Mapping[str, int | None]
) -> dict[str, Any]:
    """Return the report of `kvcache size`. `hbm` holds the weights and bare blocks; the other tiers hold whole
    records."""
    blocks = -(-tokens // layout.block_tokens)
    in_groups = [
        (blocks_needed(group, blocks, layout.block_tokens), layout.block_bytes(group=i))
        for i, group in enumerate(layout.groups)
    ]
    context_bytes = layout.context_bytes(tokens)
    records_bytes = sum(count * record_bytes(each) for count, each in in_groups)
    return {
        "groups": layout.describe()["groups"],
        "tokens": tokens,
        "block_tokens": layout.block_tokens,
        "token_bytes": layout.token_bytes,
        "block_bytes": sum(each for _, each in in_groups),
        "context_bytes": context_bytes,
        "weights_bytes": weights_bytes,
        "fit": {
            tier: {
                "capacity_bytes": capacity,
                "contexts": max(0, capacity - (weights_bytes or 0)) // context_bytes
                if tier == "hbm"
                else capacity // records_bytes,
            }
            for tier, capacity in capacity_bytes.items()
            if capacity is not None
        },
    }


def _weights(model: Path) -> int | None:
    try:
        return weight_bytes(model if model.is_dir() else model.parent)
    except ModelError:  # a configuration alone is enough for the rest
        return None


def _show(title: str, report: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column(style="dim")
    for group in report["groups"]:
        kept = f"the last {group['window_tokens']} tokens" if group["rule"] == "window" else "all tokens"
        heads = "a latent" if group["kind"] == "mla" else f"{group['kv_heads']} KV heads"
        what = f"{heads} of {group['head_dim']}, {group['dtype']}, {kept}"
        table.add_row(group["name"], f"{group['layers']} layers", what)
    growing = "" if len(report["groups"]) == 1 else "in the layers that keep all tokens"
    table.add_row("a token", show_bytes(report["token_bytes"]), growing)
    table.add_row("a block", show_bytes(report["block_bytes"]), f"{report['block_tokens']} tokens")
    table.add_row("a context", show_bytes(report["context_bytes"]), f"{report['tokens']:,} tokens")
    if report["weights_bytes"] is not None:
        table.add_row("weights", show_bytes(report["weights_bytes"]), "")
    for tier, fit in report["fit"].items():
        beside = " beside the weights" if tier == "hbm" and report["weights_bytes"] is not None else ""
        table.add_row(f"in {tier}", f"{fit['contexts']:,} contexts", f"{show_bytes(fit['capacity_bytes'])}{beside}")
    if title:
        Console().print(Text(title, style="bold"))
    Console().print(table)


def register(app: typer.Typer) -> None:
    app.command("size")(size)
