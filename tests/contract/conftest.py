"""Each cache that there is, one after the other; audited at the end of every test."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kvcache
from kvcache.testing.naive_cache import NaiveCache
from tests.contract.fake_engine import MiB
from tests.peer.redis_server import MISSING, empty

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="files in memory are Linux's")


def served(directory: Path, how: str) -> tuple[Any, Callable[[], None]]:
    """A client of a daemon in this process, and what ends the daemon. `how`: "daemon" maps its memory, "daemon+copy"
    has the bytes sent over the same socket, "daemon+tls" over the network."""
    from kvcache.cache.cache import Cache
    from kvcache.daemon.discovery import SocketClaim
    from kvcache.daemon.server.admission import Admission
    from kvcache.daemon.server.server import Daemon
    from kvcache.daemon.server.tcp import TcpListener
    from kvcache.os_env import SystemClock
    from kvcache.settings.sources import load
    from tests.daemon.certificate_authority import Authority
    from tests.daemon.in_process_daemon import PATIENT, start

    settings: dict[str, Any] = {}
    if how != "daemon":
        authority, tenants = Authority(directory), directory / "tenants"
        tenants.write_text(f'["*"]\nusers = [{os.getuid()}]\ncertificates = ["engine"]\nshare = "copy"\n')
        settings["tenants_file"] = str(tenants)
    if how == "daemon+tls":
        settings["tls_cert_file"] = str(authority.sign("daemon", "127.0.0.1"))
        settings |= {"listen": "127.0.0.1:0", "tls_client_ca_file": str(authority.file)}
    loaded = load(None, host={"capacity_bytes": 8 * MiB}, nvme={"enabled": False}, daemon=settings)
    own = Cache(loaded, shared=True)
    admission = Admission(loaded.daemon.tenants_file, SystemClock())
    port = TcpListener(loaded.daemon, admission, insecure=False) if loaded.daemon.listen else None
    claim = SocketClaim(directory / "daemon", 0o600)
    stop = start(Daemon(own, claim, admission=admission, port=port))

    def end() -> None:
        stop()
        own.close()
        claim.release()

    if port is None:
        return kvcache.open(f"unix:{directory / 'daemon'}", **PATIENT), end
    shown = {"ca_file": str(authority.file), "cert_file": str(authority.sign("engine"))}
    return kvcache.open(str(port), **PATIENT, **shown), end


@pytest.fixture(
    params=[
        "naive",
        "host",
        "host+nvme",
        "host+object",
        pytest.param("daemon", marks=LINUX),
        pytest.param("daemon+copy", marks=LINUX),
        pytest.param("daemon+tls", marks=LINUX),
        pytest.param("host+redis", marks=pytest.mark.skipif(bool(MISSING), reason=MISSING)),
    ]
)
def cache(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    end = None
    if request.param == "naive":
        made: Any = NaiveCache()
    elif request.param.startswith("daemon"):
        made, end = served(tmp_path, request.param)
    else:
        made = kvcache.open(
            host={"capacity_bytes": 8 * MiB},
            nvme={
                "enabled": request.param == "host+nvme",
                "path": tmp_path / "nvme",
                "capacity_bytes": 64 * MiB,
                "min_free_bytes": 0,
            },
            redis={"enabled": True, "url": empty(tmp_path).unix} if request.param == "host+redis" else {},
            object={"enabled": True, "url": f"file://{tmp_path}/objects"} if request.param == "host+object" else {},
        )
    yield made
    assert made.flush(30)
    assert made.check() == []
    made.close()
    if end is not None:
        end()
