from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from kvcache.cli.main import build_app
from kvcache.daemon.server.auth import Tenants


def test_the_printed_hash_accepts_its_token(tmp_path: Path) -> None:
    token, line = CliRunner().invoke(build_app(), ["token"]).stdout.splitlines()
    path = tmp_path / "tenants"
    path.write_text(f"[acme]\n{line}\n")
    found = Tenants.read(path).by_token(token)
    assert found is not None
    assert found.name == "acme"
    other = json.loads(CliRunner().invoke(build_app(), ["token", "--json"]).stdout)
    assert Tenants.read(path).by_token(other["token"]) is None
