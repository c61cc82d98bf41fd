"""The connector for SGLang: a HiCache storage backend, and a linker between its device pages and the host tier.

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{"backend_name": "kvcache",
      "module_path": "kvcache.connector.sglang", "class_name": "KVCacheStorage", "interface_v1": 1, "kvcache": {...}}'

Each class is imported on first use: the modules that describe pools do not import SGLang.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_MODULES = {"KVCacheStorage": "storage", "KVCacheLinker": "linker"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
