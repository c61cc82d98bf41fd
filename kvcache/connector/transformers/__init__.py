"""The connector for Hugging Face transformers: `PrefixStore` puts a cache under `generate`."""

from kvcache.connector.transformers.prefix_store import PrefixCache, PrefixStore

__all__ = ["PrefixCache", "PrefixStore"]
