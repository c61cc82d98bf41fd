"""SIGHUP: tenants, limits and the log's level are read again; and nothing that is secret is ever written down."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import kvcache
from kvcache.daemon.server.auth import new_token, token_hash
from kvcache.errors import AccessError, KVCacheError
from tests.daemon.certificate_authority import Authority
from tests.daemon.daemon_process import DaemonProcess, bound_to, load, store
from tests.daemon.in_process_daemon import PATIENT, until
from tests.daemon.test_tenant import written
from tests.peer.ports import free_port


def hang_up(daemon: DaemonProcess, said: str) -> None:
    """SIGHUP, and wait until it says so."""
    assert daemon.process is not None
    before = "".join(daemon.output).count(said)
    daemon.process.send_signal(signal.SIGHUP)
    until(lambda: "".join(daemon.output).count(said) > before)


@contextmanager
def opened(daemon: DaemonProcess, token: str) -> Iterator[Any]:
    file = daemon.directory / f"token-{secrets.token_hex(4)}"
    file.write_text(token)
    with daemon.open(token_file=str(file)) as cache:
        yield cache


def test_tenants_are_added_and_removed_by_a_reload(make_daemon: Callable[..., DaemonProcess]) -> None:
    daemon = make_daemon(LOG__FORMAT="text", LOG__LEVEL="info")
    tenants, first, second = daemon.directory / "tenants", new_token(), new_token()
    daemon.environ["KVCACHE_DAEMON__TENANTS_FILE"] = str(written(tenants, acme={"tokens": [token_hash(first)]}))
    daemon.start()
    with opened(daemon, first) as cache:
        expected = store(bound_to(cache), list(range(16)), 1)
        with pytest.raises(AccessError), opened(daemon, second):
            pass
        written(tenants, acme={"tokens": [token_hash(first), token_hash(second)], "operations": 1000})
        hang_up(daemon, "reloaded settings")
        assert load(bound_to(cache), list(range(16))) == expected, "a known client still goes on"
        with opened(daemon, second) as other:
            assert load(bound_to(other), list(range(16))) == expected
            written(tenants, acme={"tokens": [token_hash(second)]})
            hang_up(daemon, "reloaded settings")
            assert load(bound_to(other), list(range(16))) == expected
        with bound_to(cache).request() as r:
            assert r.match(list(range(16))).reason == "unreachable", "the first token admits no client any more"
        tenants.write_text("nonsense")
        hang_up(daemon, "not reloaded")
        with opened(daemon, second) as other:
            assert load(bound_to(other), list(range(16))) == expected
    assert daemon.terminate()[0] == 0


def test_the_log_level_is_reloaded(make_daemon: Callable[..., DaemonProcess], tmp_path: Path) -> None:
    file = tmp_path / "kvcache.toml"
    file.write_text('[log]\nformat = "text"\nlevel = "warning"\n')
    daemon = make_daemon().start(str(file))
    with daemon.open() as cache:
        bound_to(cache, model="first")
        file.write_text('[log]\nformat = "text"\nlevel = "info"\n')
        hang_up(daemon, "reloaded settings")
        bound_to(cache, model="second")
        until(lambda: "namespace bound: model=second" in "".join(daemon.output))
    assert "namespace bound: model=first" not in "".join(daemon.output)


def test_a_certificate_is_renewed_by_a_reload(make_daemon: Callable[..., DaemonProcess], tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    before, after = Authority(tmp_path), Authority(tmp_path / "new")
    address, token = f"127.0.0.1:{free_port()}", new_token()
    daemon = make_daemon(LOG__FORMAT="text", LOG__LEVEL="info", DAEMON__LISTEN=address)
    certificate = before.sign("daemon", "127.0.0.1")
    daemon.environ["KVCACHE_DAEMON__TLS_CERT_FILE"] = str(certificate)
    daemon.environ["KVCACHE_DAEMON__TENANTS_FILE"] = str(
        written(daemon.directory / "tenants", acme={"tokens": [token_hash(token)]})
    )
    daemon.start()
    (tmp_path / "token").write_text(token)

    def reach(authority: Authority) -> Any:
        return kvcache.open(
            f"tls://{address}", ca_file=str(authority.file), token_file=str(tmp_path / "token"), **PATIENT
        )

    with reach(before) as cache:
        expected = store(bound_to(cache), list(range(16)), 1)
        shutil.copy(after.sign("daemon", "127.0.0.1"), certificate)
        hang_up(daemon, "reloaded settings")
        assert load(bound_to(cache), list(range(16))) == expected, "who is here stays"
        with reach(after) as other:
            assert load(bound_to(other), list(range(16))) == expected
        with pytest.raises(AccessError):
            reach(before)
        certificate.write_text("nonsense")
        hang_up(daemon, "not reloaded")
        with reach(after) as other:
            assert load(bound_to(other), list(range(16))) == expected
    assert daemon.terminate()[0] == 0


def test_nothing_sensitive_is_logged(make_daemon: Callable[..., DaemonProcess]) -> None:
    """Everything that a daemon can be told, at the level that says most: no token, no salt, no token id, no secret."""
    address = f"127.0.0.1:{free_port()}"
    daemon = make_daemon(nvme=True, LOG__FORMAT="json", LOG__LEVEL="debug", DAEMON__LISTEN=address)
    right, wrong, salt = new_token(), new_token(), f"salt-{secrets.token_hex(8)}"
    daemon.environ["KVCACHE_DAEMON__TENANTS_FILE"] = str(
        written(daemon.directory / "tenants", acme={"tokens": [token_hash(right)], "operations": 200})
    )
    daemon.environ["KVCACHE_TOKEN"] = right
    daemon.start("--insecure-loopback")
    ids = [4_026_531_841 + i for i in range(32)]
    file = daemon.directory / "token"
    for where in (f"unix:{daemon.socket}", f"tcp://{address}"):
        for token in (right, wrong):
            file.write_text(token)
            try:
                with kvcache.open(where, token_file=str(file), **PATIENT) as cache:
                    handle = bound_to(cache, cache_salt=salt)
                    store(handle, ids, 1)
                    load(handle, ids)
                    with pytest.raises(KVCacheError):
                        bound_to(cache, tenant="other", cache_salt=salt)
                    with handle.request() as r:  # blocks that are not cached, so that the reason is worked out
                        r.match([*ids[:16], *reversed(ids)])
                        r.admit()
                    assert cache.flush(60)
                    session = cache.connection.session
            except AccessError:
                assert token == wrong
    daemon.process.send_signal(signal.SIGHUP)  # type: ignore[union-attr]
    code, said = daemon.terminate()
    assert code == 0
    lines = [line for line in said.splitlines() if line.startswith("{")]
    assert len(lines) > 3
    assert any(json.loads(line)["level"] == "debug" for line in lines)
    for secret in (right, wrong, salt, token_hash(right), token_hash(wrong), session.hex(), *map(str, ids)):
        assert secret not in said
    for path in Path(daemon.directory).rglob("*"):
        if path.is_file() and path.name not in ("tenants", "token"):
            content = path.read_bytes()
            assert right.encode() not in content
            assert wrong.encode() not in content


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="setpriv takes the rights away")
def test_a_daemon_runs_without_privileges(make_daemon: Callable[..., DaemonProcess]) -> None:
    """Without any capability, and no way to get one."""
    daemon = make_daemon(nvme=True)
    daemon.wrapper = ["setpriv", "--no-new-privs", "--inh-caps=-all"]
    if os.geteuid() == 0:
        daemon.wrapper.append("--bounding-set=-all")
    daemon.start()
    assert daemon.process is not None
    status = Path(f"/proc/{daemon.process.pid}/status").read_text()
    assert "CapEff:\t0000000000000000" in status
    with daemon.open() as cache:
        expected = store(bound_to(cache), list(range(16)), 1)
        assert cache.flush(60)
        assert load(bound_to(cache), list(range(16))) == expected
    assert daemon.terminate()[0] == 0
