"""What is looked at before the old daemon is asked to end: a refusal leaves it serving."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvcache.daemon.server.auth import Tenants, token_hash
from kvcache.daemon.server.service import check_settings
from kvcache.errors import ConfigError
from kvcache.machine import memory
from kvcache.settings.sources import load as load_settings
from tests.daemon.daemon_process import DaemonProcess, bound_to, load, store
from tests.daemon.test_tenant import written

PROMPT = list(range(32))  # eight blocks


def tenants(path: Path, least: str) -> Path:
    """Two, each with so much that others cannot take."""
    return written(path, **{name: {"tokens": [token_hash(name * 40)], "host_guaranteed_bytes": least} for name in "ab"})


def settings(**given: Any) -> Any:
    return load_settings(None, environ={}, **{"nvme__enabled": False, **given})


def test_invalid_settings_leave_the_old_daemon_serving(make_daemon: Callable[..., DaemonProcess]) -> None:
    daemon = make_daemon().start()
    with daemon.open() as cache:
        expected = store(bound_to(cache), PROMPT, 1)
        successor = daemon.successor(DAEMON__TENANTS_FILE=tenants(daemon.directory / "tenants", "20MiB"))
        for word in ("--check-config", "--replace"):
            done = successor.run(word, timeout_s=300)
            assert (done.returncode, "host_guaranteed_bytes of all tenants" in done.stderr) == (2, True), done.stderr
        assert load(bound_to(cache), PROMPT) == expected
    assert daemon.process is not None
    assert daemon.process.poll() is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"encryption__key_file": "/nowhere"}, "encryption.key_file"),
        ({"object__enabled": True, "object__url": "memory:///"}, "object.enabled: needs obstore"),
        ({"object__enabled": True, "object__url": "memory:///", "object__signing_key_file": "/nowhere"}, "signing"),
        ({"redis__enabled": True, "redis__url": "redis://127.0.0.1:1/0", "redis__signing_key_file": "/no"}, "signing"),
        (
            {"evict__tenants": {name: {"host_guaranteed_bytes": "20MiB"} for name in "ab"}},
            "host_guaranteed_bytes of all",
        ),
    ],
)
def test_preflight_refuses_whatever_an_open_would(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], said: str
) -> None:
    monkeypatch.setitem(sys.modules, "obstore.store", None)  # as where it is not installed
    check_settings(settings(host__capacity_bytes="32MiB"), None)
    with pytest.raises(ConfigError, match=said):
        check_settings(settings(host__capacity_bytes="32MiB", **given), None)


def test_a_default_arena_may_match_the_previous_one(tmp_path: Path) -> None:
    """Beside which there is less room now than there will be."""
    found = Tenants.read(os.fspath(tenants(tmp_path / "tenants", str(memory().allowed_bytes * 2 // 5))))
    check_settings(settings(), found)
    with pytest.raises(ConfigError, match="host_guaranteed_bytes"):
        check_settings(settings(host__capacity_bytes="16MiB"), found)
