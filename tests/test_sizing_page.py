"""docs/sizing.md shows what `kvcache size` prints, and its table is the arithmetic that it states."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from kvcache.block.layout import Group, KVLayout
from kvcache.cli import main as frame

PAGE = (Path(__file__).parents[1] / "docs" / "sizing.md").read_text(encoding="utf-8")
SHOWN = re.findall(r"^```sh\n(kvcache size [^\n]*)\n```\n\n```text\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
ROWS = re.findall(
    r"^\| ([\w. ]+) \| (\d+) \| (?:(\d+) x (\d+)|latent of (\d+)) \| (.+?) KiB \| (.+?) GiB \|$", PAGE, re.MULTILINE
)


def test_the_page_has_both() -> None:
    assert len(SHOWN) == PAGE.count("```sh\n") == 3
    assert len(ROWS) == 5


@pytest.mark.parametrize(("command", "promised"), SHOWN, ids=[command for command, _ in SHOWN])
def test_the_page_shows_the_commands_output(
    command: str, promised: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys, "argv", shlex.split(command))
    with pytest.raises(SystemExit) as left:
        frame.main()
    assert not left.value.code
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == promised.splitlines()


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_the_table_is_the_arithmetic(row: tuple[str, ...]) -> None:
    _, layers, kv_heads, head_dim, latent, token_kib, context_gib = row
    group = (
        Group(layers=int(layers), head_dim=int(latent), dtype="bf16", kind="mla")
        if latent
        else Group(layers=int(layers), kv_heads=int(kv_heads), head_dim=int(head_dim), dtype="bf16")
    )
    layout = KVLayout((group,), 16)
    assert f"{layout.token_bytes / 1024:.3g}" == token_kib
    assert layout.context_bytes(32_768) / (1 << 30) == pytest.approx(float(context_gib), abs=0.05)
