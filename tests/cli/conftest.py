"""The command as a shell calls it."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from kvcache.cli import main as frame


@pytest.fixture
def kv(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs the command; gives its exit code, what it printed, and what it said beside."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["kvcache", *arguments])
        with pytest.raises(SystemExit) as left:
            frame.main()
        said = capsys.readouterr()
        return int(left.value.code or 0), said.out, said.err

    return run
