"""What vLLM's own configuration takes, also on a processor, and the connector refuses at start with the reason."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.peer.vllm.conftest import PYTHON, ROOT, WATCHDOG_S

MAKE = """
import sys
from types import SimpleNamespace
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs

ours = {"kv_connector": "KVCacheConnector", "kv_connector_module_path": "kvcache.connector.vllm", "kv_role": "kv_both"}
parallel = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}
arguments = EngineArgs(model=sys.argv[1], block_size=16, kv_transfer_config=KVTransferConfig(**ours), **parallel)
config = arguments.create_engine_config()
for role in KVConnectorRole:
    try:
        KVConnectorFactory.create_connector(config, role, SimpleNamespace(kv_cache_groups=[], num_blocks=1))
    except Exception as error:
        print("refused:", type(error).__name__, error)
"""


def test_decode_context_parallelism_is_refused(models: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    told = subprocess.run(
        [PYTHON, "-c", MAKE, models / "tiny-mla"],
        capture_output=True, text=True, timeout=WATCHDOG_S, env=env, check=True,
    )  # fmt: skip
    refused = [line for line in told.stdout.splitlines() if line.startswith("refused:")]
    assert len(refused) == 2  # by either side
    assert all("ConfigError decode_context_parallel_size = 2" in line for line in refused)
