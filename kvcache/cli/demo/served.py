"""The demo's daemon: a process of its own, that ends with the demo and not with the engines that it plays."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvcache.errors import StoreError


@contextmanager
def served(directory: Path) -> Iterator[str]:
    """Where it listens. Its drive is `directory`."""
    with tempfile.TemporaryDirectory(prefix="kvcache-") as place:
        words = [sys.executable, "-m", "kvcache.cli.main", "daemon", "--socket", f"{place}/demo.socket"]
        environ = {**os.environ, "KVCACHE_NVME__PATH": str(directory)}
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environ) as process:  # noqa: S603  our own
            assert process.stdout is not None, "it is a pipe"
            try:
                if not process.stdout.readline():
                    raise StoreError(f"the daemon ended with code {process.wait()}: it says why above")
                yield f"unix:{place}/demo.socket"
            finally:
                process.terminate()
