"""The entry point `vllm.general_plugins`: registers the connector by name, so that no module path is needed."""

from __future__ import annotations


def register() -> None:
    """Register the connector. vLLM calls this in each of its processes, possibly several times."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.register_connector("KVCacheConnector", "kvcache.connector.vllm", "KVCacheConnector")
    except ValueError:
        return  # already registered
