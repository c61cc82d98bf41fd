"""`kvcache doctor`: what it says of machines that are well and of others, and what it never tells anybody."""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Callable
from contextlib import closing
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import kvcache
from kvcache.cache.cache import Cache
from kvcache.cli.doctor import bundle as secrets
from kvcache.cli.doctor import machine as memory
from kvcache.cli.doctor import machine as room
from kvcache.cli.doctor import machine as software
from kvcache.cli.doctor import storage as drive
from kvcache.cli.doctor import storage as trip
from kvcache.cli.doctor.machine import Finding
from kvcache.machine import Memory
from kvcache.os_env import File, LocalDisk, SystemClock
from kvcache.settings.sources import load
from kvcache.settings.types import GiB, MiB
from tests.peer.redis_server import MISSING, RedisServer

KiB = 1 << 10
Kv = Callable[..., tuple[int, str, str]]


@pytest.fixture
def kv(kv: Kv, monkeypatch: pytest.MonkeyPatch, runtime: Path) -> Kv:
    """With a short drive test."""
    monkeypatch.setattr(drive, "MAX_TEST_BYTES", 16 * MiB)
    return kv


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "kvcache.toml"
    file.write_text(
        '[host]\ncapacity_bytes = "16MiB"\n'
        f'[nvme]\npath = "{tmp_path}/drive/nvme"\ncapacity_bytes = "64MiB"\nmin_free_bytes = 0\n'
    )
    return file


def test_doctor_lists_each_check_of_a_healthy_machine(kv: Kv, file: Path, tmp_path: Path) -> None:
    code, out, err = kv("doctor", str(file))
    assert (code, err) == (0, "")
    lines = [line for line in out.splitlines() if not line.startswith(" ")]
    assert all(line.split()[0] in {"ok", "warn"} for line in lines)
    for name in ("native core", "memory", "locked memory", "shared memory", "drive", "write rate", "read rate"):
        assert any(line[6:].startswith(name) for line in lines), name
    for name in ("store", "load from host", "load from nvme"):
        assert any(line.startswith(f"ok    {name}") and "16 blocks" in line for line in lines), out
    assert list((tmp_path / "drive").iterdir()) == [], "the doctor left something behind"


def test_doctor_prints_json(kv: Kv, file: Path) -> None:
    for option in (("-o", "json"), ("--json",)):
        code, out, _ = kv("doctor", str(file), *option)
        findings = [Finding(**row) for row in json.loads(out)]
        assert code == 0
        assert all(finding.remedy for finding in findings if finding.state != "ok")
        assert {"store", "load from host", "load from nvme", "transformers"} <= {finding.name for finding in findings}


def test_a_disabled_drive_is_not_checked(kv: Kv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCACHE_NVME__ENABLED", "false")
    monkeypatch.setenv("KVCACHE_HOST__CAPACITY_BYTES", "16MiB")
    code, out, _ = kv("doctor")
    assert (code, "rate" in out, "load from host" in out, "load from nvme" in out) == (0, False, True, False)


def test_a_drive_that_loses_writes_fails(kv: Kv, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(settings: Any) -> Cache:
        for segment in settings.nvme.path.glob("segment-*"):  # none at the first opening
            data = bytearray(segment.read_bytes())
            data[6000] ^= 1
            segment.write_bytes(data)
        return Cache(settings)

    monkeypatch.setattr(trip, "Cache", opened)
    code, out, _ = kv("doctor", str(file))
    assert code == 1
    (line,) = [line for line in out.splitlines() if line.startswith("fail")]
    assert "load from nvme" in line
    assert "damaged in nvme" in line


def test_wrong_settings_do_not_stop_other_checks(kv: Kv, file: Path) -> None:
    file.write_text("chunk_size = 256\n")
    code, out, err = kv("doctor", str(file))
    assert (code, err) == (1, "")
    assert "fail  settings" in out
    assert "here it is block_tokens" in out
    assert "ok    running caches" in out


def test_an_impossible_directory_is_a_finding(kv: Kv, file: Path, tmp_path: Path) -> None:
    (tmp_path / "drive").write_text("a file where the directory should be")
    code, out, _ = kv("doctor", str(file))
    assert (code, "fail  directory" in out, "ok    memory" in out) == (1, True, True)


def test_a_broken_check_does_not_stop_other_checks(kv: Kv, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "memory", lambda: 1 // 0)
    code, out, _ = kv("doctor", str(file))
    assert (code, "fail  memory" in out, "ZeroDivisionError" in out, "load from nvme" in out) == (1, True, True, True)


def test_a_bypassed_running_cache_is_a_warning(kv: Kv, file: Path) -> None:
    with closing(kvcache.open(host__capacity_bytes="1MiB", nvme__enabled=False)) as cache:
        cache.bypass.set("loads")  # type: ignore[attr-defined]
        findings = {row["name"]: row for row in json.loads(kv("doctor", str(file), "--json")[1])}
    address = f"{os.getpid()}-1"
    assert address in findings["running caches"]["found"]
    assert (findings[address]["state"], findings[address]["found"]) == ("warn", "bypassed: loads")
    assert "kvcache bypass off" in findings[address]["remedy"]


@pytest.mark.parametrize(
    ("found", "state"),
    [
        (memory.host_capacity(Memory(8 * GiB, 4 * GiB, "machine"), 2 * GiB), "ok"),
        (memory.host_capacity(Memory(8 * GiB, 4 * GiB, "machine"), 5 * GiB), "warn"),
        (memory.host_capacity(Memory(8 * GiB, 4 * GiB, "cgroup"), 9 * GiB), "fail"),
        (memory.locked_memory(None, GiB), "ok"),
        (memory.locked_memory(GiB, GiB), "ok"),
        (memory.locked_memory(8 * MiB, GiB), "warn"),
        (memory.shared_memory(None), "warn"),
        (memory.shared_memory(64 * MiB), "warn"),
        (memory.shared_memory(GiB), "ok"),
        (drive.drive_kind("ext4", False, Path("/d")), "ok"),
        (drive.drive_kind("", False, Path("/d")), "ok"),
        (drive.drive_kind("tmpfs", True, Path("/d")), "warn"),
        (drive.drive_kind("overlay", False, Path("/d")), "warn"),
        (drive.drive_kind("nfs4", False, Path("/d")), "warn"),
        (drive.drive_kind("fuse.sshfs", False, Path("/d")), "warn"),
        (software.native_core(True), "ok"),
        (software.native_core(False), "warn"),
    ],
)
def test_each_state_of_a_machine(found: Finding, state: str) -> None:
    assert found.state == state
    assert bool(found.remedy) == (state != "ok")


class Clock(SystemClock):
    """Each look at it takes so long."""

    def __init__(self, step_s: float) -> None:
        self.time, self.step_s = 0.0, step_s

    def now(self) -> float:
        self.time += self.step_s
        return self.time


class Disk(LocalDisk):
    def __init__(self, free: int = GiB, direct: bool = True) -> None:
        self.free, self.direct = free, direct

    def free_bytes(self, path: str) -> int:
        return self.free

    def open(self, path: str, *, create: bool = False, direct: bool = False) -> File:
        return super().open(path, create=create, direct=direct and self.direct)


def rated(place: Path, disk: Disk, step_s: float, floor: int = 0) -> dict[str, Finding]:
    found = {finding.name: finding for finding in drive.drive_rates(disk, Clock(step_s), place, floor)}
    assert list(place.iterdir()) == []
    return found


def test_doctor_reports_the_drives_rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drive, "MAX_TEST_BYTES", 16 * MiB)
    buffered = rated(tmp_path, Disk(direct=False), 0.001)
    assert (buffered["O_DIRECT"].state, buffered["read rate"].state) == ("warn", "warn")
    direct = LocalDisk().open(str(tmp_path / "probe"), create=True, direct=True)
    direct.close()
    (tmp_path / "probe").unlink()
    if not direct.direct:
        pytest.skip("this file system has no O_DIRECT")
    fast, slow = rated(tmp_path, Disk(), 0.001), rated(tmp_path, Disk(), 0.02)
    assert (fast["O_DIRECT"].state, fast["read rate"].state) == ("ok", "ok")
    assert "16 MiB" in fast["write rate"].found
    assert slow["read rate"].state == "warn"
    stuck = rated(tmp_path, Disk(), drive.MAX_TEST_S + 1)
    assert "(4 MiB)" in stuck["write rate"].found, "a drive that hangs is not written to the end"


def test_a_full_drive_is_not_filled_further(tmp_path: Path) -> None:
    for free, floor in ((20 * MiB, 0), (2 * GiB, 2 * GiB), (0, GiB)):
        found = rated(tmp_path, Disk(free), 0.001, floor)
        assert set(found) == {"drive rate"}
        assert found["drive rate"].state == "fail"
    assert "(100 MiB)" in rated(tmp_path, Disk(200 * MiB), 0.001)["write rate"].found, "half of what is free at most"


def test_software_is_found_by_its_distribution_name() -> None:
    there = {"cupy-cuda12x": "13.4.1", "vllm": "0.11.0"}

    def version(name: str) -> str:
        if name not in there:
            raise metadata.PackageNotFoundError(name)
        return there[name]

    found = {finding.name: finding.found for finding in software.check_software(version)}
    assert (found["cupy"], found["vllm"], found["sglang"]) == ("13.4.1", "0.11.0", "not installed")
    assert {"cupy": "13.4.1", "vllm": "0.11.0"}.items() <= software.versions(version).items()
    assert "numpy" not in software.versions(version)


def test_doctor_reports_the_tokens_that_fit(tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 64,
        "max_position_embeddings": 4096,
        "torch_dtype": "float16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    record = 2 * 2 * 2 * 16 * 2 * 16 + 4 * KiB  # layers, K and V, heads, head size, bytes; tokens; header

    def found(capacity: str) -> Finding:
        host = {"capacity_bytes": capacity, "slab_bytes": "4KiB"}
        findings = {
            f.name: f for f in room.check_model_capacity(load(environ={}, host=host, nvme={"enabled": False}), tmp_path)
        }
        assert set(findings) == {"model", "room in host"}
        return findings["room in host"]

    assert f"{(4 * MiB // record) * 16:,} tokens" in found("4MiB").found
    assert found("4MiB").state == "ok"
    assert (found("64KiB").state, "4,096" in found("64KiB").remedy) == ("warn", True)


def test_an_invalid_model_is_a_finding(kv: Kv, file: Path, tmp_path: Path) -> None:
    code, out, _ = kv("doctor", str(file), "--model", str(tmp_path / "nowhere"))
    assert (code, "fail  model_capacity" in out, "load from nvme" in out) == (1, True, True)


# what is never told


@pytest.mark.parametrize(
    "name",
    [
        "redis.password", "HF_TOKEN", "api_key", "apiKey", "x-api-key", "APIKEY", "aws_secret_access_key", "cache_salt",
        "Authorization", "tls.private_key", "credentials", "sentry_dsn", "secret_path", "PGPASSWORD_PWD",
    ],
)  # fmt: skip
def test_secret_field_names_are_redacted(name: str) -> None:
    assert secrets.is_secret(name)


@pytest.mark.parametrize(
    "name",
    ["block_tokens", "asked_tokens", "monkey", "host.capacity_bytes", "path", "keyboard", "", "author", "tokens"],
)
def test_harmless_field_names_are_not_redacted(name: str) -> None:
    assert not secrets.is_secret(name)


SECRET = st.text("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.+/=", min_size=8, max_size=40)
TEXTS = [
    "redis://:{}@cache:6379/0",
    "see https://user:{}@host/path for more",
    "https://bucket/object?X-Signature={}&X-Date=1",
    "redis.password = '{}' (from kvcache.toml): no such setting",
    'api_key: "{}"',
    "HF_TOKEN={}",
    "--token {} --port 80",
    "Authorization: Bearer {}",
    "token={};",
    '{{"secret": "{}"}}',
    "-----BEGIN RSA PRIVATE KEY-----\n{}\n-----END RSA PRIVATE KEY-----",
]


@given(SECRET, st.sampled_from(TEXTS))
def test_secrets_are_redacted_in_any_text(secret: str, text: str) -> None:
    assume(secret not in text and not secret.startswith(("-", ".", "=", "+", "/")))
    told = secrets.redact({"found": [text.format(secret)]})
    assert secret not in json.dumps(told)
    assert secrets.REDACTED in json.dumps(told)


@given(st.text("abcdefghijKLMNOP0123456789", min_size=16, max_size=40))
def test_well_known_key_prefixes_are_redacted(rest: str) -> None:
    for begin in ("hf_", "sk-", "ghp_", "github_pat_", "AKIA", "eyJhbGciOiJI.eyJz."):
        assert secrets.redact(f"found {begin}{rest}, and left") == "found ***, and left"


@given(SECRET, st.recursive(st.text(max_size=5), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_a_known_secret_is_found_anywhere(secret: str, tree: Any) -> None:
    """Whatever form it is in: in a list, a map's name, within a longer text."""
    value = {"a": tree, "deep": [{"x" + secret: f"before {secret} behind"}, (secret,)]}
    assume(secret not in json.dumps(tree) and secret not in secrets.REDACTED)
    assert secret not in json.dumps(secrets.redact(value, [secret]))


def test_harmless_text_is_not_redacted() -> None:
    value = {
        "host.capacity_bytes": {"value": 17179869184, "origin": "KVCACHE_HOST__CAPACITY_BYTES"},
        "counters": {"asked_tokens": 40, "drops": {"no room": 3}},
        "found": "asked for 40 tokens in 2 requests; key and value of block 3; /home/a/.cache/kvcache at http://host/path",
        "none": None,
        "flag": True,
    }
    assert secrets.redact(value) == value


def test_a_bundle_is_complete_and_holds_no_secret(
    kv: Kv, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = ["hf-token-of-mine", "s3cr3t-of-redis", "pw0rd-of-hub", "salt-of-tenant", "key-in-id-77"]
    monkeypatch.setenv("HF_TOKEN", hidden[0])
    monkeypatch.setenv("SOME_API_KEY", hidden[4])
    monkeypatch.setenv("KVCACHE_LOG__LEVEL", "error")
    target = tmp_path / "bundle.tar.gz"
    with closing(kvcache.open(host__capacity_bytes="1MiB", nvme__enabled=False)) as cache:
        layout = kvcache.KVLayout.mha(layers=1, kv_heads=1, head_dim=8, dtype="fp32")
        handle = cache.namespace(
            layout, model=f"https://me:{hidden[2]}@hub/model", revision=hidden[0], cache_salt=hidden[3]
        )
        cache.bypass.set("stores")  # type: ignore[attr-defined]
        pages = [kvcache.GroupPages.from_tensors(layout, np.zeros((1, 2, 4, 16, 1, 8), np.float32), axes=trip.AXES)]
        with handle.request(id=f"request {hidden[4]}") as r:
            r.match(range(64))
            r.store(pages, [[0, 1, 2, 3]])
        told = members(kv, target, str(file))
        assert [entry["events"][0]["reason"] for entry in told["running.json"]] == ["bypass"]
        monkeypatch.setenv("KVCACHE_REDIS__PASSWORD", hidden[1])
        refused = members(kv, target, str(file))
    assert target.stat().st_mode & 0o777 == 0o600
    everything = json.dumps([told, refused])
    assert [secret for secret in hidden if secret in everything] == []
    assert set(told) == {"doctor.json", "settings.json", "environment.json", "versions.json", "running.json"}
    assert told["settings.json"]["host.capacity_bytes"] == {"value": 16 * MiB, "origin": str(file)}
    assert told["environment.json"]["KVCACHE_LOG__LEVEL"] == "error"
    assert told["versions.json"]["kvcache"] == kvcache.__version__
    assert told["running.json"][0]["info"]["models"] == ["https://***@hub/model"]
    assert "load from nvme" in {row["name"] for row in told["doctor.json"]}
    (settings,) = [row for row in refused["doctor.json"] if row["name"] == "settings"]
    assert (settings["state"], secrets.REDACTED in settings["found"]) == ("fail", True)
    assert refused["environment.json"]["KVCACHE_REDIS__PASSWORD"] == secrets.REDACTED


def members(kv: Kv, target: Path, settings: str) -> dict[str, Any]:
    kv("doctor", settings, "--bundle", str(target), "--json")
    with tarfile.open(target) as archive:
        found = {}
        for member in archive.getmembers():
            part = archive.extractfile(member)
            assert part is not None
            found[member.name.removeprefix("kvcache-bundle/")] = json.loads(part.read())
        return found


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
def test_checking_a_redis_server_changes_nothing(kv: Kv, file: Path) -> None:
    server = RedisServer("--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru")
    try:
        file.write_text(f'{file.read_text()}[redis]\nenabled = true\nurl = "{server.unix}"\n')
        code, out, _ = kv("doctor", str(file))
        assert (code, "maxmemory-policy is allkeys-lru" in out, "wrote and read 1 MiB" in out) == (0, True, True)
        assert server.client.dbsize() == 0
        server.client.config_set("maxmemory-policy", "noeviction")
        assert "CONFIG SET maxmemory-policy" in kv("doctor", str(file))[1]
        server.client.config_set("maxmemory", 0)
        assert "maxmemory is not set" in kv("doctor", str(file))[1]
        server.stop()
        code, out, _ = kv("doctor", str(file))
        assert code == 1
        assert "FileNotFoundError" in out or "ConnectionRefusedError" in out
    finally:
        server.end()


def test_checking_an_object_store_changes_nothing(kv: Kv, file: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    file.write_text(f'{file.read_text()}[object]\nenabled = true\nurl = "file://{store}"\n')
    code, out, _ = kv("doctor", str(file))
    assert (code, "ok    object trip      wrote and read 1 MiB" in out) == (0, True)
    assert [path for path in store.rglob("*") if path.is_file()] == []
    (tmp_path / "keys").write_text("access_key_id = x\nsecret_access_key = y\n")
    away = f'url = "s3://b"\nendpoint = "http://127.0.0.1:1"\ncredentials_file = "{tmp_path}/keys"\ntimeout_s = 1\n'
    file.write_text(file.read_text().replace(f'url = "file://{store}"\n', away))
    code, out, _ = kv("doctor", str(file))
    assert (code, "fail  object trip" in out, "load from nvme" in out) == (1, True, True)
