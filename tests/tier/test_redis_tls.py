"""The Redis tier over TLS, with users of a real server: let in, kept out, and never told apart from a miss."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvcache.errors import ConfigError
from kvcache.os_env import OsEnv
from kvcache.settings.tiers import RedisSettings
from kvcache.testing.tier import Clock
from kvcache.tier.redis import RedisTier
from kvcache.tier.redis.connect import PASSWORD_VARIABLE
from kvcache.tier.tier import Outcome
from tests.peer.certificates import OPENSSL, authority, certificate
from tests.peer.ports import free_port
from tests.peer.redis_server import MISSING, RedisServer, with_tls
from tests.tier.blocks import buffer, chain, holds, record
from tests.tier.test_redis_cluster import read, write
from tests.tier.test_redis_faults import until_open

DONE, NOT_FOUND, FAILED = Outcome.DONE, Outcome.NOT_FOUND, Outcome.FAILED
SPEAKS = with_tls() if not MISSING else None

pytestmark = [
    pytest.mark.skipif(OPENSSL is None, reason="no openssl command to make certificates"),
    pytest.mark.skipif(SPEAKS is None, reason="no server that speaks TLS: apt-get install redis-server"),
]


@dataclass
class Encrypted:
    server: RedisServer
    url: str
    ca: Path
    ours: tuple[Path, Path]
    other_ca: Path

    def open(self, **settings: Any) -> RedisTier:
        return RedisTier(RedisSettings(url=self.url, **{"tls_ca_file": str(self.ca), "timeout_s": 20, **settings}))


@pytest.fixture(scope="module")
def encrypted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Encrypted]:
    made = tmp_path_factory.mktemp("tls")
    ca, other = authority(made / "one"), authority(made / "other")
    cert, key = certificate(ca, "server")
    port = free_port()
    files = ["--tls-cert-file", str(cert), "--tls-key-file", str(key), "--tls-ca-cert-file", str(ca)]
    server = RedisServer("--tls-port", str(port), *files, "--tls-auth-clients", "optional", binary=SPEAKS)
    yield Encrypted(server, f"rediss://127.0.0.1:{port}/0", ca, certificate(ca, "client"), other)
    server.end()


@pytest.fixture(autouse=True)
def no_password(monkeypatch: pytest.MonkeyPatch, encrypted: Encrypted) -> None:
    monkeypatch.delenv(PASSWORD_VARIABLE, raising=False)
    encrypted.server.client.flushall()


def test_blocks_are_sent_over_tls(encrypted: Encrypted) -> None:
    tier = encrypted.open()
    blocks = chain(30)
    assert write(tier, blocks) == (DONE,) * 30
    assert read(tier, blocks) == (DONE,) * 30
    assert tier.match_prefix(blocks).result(10) == 30
    assert tier.match_prefix(blocks).result(10) == 30
    large = chain(2, seed=1)
    into = [buffer(6 << 20) for _ in large]
    assert tier.write(large, [record(address, 6 << 20) for address in large]) == (DONE,) * 2
    assert tier.read(large, into) == (DONE,) * 2
    assert all(holds(segments, address, 6 << 20) for segments, address in zip(into, large, strict=True))
    tier.close()


def test_a_client_certificate_is_sent_if_configured(encrypted: Encrypted) -> None:
    encrypted.server.client.config_set("tls-auth-clients", "yes")
    try:
        tier = encrypted.open()
        assert set(read(tier, chain(1))) <= {FAILED}
        tier.close()
        cert, key = map(str, encrypted.ours)
        tier = encrypted.open(tls_cert_file=cert, tls_key_file=key)
        assert write(tier, chain(2)) == (DONE,) * 2
        tier.close()
    finally:
        encrypted.server.client.config_set("tls-auth-clients", "optional")


@pytest.mark.parametrize("wrong", ["authority", "host", "plain"])
def test_an_untrusted_peer_is_a_miss(encrypted: Encrypted, wrong: str, caplog: Any) -> None:
    url, ca, clock = encrypted.url, encrypted.ca, Clock()
    if wrong == "authority":
        ca = encrypted.other_ca
    elif wrong == "host":
        url = url.replace("127.0.0.1", "localhost")
    else:
        url = url.replace("rediss:", "redis:")
    settings = {} if wrong == "plain" else {"tls_ca_file": str(ca)}
    tier = RedisTier(RedisSettings(url=url, **settings, timeout_s=20), os_env=OsEnv(clock=clock))  # type: ignore[arg-type]
    assert until_open(tier, chain(1)[0]) == {FAILED}
    assert caplog.records
    assert encrypted.server.client.dbsize() == 0
    tier.close()


def test_tls_files_without_tls_are_refused() -> None:
    with pytest.raises(ConfigError, match="rediss"):
        RedisTier(RedisSettings(url="redis://localhost", tls_ca_file="/somewhere"))


def test_the_documented_acl_is_enough(encrypted: Encrypted, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """`docs/spec/redis.md` says which commands are needed: a user who has no others can do everything."""
    caplog.set_level(logging.DEBUG)
    (tmp_path / "password").write_text("not to be seen")
    client = encrypted.server.client
    rights = (
        "~kvcache:* -@all +get +getrange +set +strlen +unlink +eval +scan +dbsize +info +client +hello +auth +select"
    )
    client.execute_command("ACL", "SETUSER", "engine", "on", ">not to be seen", *rights.split())
    client.execute_command("ACL", "SETUSER", "guest", "on", ">other", "~kvcache:*", "-@all", "+get", "+getrange")
    try:
        tier = encrypted.open(username="engine", password_file=str(tmp_path / "password"))
        blocks = chain(10)
        assert write(tier, blocks) == (DONE,) * 10
        assert read(tier, blocks) == (DONE,) * 10
        assert tier.match_prefix(blocks).result(10) == 10
        assert list(tier.scan()) == blocks
        assert tier.check() == []
        assert tier.usage().records == 10
        assert tier.remove(blocks[5:]) == (DONE,) * 5
        assert "refused" not in tier.counters
        assert "not to be seen" not in f"{tier!r} {caplog.text} {tier.counters}"
        tier.close()
        elsewhere = encrypted.open(username="engine", password_file=str(tmp_path / "password"), prefix="others")
        assert write(elsewhere, blocks) == (FAILED,) * 10
        assert elsewhere.counters["faults_NOPERM"] > 0
        elsewhere.close()
        (tmp_path / "password").write_text("other")
        guest = encrypted.open(username="guest", password_file=str(tmp_path / "password"))
        assert read(guest, blocks) == (DONE,) * 5 + (NOT_FOUND,) * 5
        assert set(write(guest, chain(2, seed=3))) == {FAILED}
        guest.close()
    finally:
        client.execute_command("ACL", "DELUSER", "engine", "guest")
