"""What a caller hands to `load` and `store`, checked before anything moves."""

from __future__ import annotations

from kvcache.block.layout import KVLayout
from kvcache.errors import LayoutError
from kvcache.hierarchy.face import PageIds
from kvcache.transfer.pages import Pages


def check_transfer(layout: KVLayout, pages: Pages, page_ids: PageIds, first: int, end: int, known: int) -> None:
    """LayoutError where blocks `first` to `end`, of `known` hashed ones, do not fit the pages and their ids."""
    groups = len(layout.groups)
    if len(pages) != groups or len(page_ids) != groups:
        raise LayoutError(
            f"{len(pages)} pages, {len(page_ids)} lists of page ids: expected one for each of {groups} groups"
        )
    if not 0 <= first <= end <= known:
        raise LayoutError(f"blocks {first} to {end}: the request knows {known} full blocks; match or extend first")
    for group, (there, ids) in enumerate(zip(pages, page_ids, strict=True)):
        if there.layout != layout or there.group != group:
            raise LayoutError(f"pages of group {there.group} where group {group} of the request's layout was expected")
        if len(ids) != end - first:
            raise LayoutError(f"{len(ids)} page ids in group {group}: expected {end - first}, one a block")
        there.check_ids(ids)
