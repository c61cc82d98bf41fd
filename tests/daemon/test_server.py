"""A daemon as a process: how it starts and is refused, whom it serves, how it ends."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

import kvcache
from kvcache.daemon.discovery import SocketClaim
from kvcache.daemon.protocol import HEADER_BYTES, MAX_FRAME_BYTES, PROTOCOL_VERSION, pack, parse_reply
from kvcache.daemon.server.service import memlock_warning, raise_limits, required_descriptors
from kvcache.daemon.wire import Wire
from kvcache.errors import ConfigError, StoreError, UnreachableError
from kvcache.settings.service import MAX_HTTP_CONNECTIONS
from kvcache.settings.sources import load as load_settings
from tests.daemon.daemon_process import DaemonProcess, bound_to, load, store
from tests.daemon.in_process_daemon import InProcessDaemon, until

Make = Callable[..., DaemonProcess]


class Tries:
    """A call that is passed on, and what it said when it failed."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.call, self.failed = call, list[str]()

    def __call__(self) -> Any:
        try:
            return self.call()
        except BaseException as error:
            self.failed.append(str(error))
            raise


@pytest.fixture(scope="module")
def standing() -> Iterator[DaemonProcess]:
    """One that stands through all these tests: what clients do to it must not matter to the next."""
    with TemporaryDirectory(prefix="kv-") as directory:
        daemon = DaemonProcess(Path(directory)).start()
        yield daemon
        with daemon.open() as cache:
            assert cache.check() == []
        assert daemon.terminate()[0] == 0


def test_stored_blocks_serve_other_engines_and_restarts(make_daemon: Make) -> None:
    daemon, tokens = make_daemon(nvme=True).start(), list(range(40))
    with daemon.open() as cache:
        expected = store(bound_to(cache), tokens, 1)
        assert cache.flush(60)
    with daemon.open() as cache:
        assert load(bound_to(cache), tokens) == expected
        assert cache.check() == []
    code, said = daemon.terminate()
    assert (code, "written first" in said) == (0, True)
    daemon.start()
    with daemon.open() as cache:
        with bound_to(cache).request() as r:
            assert r.match(tokens).by_tier == {"nvme": 10}
        assert load(bound_to(cache), tokens) == expected


def test_queued_blocks_are_written_before_exit(make_daemon: Make) -> None:
    daemon, tokens = make_daemon(nvme=True).start(), list(range(200))
    cache = daemon.open()
    expected = store(bound_to(cache), tokens, 2)
    assert daemon.terminate()[0] == 0
    daemon.start()
    cache.wait_reachable(60)
    assert load(bound_to(cache), tokens) == expected
    cache.close()


def test_a_client_without_descriptors_gets_misses(make_daemon: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon, tokens = make_daemon().start(), list(range(40))
    with daemon.open() as cache:
        handle = bound_to(cache)
        store(handle, tokens, 1)
        tries = Tries(cache._connect)
        monkeypatch.setattr(cache, "_connect", tries)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with handle.request() as r:
            assert r.match(tokens).blocks == 10
            daemon.kill()
            resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
            try:
                assert r.match(tokens).blocks == 0
                until(lambda: len(tries.failed) >= 3)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert any("Too many open files" in failed for failed in tries.failed)
        daemon.start()
        assert cache.wait_reachable(60)
        expected = store(handle, tokens, 2)
        assert load(handle, tokens) == expected


def test_failed_reconnects_are_retried(make_daemon: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = make_daemon().start()
    with daemon.open() as cache:
        true = cache._connect
        left = ["one", "two", "three"]

        def connect() -> Any:
            if left:
                raise RuntimeError(left.pop())
            return true()

        monkeypatch.setattr(cache, "_connect", connect)
        cache.mark_lost(cache.connection, UnreachableError("pretended"))
        assert cache.wait_reachable(60)
        assert left == []


def test_check_config_prints_the_configuration(make_daemon: Make) -> None:
    daemon = make_daemon()
    done = daemon.run("--check-config")
    assert (done.returncode, "32 MiB of host memory" in done.stdout) == (0, True)
    assert not daemon.socket.exists()
    daemon.environ["KVCACHE_HOST__CAPACITY_BYTES"] = "much"
    done = daemon.run("--check-config")
    assert (done.returncode, "host.capacity_bytes" in done.stderr) == (2, True)


def test_a_second_daemon_is_refused_with_the_firsts_socket(standing: DaemonProcess) -> None:
    assert standing.process is not None
    done = standing.run()
    assert done.returncode == 2
    assert f"process {standing.process.pid} serves it" in done.stderr


def test_a_second_owner_of_a_drive_is_told_the_first(make_daemon: Make) -> None:
    first, second = make_daemon(nvme=True), make_daemon(nvme=True)
    second.environ["KVCACHE_NVME__PATH"] = first.environ["KVCACHE_NVME__PATH"]
    first.start()
    assert first.process is not None
    done = second.run()
    assert done.returncode == 2
    assert f"process {first.process.pid}, which serves unix:{first.socket}" in done.stderr
    assert not second.socket.exists()


def test_a_stale_socket_is_replaced(daemon: DaemonProcess) -> None:
    daemon.kill()
    assert daemon.socket.exists()
    daemon.start()
    with daemon.open() as cache:
        assert cache.check() == []


def test_the_memory_to_lock_for_gpus_is_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load_settings(None, nvme__enabled=False, host__capacity_bytes="64MiB")
    limit = {"now": (1 << 20, 8 << 20)}
    monkeypatch.setattr("kvcache.daemon.server.service.resource.getrlimit", lambda _: limit["now"])
    monkeypatch.setattr("kvcache.daemon.server.service.NVIDIA_DEVICE", tmp_path / "none")
    assert memlock_warning(settings) == ""
    monkeypatch.setattr("kvcache.daemon.server.service.NVIDIA_DEVICE", tmp_path)
    assert "8 MiB of memory may be locked" in memlock_warning(settings)
    assert "pins 64 MiB" in memlock_warning(settings)
    limit["now"] = (1 << 20, 64 << 20)  # the soft one is the engine's own to raise
    assert memlock_warning(settings) == ""


def test_a_low_descriptor_limit_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load_settings(
        None, host={"capacity_bytes": "64GiB", "slab_bytes": "16MiB"}, nvme__enabled=False, daemon__connections=100
    )
    assert required_descriptors(settings) >= 4096 + 200
    seen = load_settings(
        None,
        host={"capacity_bytes": "64GiB", "slab_bytes": "16MiB"},
        nvme__enabled=False,
        daemon__connections=100,
        http__enabled=True,
    )
    assert required_descriptors(seen) == required_descriptors(settings) + MAX_HTTP_CONNECTIONS
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    with pytest.raises(ConfigError, match=rf"4096 descriptors.*{required_descriptors(settings)} are needed"):
        raise_limits(settings)
    raised: list[Any] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1 << 20))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: raised.append(limits))
    raise_limits(settings)
    assert raised == [(1 << 20, 1 << 20)], "what a daemon before hands over may be more than is needed"


def test_a_missing_memfd_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, flags: int = 0) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    with pytest.raises(ConfigError, match="memfd_create"):
        raise_limits(load_settings(None, nvme__enabled=False))


def test_an_unsafe_socket_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="choose another directory"):
        SocketClaim(tmp_path / "nowhere" / "s", 0o600)
    with pytest.raises(ConfigError, match=r"at most \d+ bytes"):
        SocketClaim(Path("/tmp", "x" * 120), 0o600)


def test_the_socket_mode_decides_who_may_connect(standing: DaemonProcess, tmp_path: Path) -> None:
    assert standing.socket.stat().st_mode & 0o777 == 0o600
    for mode, others in ((0o600, False), (0o660, True)):
        claim = SocketClaim(tmp_path / f"{mode:o}", mode)
        claim.listen()
        assert claim.path.stat().st_mode & 0o777 == mode
        assert (claim.admits(os.geteuid()), claim.admits(54321)) == (True, others)
        claim.release()


def hello(daemon: DaemonProcess, **more: Any) -> tuple[Wire, dict[str, Any]]:
    wire = Wire.connect(str(daemon.socket), 30)
    wire.send({"op": "hello", "version": PROTOCOL_VERSION, "role": "control", **more})
    return wire, wire.receive(30)[0]


def ended(connection: socket.socket) -> bool:
    connection.settimeout(30)
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    return True


def test_a_version_mismatch_names_both_versions(standing: DaemonProcess) -> None:
    wire, said = hello(standing, version=99)
    with pytest.raises(UnreachableError, match=r"protocol version 1.*client 99"):
        parse_reply(said)
    wire.close()


@pytest.mark.parametrize(
    "sent",
    [
        b"\xff" * 64,
        b"GET / HTTP/1.1\r\n\r\n",
        (MAX_FRAME_BYTES + 1).to_bytes(HEADER_BYTES, "little"),
        pack({"op": "stats"}),
        pack({"op": "hello", "version": 1, "role": "king"}),
        pack({"op": "hello", "version": 1, "role": "mover", "session": b"guess"}),
    ],
)
def test_malformed_bytes_close_only_their_connection(standing: DaemonProcess, sent: bytes) -> None:
    with standing.open() as cache:
        stranger = socket.socket(socket.AF_UNIX)
        stranger.connect(str(standing.socket))
        stranger.sendall(sent)
        if b"guess" not in sent:  # which is a question, and answered
            assert ended(stranger)
        stranger.close()
        assert load(bound_to(cache), list(range(900, 908))) == [], "which no client stores"
        assert "unreachable" not in cache.stats()


def test_a_client_that_reads_no_answers_is_closed(standing: DaemonProcess) -> None:
    wire, _ = hello(standing)
    wire.connection.settimeout(30)
    question = pack({"op": "stats"}) * 100
    for _ in range(100_000):
        try:
            wire.connection.sendall(question)
        except ConnectionError:
            break
    else:
        pytest.fail("ten million questions were taken, and no answer of them")
    wire.close()
    with standing.open() as cache:
        assert "unreachable" not in cache.stats()


def test_a_client_stopped_in_a_frame_delays_no_other(standing: DaemonProcess) -> None:
    wire, _ = hello(standing)
    wire.connection.sendall(pack({"op": "stats"})[:5])
    with standing.open() as cache:
        assert "unreachable" not in cache.stats()
    wire.close()


def test_connections_beyond_the_limit_are_refused(make_daemon: Make) -> None:
    daemon = make_daemon(DAEMON__CONNECTIONS=3).start()
    wires = [hello(daemon)[0] for _ in range(3)]
    with pytest.raises(UnreachableError):
        daemon.open()
    wires.pop().close()
    while True:  # until it has seen that one left
        try:
            daemon.open().close()
            break
        except UnreachableError:
            continue
    for wire in wires:
        wire.close()


def test_serving_resumes_after_descriptor_exhaustion(make_daemon: Make) -> None:
    daemon = make_daemon(DAEMON__CONNECTIONS=500).start()
    assert daemon.process is not None
    with daemon.open() as cache:
        expected = store(bound_to(cache), list(range(8)), 3)
        resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE, (40, 40))
        strangers = []
        for _ in range(60):
            stranger = socket.socket(socket.AF_UNIX)
            stranger.connect(str(daemon.socket))
            strangers.append(stranger)
        assert load(bound_to(cache), list(range(8))) == expected, "those who are there are served"
        for stranger in strangers:
            stranger.close()
        with daemon.open() as another:
            assert another.stats()["tiers"]["host"]["records"] == 2
        assert cache.check() == []


def test_a_forked_child_does_not_use_its_parents_session(standing: DaemonProcess) -> None:
    cache = standing.open()
    handle = bound_to(cache)
    expected = store(handle, list(range(8)), 4)
    child = os.fork()
    if not child:
        code = 1
        try:
            with handle.request() as r:
                found = r.match(list(range(8))).blocks
            cache.close()
            code = 0 if found == 0 else 2
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert load(handle, list(range(8))) == expected
    cache.close()


def test_two_engines_do_not_share_requests(standing: DaemonProcess) -> None:
    with (
        standing.open(engine="a") as a,
        standing.open(engine="a") as rank,
        standing.open(engine="b") as b,
        bound_to(a).request(id="7") as r,
    ):
        r.match(list(range(8)))
        assert len(bound_to(rank).join("7").signatures) == 2
        with pytest.raises(kvcache.RequestError):
            bound_to(b).join("7")
        with pytest.raises(kvcache.RequestError):
            bound_to(a, tenant="other").join("7")


def test_a_busy_connection_is_closed_if_the_daemon_is_lost(in_process: InProcessDaemon) -> None:
    cache = in_process.open()
    with cache.connection.transfer_wire(30) as wire:
        cache.mark_lost(cache.connection, UnreachableError("as if it had been killed"))
    assert wire.connection.fileno() == -1
