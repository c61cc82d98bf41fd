"""The differences between versions of vLLM (0.28 to 0.33), and nothing else."""

from __future__ import annotations

from typing import Any

import vllm
from vllm.distributed import kv_events
from vllm.v1.core import kv_cache_utils

try:  # from 0.31 on
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:
    CacheHitSource = None


try:  # from 0.30 on: the only way to report a failed load of several groups
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
except ImportError:
    KVConnectorTransferResults = None

__all__ = [
    "FIXED_ROOT",
    "VERSION",
    "CacheHitSource",
    "KVConnectorTransferResults",
    "block_table",
    "event",
    "event_hash",
    "event_keys",
    "hash_origin",
    "hash_tokens",
    "hit_source",
]

VERSION: str = vllm.__version__
FIXED_ROOT = "vllm-none-hash"
"""The root of vLLM's chain of block hashes without PYTHONHASHSEED, from 0.30 on; random before."""


def hit_source(tier: str) -> Any:
    """Return vLLM's name of the tier that a hit was found in."""
    names = {"host": "HOST", "nvme": "DISK"}
    return getattr(CacheHitSource, names.get(tier, "EXTERNAL_UNSPECIFIED"))


def block_table(out: Any, request_id: str) -> tuple[list[int], ...] | None:
    """Return all pages of a request by group, as of this step; None before 0.29, which does not report them."""
    state = getattr(out, "kv_connector_block_state", None)
    return None if state is None else state.get_block_ids(request_id)


def hash_tokens(cache_config: Any, kv_cache_config: Any) -> int:
    """Return the number of tokens of one block hash; a group's blocks may be larger."""
    found = getattr(kv_cache_config, "hash_block_size", None) or getattr(cache_config, "hash_block_size", None)
    return int(found or cache_config.block_size)


def hash_origin(algorithm: str) -> str | None:
    """Return how vLLM's block hashes are made, or None where they differ between processes or are not cryptographic.

    Call it once the first request has arrived: vLLM chooses the root late.
    """
    if algorithm not in {"sha256", "sha256_cbor"}:
        return None
    from vllm.utils.hashing import get_hash_fn_by_name

    root = getattr(kv_cache_utils, "NONE_HASH", None)
    if root is None or bytes(root) != bytes(get_hash_fn_by_name(algorithm)(FIXED_ROOT)):
        return None
    return f"vllm {algorithm} {FIXED_ROOT}"


def event(kind: str, **fields: Any) -> Any:
    """Return one of vLLM's KV events, without the fields that this version lacks."""
    made = getattr(kv_events, kind)
    known = set(made.__struct_fields__)
    return made(**{name: value for name, value in fields.items() if name in known})


def event_hash(block_hash: bytes) -> int | bytes:
    """Return a block hash as this version publishes it: its last 64 bits, or all of it."""
    published: int | bytes = kv_cache_utils.maybe_convert_block_hash(kv_cache_utils.BlockHash(block_hash))
    return published


def event_keys(request: Any, first_token: int, end_token: int) -> tuple[Any, ...] | None:
    """Return what a block's hash is made from beside its tokens, as this version publishes it."""
    plain = request.lora_request is None and not request.mm_features and not request.cache_salt
    if plain and getattr(request, "prompt_embeds", None) is None:
        return None
    keys, _ = kv_cache_utils.generate_block_hash_extra_keys(request, first_token, end_token, 0)
    untagged = getattr(kv_cache_utils, "to_event_extra_keys", None)
    if keys is None or untagged is None:
        return None if keys is None else tuple(keys)
    published: list[tuple[Any, ...] | None] = untagged([keys])
    return published[0]
