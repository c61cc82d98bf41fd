# The compiled core, built from csrc/host and reached through kvcache/native.py. What its functions promise stands in
# their docstrings, in csrc/host/module.cpp.

from collections.abc import Sequence
from typing import Any

def digest_chain(
    parent: bytes, tokens: Any, block_tokens: int, extras: Sequence[bytes] | None = None, *, plain: bool = False
) -> bytes: ...
def gather(
    bases: Any,
    extents: Sequence[int],
    item_bytes: int,
    page_step: int,
    page: Sequence[int],
    payload: Sequence[int],
    page_ids: Any,
    payloads: Sequence[Any],
    threads: int,
    *,
    plain: bool = False,
) -> None: ...
def scatter(
    bases: Any,
    extents: Sequence[int],
    item_bytes: int,
    page_step: int,
    page: Sequence[int],
    payload: Sequence[int],
    page_ids: Any,
    payloads: Sequence[Any],
    threads: int,
    *,
    plain: bool = False,
) -> None: ...
