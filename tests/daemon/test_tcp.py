"""Daemons of other hosts: who is let in over TCP, and that what comes is what was stored."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvcache
from kvcache.daemon.protocol import PAYLOAD_DTYPE, PROTOCOL_VERSION, pack
from kvcache.daemon.server.admission import Admission
from kvcache.daemon.server.auth import token_hash
from kvcache.daemon.server.slot_lease import hang_up
from kvcache.daemon.server.tcp import TcpListener, parse_host_port
from kvcache.daemon.wire import Wire
from kvcache.errors import AccessError, ConfigError, StoreError, UnreachableError
from kvcache.os_env import SystemClock
from kvcache.settings.sources import load as load_settings
from kvcache.tier.tier import Outcome
from tests.contract.fake_engine import Engine
from tests.daemon.certificate_authority import Authority
from tests.daemon.daemon_process import LAYOUT, DaemonProcess, bound_to, load, store
from tests.daemon.in_process_daemon import PATIENT, InProcessDaemon, until
from tests.daemon.test_tenant import ACME, BETA, everybody, written
from tests.peer.ports import free_port

Make = Callable[..., InProcessDaemon]


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def secure(make_in_process: Make, authority: Authority, tmp_path: Path) -> Make:
    """Daemons that listen with TLS."""
    certificate = authority.sign("daemon", "127.0.0.1", "kv.example")

    def make(**more: Any) -> InProcessDaemon:
        return make_in_process(daemon__listen="127.0.0.1:0", daemon__tls_cert_file=str(certificate), **more)

    return make


def reach(in_process: InProcessDaemon, authority: Authority, token: str = "", **more: Any) -> Any:
    if token:
        file = authority.directory / f"token-{token_hash(token)[7:15]}"
        file.write_text(token)
        more["token_file"] = str(file)
    made = kvcache.open(str(in_process.port), **{"ca_file": str(authority.file), **PATIENT, **more})
    in_process.cleanup.callback(made.close)
    return made


class TestStart:
    """A daemon that would admit any client that reaches it does not start."""

    def settings(self, tmp_path: Path, **more: Any) -> Any:
        return load_settings(
            None, nvme__enabled=False, **{f"daemon__{name}": str(v) for name, v in more.items()}
        ).daemon

    def port(self, settings: Any, *, insecure: bool = False) -> TcpListener:
        return TcpListener(settings, Admission(settings.tenants_file, SystemClock()), insecure=insecure)

    @pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1", "[::]"])
    def test_without_tls_it_is_refused(self, tmp_path: Path, host: str) -> None:
        with pytest.raises(ConfigError, match="without TLS"):
            self.port(self.settings(tmp_path, listen=f"{host}:0", tenants_file=everybody(tmp_path / "t")))

    def test_without_tokens_and_certificates_it_is_refused(self, tmp_path: Path, authority: Authority) -> None:
        given = {"listen": "0.0.0.0:0", "tls_cert_file": authority.sign("d")}
        untokened = written(tmp_path / "untokened", acme={"users": [1]})
        for more in ({}, {"tenants_file": untokened}):
            with pytest.raises(ConfigError, match="any client that reaches it"):
                self.port(self.settings(tmp_path, **given, **more))
        named = written(tmp_path / "named", acme={"certificates": ["acme"]})
        with pytest.raises(ConfigError, match="the daemon requests none"):
            self.port(self.settings(tmp_path, **given, tenants_file=named))
        for more in (
            {"tenants_file": everybody(tmp_path / "t")},
            {"tls_client_ca_file": authority.file},
            {"tenants_file": named, "tls_client_ca_file": authority.file},
        ):
            self.port(self.settings(tmp_path, **given, **more)).close()

    def test_insecure_listens_on_loopback_only(self, tmp_path: Path) -> None:
        for host in ("127.0.0.1", "[::1]", "localhost"):
            self.port(self.settings(tmp_path, listen=f"{host}:0"), insecure=True).close()
        for host in ("0.0.0.0", "[::]", "10.0.0.1", "example.org"):
            with pytest.raises(ConfigError, match="this host alone"):
                self.port(self.settings(tmp_path, listen=f"{host}:0"), insecure=True)

    def test_unusable_files_are_named(self, tmp_path: Path, authority: Authority) -> None:
        given = {"listen": "127.0.0.1:0", "tenants_file": everybody(tmp_path / "t")}
        with pytest.raises(ConfigError, match="tls_cert_file"):
            self.port(self.settings(tmp_path, **given, tls_cert_file=tmp_path / "none"))
        with pytest.raises(ConfigError, match="tls_cert_file"):
            self.port(self.settings(tmp_path, **given, tls_cert_file=authority.file))
        with pytest.raises(ConfigError, match="tls_client_ca_file"):
            self.port(
                self.settings(
                    tmp_path, **given, tls_cert_file=authority.sign("d"), tls_client_ca_file=tmp_path / "none"
                )
            )

    @pytest.mark.parametrize("where", ["", "8090", "host:", ":1", "host:65536", "host:-1", "host:x", "::1"])
    def test_an_address_needs_host_and_port(self, where: str) -> None:
        if where == "::1":
            assert parse_host_port("[::1]:80", "s") == ("::1", 80)
            return
        with pytest.raises(ConfigError, match="HOST:PORT"):
            parse_host_port(where, "s")

    def test_the_command_refuses_an_insecure_address(self, make_daemon: Callable[..., DaemonProcess]) -> None:
        daemon = make_daemon(DAEMON__LISTEN="127.0.0.1:0")
        for words in ((), ("--check-config",)):
            done = daemon.run(*words)
            assert done.returncode == 2
            assert "without TLS" in done.stderr
        done = daemon.run("--insecure-loopback", "--check-config")
        assert "tcp://127.0.0.1:" in done.stdout
        assert done.returncode == 0

    def test_an_occupied_port_is_reported(self, make_daemon: Callable[..., DaemonProcess]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as other:
            daemon = make_daemon(DAEMON__LISTEN=f"127.0.0.1:{other.getsockname()[1]}")
            done = daemon.run("--insecure-loopback")
        assert done.returncode == 2
        assert "daemon.listen" in done.stderr
        assert not daemon.socket.exists()


class TestDoor:
    def test_a_token_authenticates_its_tenant(self, secure: Make, authority: Authority, tmp_path: Path) -> None:
        in_process = secure(daemon__tenants_file=str(everybody(tmp_path / "t")))
        acme, beta = (bound_to(reach(in_process, authority, token)) for token in (ACME, BETA))
        tokens = list(range(32))
        mine = store(acme, tokens, 1)
        assert load(acme, tokens) == mine
        assert load(beta, tokens) == []
        assert load(bound_to(reach(in_process, authority, ACME)), tokens) == mine
        with pytest.raises(AccessError, match="token"):
            reach(in_process, authority, f"{ACME}y")
        with pytest.raises(AccessError, match="KVCACHE_TOKEN"):
            reach(in_process, authority)

    def test_a_certificate_authenticates_its_tenant(self, secure: Make, authority: Authority, tmp_path: Path) -> None:
        path = written(tmp_path / "t", acme={"certificates": ["acme.example"]}, beta={"certificates": ["b"]})
        in_process = secure(daemon__tenants_file=str(path), daemon__tls_client_ca_file=str(authority.file))
        shown = {name: str(authority.sign(*name)) for name in (("x", "acme.example"), ("b",), ("c",))}
        for name, tenant in ((("x", "acme.example"), "acme"), (("b",), "beta")):
            assert bound_to(reach(in_process, authority, cert_file=shown[name])).namespace.tenant == tenant
        with pytest.raises(AccessError, match="certificate"):
            reach(in_process, authority, cert_file=shown["c",])
        (tmp_path / "other").mkdir()
        forged = Authority(tmp_path / "other").sign("x", "acme.example")
        for more in ({"cert_file": str(forged)}, {}):
            with pytest.raises(UnreachableError):
                reach(in_process, authority, **more)

    def test_without_tenants_a_signed_client_is_an_operator(self, secure: Make, authority: Authority) -> None:
        in_process = secure(daemon__tls_client_ca_file=str(authority.file))
        cache = reach(in_process, authority, cert_file=str(authority.sign("ops")))
        assert bound_to(cache, tenant="any").namespace.tenant == "any"

    def test_an_untrusted_daemon_is_not_used(self, secure: Make, authority: Authority, tmp_path: Path) -> None:
        in_process = secure(daemon__tenants_file=str(everybody(tmp_path / "t")))
        with pytest.raises(AccessError, match="not trusted"):
            kvcache.open(str(in_process.port))
        with pytest.raises(AccessError, match="not trusted"):
            reach(in_process, authority, ACME, server_name="other.example")
        assert reach(in_process, authority, ACME, server_name="kv.example").flush(30)

    def test_clients_without_tls_connect_to_loopback_only(self) -> None:
        with pytest.raises(ConfigError, match="tls://"):
            kvcache.open("tcp://10.0.0.1:1")
        with pytest.raises(ConfigError, match="HOST:PORT"):
            kvcache.open("tls://10.0.0.1")
        with pytest.raises(ConfigError, match="ca_file"):
            kvcache.open("tls://127.0.0.1:1", ca_file="/nowhere")
        with pytest.raises(ConfigError, match="a client takes"):
            kvcache.open("tcp://127.0.0.1:1", ca_file="/nowhere")
        with pytest.raises(UnreachableError, match="is `kvcache daemon` running"):
            kvcache.open(f"tcp://127.0.0.1:{free_port()}")

    def test_a_client_without_tls_is_disconnected(self, secure: Make, authority: Authority, tmp_path: Path) -> None:
        in_process = secure(daemon__tenants_file=str(everybody(tmp_path / "t")))
        for said in (
            pack({"op": "hello", "version": PROTOCOL_VERSION, "role": "control"}),
            b"GET / HTTP/1.1\r\n\r\n",
            b"\x16\3\1",
        ):
            with socket.create_connection(("127.0.0.1", in_process.port.number), 30) as raw, suppress(ConnectionError):
                raw.sendall(said)
                with suppress(OSError):  # it may have hung up already
                    raw.shutdown(socket.SHUT_WR)
                while raw.recv(4096):
                    pass
        assert reach(in_process, authority, ACME).flush(30)

    def test_an_unauthenticated_hello_is_bounded(self, secure: Make, authority: Authority, tmp_path: Path) -> None:
        in_process = secure(daemon__tenants_file=str(everybody(tmp_path / "t")))
        context = ssl.create_default_context(cafile=str(authority.file))
        raw = socket.create_connection(("127.0.0.1", in_process.port.number), 30)
        wire = Wire(context.wrap_socket(raw, server_hostname="127.0.0.1"), accepts_descriptors=False)
        wire.send_bytes([(1 << 20).to_bytes(4, "little")])
        message, _ = wire.receive(30)
        assert message["error"] == "protocol"
        wire.close()


class TestBytes:
    def test_a_transfer_larger_than_a_batch_is_complete(self, tcp_daemon: InProcessDaemon) -> None:
        """More than a window, over several connections at once."""
        cache = tcp_daemon.open_tcp(threads=3)
        tokens = [list(range(100 * i, 100 * i + 64)) for i in range(3)]
        handle = bound_to(cache)
        stored = [store(handle, each, i) for i, each in enumerate(tokens)]
        engine = [Engine(LAYOUT) for _ in tokens]
        transfers = []
        for each, its in zip(tokens, engine, strict=True):
            r = handle.request()
            hit = r.match(each)
            assert hit.blocks == 16
            transfers.append(r.load(16, its.described, its.ids(list(range(16)))))
        assert all(t.wait(60) for t in transfers)
        assert [[its.block(i) for i in range(16)] for its in engine] == stored

    @pytest.mark.parametrize("at_once", [1, 3, 8])
    @pytest.mark.parametrize("bad", [0, 3, 7])
    def test_a_byte_changed_in_transit_is_a_miss(
        self, tcp_daemon: InProcessDaemon, monkeypatch: pytest.MonkeyPatch, bad: int, at_once: int
    ) -> None:
        """Wherever in a message it is, what is called done is in its page, and no other page was written."""
        from kvcache.daemon.server import slot_lease as streamer

        cache = tcp_daemon.open_tcp()
        handle, tokens = bound_to(cache), list(range(32))
        stored = store(handle, tokens, 1)
        true = streamer.SocketTransport._rows

        def lying(self: Any, batch: Any, payloads: Any = ()) -> np.ndarray:
            rows = true(self, batch, payloads)
            rows["sum"][rows["block"] == bad] ^= np.uint64(1)
            return rows

        def few(parts: Any) -> Any:
            return (parts[i : i + at_once] for i in range(0, len(parts), at_once))

        monkeypatch.setattr(streamer.SocketTransport, "_rows", lying)
        monkeypatch.setattr(streamer, "payload_batches", few)
        engine = Engine(LAYOUT)
        engine.poison()
        before = engine.block(0)
        with handle.request() as r:
            assert r.match(tokens).blocks == 8
            transfer = r.load(8, engine.described, engine.ids(list(range(8))))
            assert transfer.wait(60)
        assert transfer.outcomes == (Outcome.DONE,) * bad + (Outcome.DAMAGED,) * (8 - bad)
        assert [engine.block(i) for i in range(8)] == stored[:bad] + [before] * (8 - bad)
        monkeypatch.undo()
        assert load(handle, tokens) == stored, "the connection goes on"

    def test_a_store_changed_in_transit_is_refused(
        self, tcp_daemon: InProcessDaemon, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from kvcache.daemon.client import transfer as carrier

        cache = tcp_daemon.open_tcp()
        handle, tokens, engine = bound_to(cache), list(range(32)), Engine(LAYOUT)
        monkeypatch.setattr(carrier.PayloadBatch, "packed_sums", lambda self: bytes(8 * len(self.payloads)))
        with handle.request() as r:
            r.match(tokens)
            transfer = r.store(engine.described, engine.ids(list(range(8))))
            assert transfer.wait(60)
            assert transfer.blocks == 0
            assert r.match().blocks == 0
        monkeypatch.undo()
        assert cache.wait_reachable(60)
        expected = store(handle, tokens, 1)
        assert load(handle, tokens) == expected

    def test_a_daemons_answers_are_checked(self) -> None:
        from kvcache.daemon.client.transfer import parse_payload_rows
        from kvcache.daemon.protocol import ProtocolError

        good = np.array([(0, 0, 0, 64, 0), (1, 0, 0, 64, 0)], PAYLOAD_DTYPE)
        rows, size = parse_payload_rows(good.tobytes(), blocks=2, sizes=[64])
        assert len(rows) == 2
        assert size == 2 * 8192
        for field, value in (("block", 2), ("group", 1), ("bytes", 65), ("bytes", 1 << 63)):
            bad = good.copy()
            bad[field][1] = value
            with pytest.raises(ProtocolError):
                parse_payload_rows(bad.tobytes(), blocks=2, sizes=[64])
        for nonsense in (b"", b"x", None, "text", 7, [1]):
            with pytest.raises(ProtocolError):
                parse_payload_rows(nonsense, blocks=2, sizes=[64])
        with pytest.raises(ProtocolError, match="behind one message"):
            parse_payload_rows(np.zeros(4096, PAYLOAD_DTYPE).tobytes(), blocks=2, sizes=[0])


def test_a_disconnected_client_leaves_nothing(tcp_daemon: InProcessDaemon) -> None:
    """It hangs up in the middle of a store: its slots are free again."""
    cache = tcp_daemon.open_tcp()
    handle = bound_to(cache)
    with handle.request() as r:
        r.match(list(range(32)))
        with cache.connected() as connection:
            number = r.number(connection)
        with suppress(ConnectionAbortedError), connection.transfer_wire(30) as wire:
            wire.send({"op": "store", "request": number, "first": 0, "end": 8}, timeout_s=30)
            message, _ = wire.receive(30)
            assert "wanted" in message
            wire.send({"taken": True, "sums": bytes(64)}, timeout_s=30)
            wire.send_bytes([b"half"], timeout_s=30)
            raise ConnectionAbortedError
        until(lambda: tcp_daemon.leaked_slots == 0)
        assert r.match().blocks == 0
    assert load(handle, list(range(32))) == []


def test_a_closed_port_can_be_bound_again(make_daemon: Callable[..., DaemonProcess]) -> None:
    daemon = make_daemon(DAEMON__LISTEN=f"127.0.0.1:{free_port()}")
    for _ in range(2):
        daemon.start("--insecure-loopback")
        with kvcache.open(f"tcp://{daemon.environ['KVCACHE_DAEMON__LISTEN']}", **PATIENT) as cache:
            assert len(store(bound_to(cache), list(range(16)), 1)) == 4
        assert daemon.terminate()[0] == 0


def test_an_occupied_port_is_refused(make_in_process: Make) -> None:
    first = make_in_process(daemon__listen="127.0.0.1:0", insecure=True)
    settings = first.cache.settings.daemon.model_copy(update={"listen": f"127.0.0.1:{first.port.number}"})
    second = TcpListener(settings, Admission("", SystemClock()), insecure=True)
    with pytest.raises(StoreError, match="in use"):
        second.listen()
    second.close()


def test_a_closed_client_gets_no_plaintext(secure: Make, authority: Authority, tmp_path: Path) -> None:
    """A thread that sends meanwhile must meet the end of the connection, not the socket below TLS."""
    in_process = secure(daemon__tenants_file=str(everybody(tmp_path / "t")))
    context = ssl.create_default_context(cafile=str(authority.file))
    raw = socket.create_connection(("127.0.0.1", in_process.port.number), 30)
    with context.wrap_socket(raw, server_hostname="127.0.0.1") as connection:
        hang_up(connection)
        assert connection.version() is not None, "it has forgotten that it speaks TLS"
        with pytest.raises((BrokenPipeError, ssl.SSLError)):
            connection.sendall(b"in the clear")
