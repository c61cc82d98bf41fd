"""How many tokens of a model fit into the tiers as they are set."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kvcache.block.hf import layout_from_hf
from kvcache.block.record import record_bytes
from kvcache.cli.doctor.finding import Finding, fail, ok, warn
from kvcache.settings import Settings
from kvcache.settings.types import show_bytes


def checks(settings: Settings, model: Path) -> Iterator[Finding]:
    """At least: as if every group kept all tokens."""
    layout = layout_from_hf(model, block_tokens=settings.block_tokens)
    a_block = sum(record_bytes(layout.block_bytes(group=group)) for group in range(len(layout.groups)))
    yield ok("model", f"{show_bytes(layout.token_bytes)} a token, {show_bytes(a_block)} a block with its headers")
    tiers = {"host": settings.host.capacity_bytes}
    if settings.nvme.enabled:
        tiers["nvme"] = settings.nvme.capacity_bytes
    for tier, capacity_bytes in tiers.items():
        tokens = capacity_bytes // a_block * layout.block_tokens
        found = f"{tokens:,} tokens in {show_bytes(capacity_bytes)}"
        setting = f"{tier}.capacity_bytes"
        if not tokens:
            yield fail(f"room in {tier}", found, f"give {setting} at least {show_bytes(a_block)}")
        elif layout.max_tokens and tokens < layout.max_tokens:
            remedy = f"less than one context of {layout.max_tokens:,} tokens: raise {setting}"
            yield warn(f"room in {tier}", found, remedy)
        else:
            yield ok(f"room in {tier}", found)
