"""The control socket: who finds it, what it answers, and that no client of it can hurt the cache."""

from __future__ import annotations

import gc
import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvcache
from kvcache.block.layout import KVLayout
from kvcache.daemon.client.control import find_caches, find_socket, send_command
from kvcache.daemon.protocol import MAX_REQUEST_BYTES
from kvcache.daemon.server import control as server
from kvcache.errors import KVCacheError, UnreachableError
from kvcache.transfer.pages import GroupPages

LAYOUT = KVLayout.mha(layers=1, kv_heads=1, head_dim=256, dtype="fp32", block_tokens=4)  # 12 KiB a record


def open_cache(**more: Any) -> Any:
    return kvcache.open(host={"capacity_bytes": "1MiB", "slab_bytes": "64KiB"}, **{"nvme__enabled": False, **more})


def pages() -> list[GroupPages]:
    tensor = np.zeros((1, 2, 64, 4, 1, 256), np.float32)
    return [GroupPages.from_tensors(LAYOUT, tensor, axes=("kv", "page", "token", "head", "dim"))]


@pytest.fixture
def cache(runtime: Path) -> Iterator[Any]:
    with closing(open_cache()) as made:
        yield made
        assert made.check() == []


@pytest.fixture
def path(cache: Any) -> Path:
    (found,) = find_caches()
    return found.path


def connect(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(30)
    connection.connect(os.fspath(path))
    return connection


def hung_up(connection: socket.socket) -> bool:
    """Wait for the cache to end the connection without a word."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:  # with something of ours unread
        return True


def test_a_running_cache_is_found_with_its_info(cache: Any, runtime: Path) -> None:
    handle = cache.namespace(LAYOUT, model="org/model", revision="r", cache_salt="of one tenant")
    (found,) = find_caches()
    assert found.path == runtime / f"{os.getpid()}-1.sock"
    assert found.address == f"{os.getpid()}-1"
    assert found.fault == ""
    info = found.info
    assert (info["pid"], info["version"], info["protocol"]) == (
        os.getpid(),
        kvcache.__version__,
        server.CONTROL_PROTOCOL_VERSION,
    )
    assert (info["models"], info["nvme_path"], info["bypass"]) == (["org/model"], None, "off")
    assert info["tiers"]["host"]["capacity_bytes"] == 1 << 20
    assert "of one tenant" not in repr(info)
    assert handle.layout == LAYOUT


def test_only_the_owner_may_connect(path: Path) -> None:
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_the_socket_is_removed_with_the_cache(runtime: Path) -> None:
    cache = open_cache()
    (found,) = find_caches()
    cache.close()
    assert list(runtime.glob("*.sock*")) == []
    with pytest.raises(UnreachableError, match="kvcache ps"):
        send_command(found.path, "info")
    cache.close()
    forgotten = open_cache()
    assert len(list(find_caches())) == 1
    del forgotten
    gc.collect()
    assert list(runtime.glob("*.sock*")) == []


def test_a_setting_disables_the_control_socket(runtime: Path) -> None:
    with closing(open_cache(control__enabled=False)):
        assert list(find_caches()) == []


def test_two_caches_of_one_process_have_two_addresses(cache: Any, runtime: Path) -> None:
    with closing(open_cache(host__capacity_bytes="2MiB")):
        assert [found.address for found in find_caches()] == [f"{os.getpid()}-1", f"{os.getpid()}-2"]
        sizes = [found.info["tiers"]["host"]["capacity_bytes"] for found in find_caches()]
        assert sizes == [1 << 20, 2 << 20]
        assert find_socket(f"{os.getpid()}-2") == runtime / f"{os.getpid()}-2.sock"
    with pytest.raises(UnreachableError, match="kvcache ps"):
        find_socket(f"{os.getpid()}-2")
    assert find_socket("unix:/run/x.sock") == find_socket("/run/x.sock") == Path("/run/x.sock")


def test_statistics_and_events_equal_the_caches(cache: Any, path: Path) -> None:
    with cache.namespace(LAYOUT, model="m", revision="r").request(id="r-7") as r:
        r.match(range(40))
        r.admit()
        assert r.store(pages(), [list(range(10))]).wait(30)
    assert send_command(path, "stats") == cache.stats()
    (event,) = send_command(path, "events")["events"]
    assert (event["kind"], event["request"], event["blocks"], event["tier"]) == ("stored", "r-7", 10, "host")
    assert send_command(path, "events", count=0) == {"events": []}
    assert send_command(path, "check") == {"busy": False, "count": 0, "faults": []}


def test_bypass_turns_the_cache_off_and_on(cache: Any, path: Path) -> None:
    handle, there = cache.namespace(LAYOUT, model="m", revision="r"), pages()

    def turn(tokens: range) -> tuple[int, str, int, int]:
        """Blocks matched and why no more, blocks loaded of the two that an engine asks for, blocks stored."""
        with handle.request() as r:
            hit = r.match(tokens)
            r.admit()
            load = r.load(2, there, [[0, 1]])
            assert load.wait(30)
            stored = r.store(there, [list(range(len(r.signatures)))])
            assert stored.wait(30)
            return hit.blocks, hit.reason, load.blocks, stored.blocks

    assert turn(range(40)) == (0, "cold", 0, 10)
    assert turn(range(40)) == (10, "", 2, 10)
    failures = cache.counters.get("load_failures")
    assert send_command(path, "bypass", mode="on") == {"mode": "on", "was": "off"}
    assert turn(range(40)) == (0, "bypass", 0, 0)
    assert cache.stats()["bypass"] == {"loads": True, "stores": True}
    assert cache.counters.get("misses", reason="bypass") == 1
    assert cache.counters.get("drops", reason="bypass") == 10
    assert cache.counters.get("load_failures", outcome="bypass") == 2
    assert cache.counters.get("load_failures") == failures + 2
    assert cache.events.last()[-1].reason == "bypass"
    assert send_command(path, "bypass", mode="loads") == {"mode": "loads", "was": "on"}
    assert turn(range(100, 140)) == (0, "bypass", 0, 10)
    assert send_command(path, "bypass", mode="stores") == {"mode": "stores", "was": "loads"}
    assert turn(range(100, 140)) == (10, "", 2, 0)
    assert turn(range(200, 240)) == (0, "cold", 0, 0)
    assert send_command(path, "bypass", mode="off") == {"mode": "off", "was": "stores"}
    assert turn(range(40)) == (10, "", 2, 10)
    assert send_command(path, "bypass") == {"mode": "off", "was": "off"}
    with pytest.raises(KVCacheError, match="expected one of off, on, loads, stores"):
        send_command(path, "bypass", mode="maybe")


def test_a_long_check_does_not_block_bypass(cache: Any, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()
    answers: list[Any] = []

    def audit() -> list[str]:
        begun.set()
        assert go_on.wait(30)
        return ["a fault"] * (server.MAX_FAULTS + 5)

    with monkeypatch.context() as patch:
        patch.setattr(cache, "check", audit)
        asking = threading.Thread(target=lambda: answers.append(send_command(path, "check", timeout_s=None)))
        asking.start()
        assert begun.wait(30)
        assert send_command(path, "check")["busy"]
        assert send_command(path, "bypass", mode="on")["mode"] == "on"
        go_on.set()
        asking.join()
    assert answers == [{"busy": False, "count": server.MAX_FAULTS + 5, "faults": ["a fault"] * server.MAX_FAULTS}]
    assert not send_command(path, "check")["busy"]


def test_a_check_of_a_busy_cache_finds_no_fault(runtime: Path, tmp_path: Path) -> None:
    nvme = {"path": tmp_path / "nvme", "capacity_bytes": "8MiB", "min_free_bytes": 0}
    with closing(open_cache(nvme__enabled=True, nvme=nvme)) as cache:
        (found,) = find_caches()
        handle = cache.namespace(LAYOUT, model="m", revision="r")
        busy, ended = threading.Event(), threading.Event()

        def use(first: int) -> None:
            there, turn = pages(), 0
            while not ended.is_set():
                turn += 1
                with handle.request() as r:
                    tokens = range(first + 1000 * (turn % 50), first + 1000 * (turn % 50) + 64)
                    hit = r.match(tokens)
                    r.admit()
                    assert r.load(hit.blocks, there, [list(range(hit.blocks))]).wait(30)
                    assert r.store(there, [list(range(16))]).wait(30)
                if cache.counters.get("evicted_blocks", tier="nvme"):
                    busy.set()

        threads = [threading.Thread(target=use, args=(10**6 * i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        try:
            assert busy.wait(120)
            faults = [send_command(found.path, "check", timeout_s=None)["faults"] for _ in range(4)]
        finally:
            ended.set()
            for thread in threads:
                thread.join()
        assert faults == [[]] * 4
        assert cache.check() == []


@given(st.binary(max_size=200))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_malformed_bytes_do_no_harm(cache: Any, path: Path, noise: bytes) -> None:
    with connect(path) as connection:
        connection.sendall(noise)
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        while piece := _received(connection):
            answer += piece
    if answer:  # it was a map by chance
        assert "error" in msgpack.unpackb(answer[4:])
    assert send_command(path, "info")["pid"] == os.getpid()


def _received(connection: socket.socket) -> bytes:
    try:
        return connection.recv(1 << 16)
    except ConnectionResetError:
        return b""


def framed(message: Any) -> bytes:
    body = msgpack.packb(message)
    return struct.pack("<I", len(body)) + bytes(body)


DEEP = b"\x91" * 60_000 + b"\xc0"  # a list in a list, and so on


@pytest.mark.parametrize(
    "question",
    [
        struct.pack("<I", MAX_REQUEST_BYTES + 1) + bytes(100),
        struct.pack("<I", 0xFFFFFFFF),
        struct.pack("<I", len(DEEP)) + DEEP,
        struct.pack("<I", 6) + b"\xdf\xff\xff\xff\xff\xc0",  # a map of 2**32 entries
        framed(["op", "info"]),
        framed({b"op": b"info"})[:-1],
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
)
def test_a_malformed_message_closes_the_connection(cache: Any, path: Path, question: bytes) -> None:
    with connect(path) as connection:
        connection.sendall(question)
        connection.shutdown(socket.SHUT_WR)
        assert hung_up(connection)
    assert send_command(path, "info")["pid"] == os.getpid()


@pytest.mark.parametrize("op", [None, 7, "x" * 500, ["info"], "close", "__class__"])
def test_an_unknown_op_error_lists_the_known_ops(path: Path, op: Any) -> None:
    with connect(path) as connection:
        connection.sendall(framed({"op": op}))
        answer = connection.recv(1 << 16)
    assert "info, stats, events, explain, check, scrub, bypass" in msgpack.unpackb(answer[4:])["error"]
    assert len(answer) < 300  # the question is not repeated whole


@pytest.mark.parametrize(
    ("op", "arguments"),
    [("events", {"count": "all"}), ("events", {"count": -1}), ("bypass", {"mode": ["on"]}), ("bypass", {"mode": 1})],
)
def test_invalid_arguments_are_refused(path: Path, op: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(KVCacheError, match="expected"):
        send_command(path, op, **arguments)
    assert send_command(path, "bypass")["mode"] == "off"


def test_an_unexpected_error_is_answered(
    cache: Any, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(cache, "check", lambda: 1 // 0)
        with pytest.raises(KVCacheError, match="ZeroDivisionError"):
            send_command(path, "check")
    assert "check failed" in caplog.text
    assert not send_command(path, "check")["busy"]


def test_silent_clients_are_disconnected(cache: Any, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(server, "CLIENT_TIMEOUT_S", 1.0)
        with connect(path) as silent, connect(path) as slow:
            slow.sendall(framed({"op": "info"})[:5])
            assert hung_up(silent)
            assert hung_up(slow)
    assert send_command(path, "info")["pid"] == os.getpid()


def test_concurrent_clients_are_bounded(cache: Any, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "CLIENT_TIMEOUT_S", 60.0)
    waiting = [connect(path) for _ in range(server.MAX_CONCURRENT_COMMANDS)]
    with pytest.raises(UnreachableError):
        send_command(path, "info")
    for connection in waiting:
        connection.shutdown(socket.SHUT_WR)
        assert hung_up(connection)
        connection.close()
    assert send_command(path, "info")["pid"] == os.getpid()


@pytest.mark.parametrize(
    "answer",
    [b"", b"\x01", struct.pack("<I", 3) + b"abc", framed({"yes": 1}), framed([1]), struct.pack("<I", 1 << 31)],
)
def test_a_socket_of_another_program_is_ignored(runtime: Path, answer: bytes) -> None:
    runtime.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(os.fspath(runtime / "1-1.sock"))
        listener.listen()

        def reply() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(answer)

        thread = threading.Thread(target=reply)
        thread.start()
        with pytest.raises(UnreachableError):
            send_command(runtime / "1-1.sock", "info")
        thread.join()


def test_the_protocol_equals_its_page(path: Path) -> None:
    """docs/spec/control.md by hand: u32 little-endian, then a map; one question, one answer, then the end."""
    with connect(path) as connection:
        body = b"\x81\xa2op\xa4info"
        connection.sendall(struct.pack("<I", len(body)) + body)
        (size,) = struct.unpack("<I", connection.recv(4, socket.MSG_WAITALL))
        answer = msgpack.unpackb(connection.recv(size, socket.MSG_WAITALL))
        assert hung_up(connection)
    assert set(answer) == {"ok"}
    page = (Path(__file__).parents[2] / "docs" / "spec" / "control.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in page for name in answer["ok"])
