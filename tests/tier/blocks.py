"""Blocks for tests of tiers, as authors of tiers have them."""

from kvcache.testing.tier import PAYLOAD_BYTES, RECORD_BYTES, SHARD, buffer, chain, holds, namespace, payload, record

__all__ = [
    "PAYLOAD_BYTES",
    "RECORD_BYTES",
    "SHARD",
    "buffer",
    "chain",
    "holds",
    "namespace",
    "payload",
    "record",
]
