"""The connector for vLLM, which loads it by name: `kv_connector_module_path = "kvcache.connector.vllm"`."""

from __future__ import annotations

from typing import Any

__all__ = ["KVCacheConnector"]


def __getattr__(name: str) -> Any:
    if name != "KVCacheConnector":
        raise AttributeError(f"module 'kvcache.connector.vllm' has no attribute {name!r}")
    from kvcache.connector.vllm.connector import KVCacheConnector

    return KVCacheConnector
