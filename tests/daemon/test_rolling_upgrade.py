"""A daemon and clients of commit 5e49391 and of this tree in one upgrade: real processes, each with its own code."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvcache.settings.sources import RENAMED
from tests.daemon.daemon_process import DaemonProcess

ROOT = Path(__file__).parents[2]
COMMIT = "5e49391"

PROGRAM = """
import hashlib, os, sys, kvcache
try:
    from tests.daemon.daemon_process import PATIENT, bound_to, load, store
except ImportError:
    from tests.daemon.house import PATIENT, bound_to, load, store
PROMPTS = {int(seed): list(range(1000 * int(seed), 1000 * int(seed) + 32)) for seed in sys.argv[2].split(",")}
with kvcache.open(sys.argv[1], **PATIENT) as cache:
    bound = bound_to(cache)
    for command in sys.stdin:
        if command == "store\\n":
            blocks = [store(bound, tokens, seed) for seed, tokens in PROMPTS.items()]
            assert cache.flush(60)
        elif command == "load\\n":
            blocks = [load(bound, tokens) for tokens in PROMPTS.values()]
        elif command == "reach\\n":
            assert cache.wait_reachable(60)
            continue
        elif command == "check\\n":
            print(cache.check(), cache.stats()["tiers"]["host"]["records"], flush=True)
            continue
        print([hashlib.sha256(b"".join(made)).hexdigest() if made else "" for made in blocks], flush=True)
"""
"""A client: for each line of its input it stores or loads the prompts of these seeds, and prints their digests."""

pytestmark = pytest.mark.usefixtures("long")


@pytest.fixture(scope="module")
def long(request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--long"):
        pytest.skip("long: compiles an earlier commit")


@pytest.fixture(scope="module")
def earlier(long: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tree of the earlier commit with its native module."""
    if shutil.which("git") is None or shutil.which("c++") is None:
        pytest.skip("no git or no compiler: apt-get install git g++")
    tree = tmp_path_factory.mktemp("earlier")
    archive = subprocess.run(["git", "archive", COMMIT], cwd=ROOT, capture_output=True, check=False)
    if archive.returncode:
        pytest.skip(f"commit {COMMIT} is not in this checkout: git fetch --unshallow")
    subprocess.run(["tar", "-x"], cwd=tree, input=archive.stdout, check=True)
    subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=tree, check=True)
    return tree


class Client:
    """`PROGRAM` in a process with the code of one tree."""

    def __init__(self, tree: Path, endpoint: str, seeds: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, endpoint, seeds],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, command: str) -> None:
        assert self._process.stdin is not None
        print(command, file=self._process.stdin, flush=True)

    def ask(self, command: str) -> str:
        self.tell(command)
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        assert self._process.wait(60) == 0


@pytest.fixture
def make_client() -> Iterator[Callable[..., Client]]:
    made: list[Client] = []

    def make(*args: object) -> Client:
        made.append(Client(*args))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for client in made:
        client.close()


def code_of(daemon: DaemonProcess, tree: Path) -> DaemonProcess:
    """Make the daemon run the code of a tree, with the settings' names of that tree."""
    if tree != ROOT:
        earlier_names = {_variable(new): _variable(old) for old, new in RENAMED.items()}
        daemon.environ = {earlier_names.get(name, name): value for name, value in daemon.environ.items()}
    daemon.wrapper = ["env", "-C", str(tree)]  # `python -m` looks in its directory first
    return daemon


def _variable(setting: str) -> str:
    return f"KVCACHE_{setting.upper().replace('.', '__')}"


@pytest.mark.parametrize("tcp", [False, True], ids=["unix", "tcp"])
@pytest.mark.parametrize("served_by", ["earlier", "this"])
def test_clients_of_both_commits_share_one_daemon(
    tmp_path: Path, earlier: Path, make_client: Callable[..., Client], served_by: str, tcp: bool
) -> None:
    daemon = code_of(DaemonProcess(tmp_path, nvme=True, tcp=tcp), {"earlier": earlier, "this": ROOT}[served_by]).start()
    try:
        stored = {}
        for tree, seeds in ((earlier, "1,2"), (ROOT, "3,4")):
            stored[seeds] = make_client(tree, daemon.endpoint, seeds).ask("store")
            assert stored[seeds].count("'") == 4, stored
        for tree in (earlier, ROOT):
            for seeds, blocks in stored.items():
                assert make_client(tree, daemon.endpoint, seeds).ask("load") == blocks
            assert make_client(tree, daemon.endpoint, "1").ask("check") == "[] 32\n"
    finally:
        daemon.close()


@pytest.mark.parametrize("served_by", ["earlier", "this"], ids=["upgrade", "downgrade"])
def test_clients_stay_connected_while_the_daemon_is_replaced(
    tmp_path: Path, earlier: Path, make_client: Callable[..., Client], served_by: str
) -> None:
    """Host memory goes over in both directions, because the handover's version is the same."""
    trees = {"earlier": (earlier, ROOT), "this": (ROOT, earlier)}[served_by]
    daemon = code_of(DaemonProcess(tmp_path, nvme=False), trees[0]).start()
    successor = code_of(DaemonProcess(tmp_path, nvme=False), trees[1])
    try:
        clients = {
            seeds: make_client(tree, daemon.endpoint, seeds) for tree, seeds in ((earlier, "1,2"), (ROOT, "3,4"))
        }
        stored = {seeds: client.ask("store") for seeds, client in clients.items()}
        successor.start("--replace")
        assert daemon.wait_exit()[0] == 0
        for seeds, client in clients.items():
            client.tell("reach")
            assert client.ask("load") == stored[seeds]
            assert client.ask("check") == "[] 32\n"
    finally:
        daemon.close()
        successor.close()
