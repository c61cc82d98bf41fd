"""What a caller hands to the face, checked before anything changes."""

from __future__ import annotations

from collections.abc import Sequence

from kvcache.block.layout import KVLayout, Shard
from kvcache.errors import LayoutError, RequestError, TokenError
from kvcache.hierarchy.face import PageIds
from kvcache.transfer.pages import Pages

MOST_TTL_S = 100 * 365 * 86_400.0


def check_shards(
    layout: KVLayout, shards: Sequence[Shard] | None, ranks: Sequence[Sequence[Shard]] | None
) -> tuple[tuple[Shard, ...], tuple[tuple[Shard, ...], ...]]:
    """What this process holds, one shard a group, and by group what its engine's ranks hold, each shard once."""
    given = [tuple(of_rank) for of_rank in ranks or ()]
    held = tuple(shards or (given[0] if given else layout.whole))
    if given and shards and held not in given:
        raise LayoutError(f"shards {held}: no rank in `ranks` holds these; give what this process holds to both")
    for of_rank in (held, *given):
        if len(of_rank) != len(layout.groups):
            raise LayoutError(
                f"{len(of_rank)} shards: expected one for each of the layout's {len(layout.groups)} groups"
            )
        for shard, group in zip(of_rank, layout.groups, strict=True):
            if shard.end_layer > group.layers or shard.end_head > group.kv_heads:
                raise LayoutError(f"{shard} reaches past the group's {group.layers} layers, {group.kv_heads} heads")
    return held, tuple(tuple(dict.fromkeys(shards)) for shards in zip(*(given or [held]), strict=True))


def check_transfer(
    layout: KVLayout,
    shards: Sequence[Shard],
    pages: Pages,
    page_ids: PageIds,
    first: int,
    end: int,
    known: int,
) -> None:
    """LayoutError where blocks `first` to `end`, of `known` hashed ones, do not fit the pages and their ids."""
    groups = len(layout.groups)
    if len(pages) != groups or len(page_ids) != groups:
        raise LayoutError(
            f"{len(pages)} pages, {len(page_ids)} lists of page ids: expected one for each of {groups} groups"
        )
    check_blocks(first, end, known)
    for group, (there, ids) in enumerate(zip(pages, page_ids, strict=True)):
        if there.layout != layout or there.group != group:
            raise LayoutError(f"pages of group {there.group} where group {group} of the request's layout was expected")
        if there.shard != shards[group]:
            raise LayoutError(f"pages of {there.shard} in group {group}: this process holds {shards[group]}")
        if len(ids) != end - first:
            raise LayoutError(f"{len(ids)} page ids in group {group}: expected {end - first}, one a block")
        there.check_ids(ids)


def check_blocks(first: int, end: int, known: int) -> None:
    if not 0 <= first <= end <= known:
        raise LayoutError(f"blocks {first} to {end}: the request knows {known} full blocks; match or extend first")


def check_ttl(ttl_s: float | None) -> float | None:
    """What was given; RequestError where it is no time to come."""
    if ttl_s is not None and not (isinstance(ttl_s, (int, float)) and 0 < ttl_s < MOST_TTL_S):
        raise RequestError(f"ttl_s = {ttl_s!r:.40}: expected seconds above 0, or None for no end")
    return ttl_s


def check_origin(origin: object | None, *tokens: object | None) -> None:
    """TokenError where a request that was joined is told tokens: those are its origin's to tell."""
    if origin is not None and any(given is not None for given in tokens):
        raise TokenError("this request was joined: its tokens are told where it was opened; match without any here")
