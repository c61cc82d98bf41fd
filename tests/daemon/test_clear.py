"""`kvcache clear` over a daemon: what its clients stored is erased, and they go on."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.daemon.daemon_process import LAYOUT, DaemonProcess, bound_to, store


def test_clear_erases_a_tenant_with_connected_clients(make_daemon: Callable[..., DaemonProcess], runtime: Path) -> None:
    daemon = make_daemon(nvme=True, CONTROL__ENABLED="true")
    daemon.environ["XDG_RUNTIME_DIR"] = str(runtime.parent)
    daemon.start()
    with daemon.open() as cache:
        mine, other = bound_to(cache, tenant="mine"), bound_to(cache, tenant="other")
        for handle in (mine, other):
            store(handle, list(range(32)), 1)
        assert cache.flush(30)
        (control,) = runtime.glob("*.sock")  # by its path: other caches of this machine are not this test's to clear
        command = [sys.executable, "-m", "kvcache.cli.main", "clear", "--tenant", "mine", "--address", str(control)]
        done = subprocess.run(command, env=daemon.environ, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        assert "removed: no record of 1 namespaces remains" in done.stdout
        for handle, blocks in ((mine, 0), (other, 32 // LAYOUT.block_tokens)):
            with handle.request() as r:
                assert r.match(list(range(32))).blocks == blocks
        store(mine, list(range(32)), 2)
        with mine.request() as r:
            assert r.match(list(range(32))).blocks == 32 // LAYOUT.block_tokens
