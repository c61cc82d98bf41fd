"""Passwords of the Redis tier: taken from where they are, refused in words, never shown."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcache.os_env import OsEnv
from kvcache.settings.tiers import RedisSettings
from kvcache.testing.tier import Clock
from kvcache.tier.redis import RedisTier
from kvcache.tier.redis.connect import PASSWORD_VARIABLE
from kvcache.tier.tier import Outcome
from tests.peer.redis_server import MISSING, RedisServer
from tests.tier.blocks import chain, record
from tests.tier.test_redis_faults import until_open
from tests.tier.tier_files import read

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)

NOT_FOUND, DONE, FAILED = Outcome.NOT_FOUND, Outcome.DONE, Outcome.FAILED
SECRET = "not to be seen"


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="module")
def guarded() -> Iterator[RedisServer]:
    server = RedisServer(password=SECRET)
    yield server
    server.end()


@pytest.mark.parametrize("way", ["file", "environment"])
def test_a_password_is_used_and_never_shown(
    guarded: RedisServer, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    url, options = guarded.tcp, {}
    if way == "file":
        (tmp_path / "password").write_text(f"{SECRET}\n")
        options = {"password_file": str(tmp_path / "password")}
    else:
        monkeypatch.setenv(PASSWORD_VARIABLE, SECRET)
    tier = RedisTier(RedisSettings(url=url, **options))  # type: ignore[arg-type]
    (address,) = chain(1)
    assert tier.write([address], [record(address)]) == (DONE,)
    assert tier.remove([address]) == (DONE,)
    said = f"{tier!r} {tier._nodes.pools()[0]._endpoint!r} {caplog.text} {tier.counters}"
    assert SECRET not in said
    assert "%20" not in said
    tier.close()


@pytest.mark.parametrize("password", ["", "wrong-and-secret"])
def test_a_wrong_password_is_a_miss(
    guarded: RedisServer, password: str, clock: Clock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv(PASSWORD_VARIABLE, password)
    tier = RedisTier(RedisSettings(url=guarded.tcp, timeout_s=20), os_env=OsEnv(clock=clock))
    assert until_open(tier, chain(1)[0]) == {FAILED}
    assert caplog.records
    assert "secret" not in caplog.text + repr(tier) + str(tier.counters)
    tier.close()


def test_a_password_in_the_url_is_refused_and_hidden() -> None:
    with pytest.raises(ValueError, match="password_file") as caught:
        RedisSettings(url=f"redis://:{SECRET}@127.0.0.1/0")
    assert SECRET not in str(caught.value)


def test_a_missing_password_file_is_refused(guarded: RedisServer, tmp_path: Path, clock: Clock) -> None:
    """A miss, until it is there: it is read for each connection, so a password can be changed."""
    where = tmp_path / "password"
    tier = RedisTier(RedisSettings(url=guarded.tcp, password_file=str(where)), os_env=OsEnv(clock=clock))
    assert read(tier, chain(1)[0]) is FAILED
    where.write_text(SECRET)
    assert read(tier, chain(1)[0]) is NOT_FOUND
    tier.close()
