"""What every test shares: the `--long` option, Hypothesis profiles, an environment without our variables, and, for
those that look for running caches, a runtime directory of their own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import settings

# A developer's own settings must not decide what the tests see. KVCACHE_DIR stays: converted models are kept there.
for _name in [name for name in os.environ if name.startswith("KVCACHE_") and name != "KVCACHE_DIR"]:
    del os.environ[_name]

# The default run finds the same things each time; a long one looks elsewhere each time, and at six times as much.
settings.register_profile("default", deadline=None, derandomize=True, max_examples=50)
settings.register_profile("long", deadline=None, max_examples=300, print_blob=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", default=False, help="long campaigns: minutes to hours")


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("long" if config.getoption("--long") else "default")
    if config.getoption("--long"):
        config.option.timeout = config.option.timeout or 7200


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not Path("/dev/nvidiactl").exists():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU on this machine"))


PATIENT = {"KVCACHE_FLOW__DEADLINE_S": "30", "KVCACHE_FLOW__LOOKUP_TIMEOUT_S": "30"}
PEER = Path(__file__).parent / "peer"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """No test is of how long a busy machine takes to answer, nor are the processes that it starts; but real engines run
    with what their users have."""
    for name, value in PATIENT.items():
        os.environ.pop(name, None)
        if PEER not in item.path.parents:
            os.environ[name] = value


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where sockets of running caches lie: nothing that runs on this machine is found, nor reached by mistake."""
    from kvcache.daemon import discovery as place

    with TemporaryDirectory(prefix="kvcache-test-") as made:  # short: a socket's path has 107 bytes
        monkeypatch.setenv("XDG_RUNTIME_DIR", made)
        monkeypatch.setattr(place, "socket_directories", lambda environ=None: [Path(made, "kvcache")])
        yield Path(made, "kvcache")
