"""A plugin for vLLM's own tests of connectors, from its source package: wherever they name a connector of vLLM's, ours
is made. Nothing of theirs is changed, and none of it is here; docs/vllm.md says what passes.

    PYTHONPATH=.:KVCACHE:KVCACHE/tests/peer/vllm python -m pytest -p connector_override tests/v1/kv_connector/unit/FILE
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

NAMES = ("NixlConnector", "ExampleConnector")


def pytest_configure(config: Any) -> None:
    os.environ.setdefault("KVCACHE_DIR", tempfile.mkdtemp(prefix="connector-override-"))
    os.environ.setdefault("KVCACHE_HOST__CAPACITY_BYTES", "64MiB")
    os.environ.setdefault("KVCACHE_NVME__ENABLED", "false")
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    import kvcache.connector.vllm
    from kvcache.connector.vllm import connector as process

    for name in os.environ.get("OVERRIDDEN_CONNECTORS", ",".join(NAMES)).split(","):
        KVConnectorFactory._registry[name] = lambda: kvcache.connector.vllm.KVCacheConnector
    process.is_single_process = lambda config: True  # a scheduler without workers has no process to share with
