"""The frame of the command: what goes wrong is one line on standard error and an exit code."""

from __future__ import annotations

import subprocess
import sys

import pytest
import typer

import kvcache
from kvcache.cli import main as frame
from kvcache.errors import ClosedError, ConfigError, KVCacheError, ModelError

COMMANDS = (
    "bypass",
    "check",
    "clear",
    "config",
    "daemon",
    "doctor",
    "events",
    "explain",
    "lint",
    "ls",
    "metrics",
    "nvme",
    "object",
    "pin",
    "prune",
    "ps",
    "quota",
    "replay",
    "serve",
    "simulate",
    "size",
    "stats",
    "sync",
    "token",
    "top",
    "unpin",
    "warm",
)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["kvcache", *arguments])
    with pytest.raises(SystemExit) as left:
        frame.main()
    return int(left.value.code or 0)


def failing(error: BaseException) -> typer.Typer:
    app = typer.Typer(pretty_exceptions_enable=False)

    @app.command()
    def fail() -> None:
        raise error

    return app


def test_version_and_help(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"kvcache {kvcache.__version__}\n"
    assert run(monkeypatch, "--help") == 0
    text = capsys.readouterr().out
    for name in COMMANDS:
        assert name in text


def test_an_unknown_subcommand_is_a_usage_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "nonsense") == 2
    assert "nonsense" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (
            ConfigError("host.capacity_bytes = 0: expected\nmore"),
            2,
            "kvcache: host.capacity_bytes = 0: expected more\n",
        ),
        (ModelError("no such model"), 2, "kvcache: no such model\n"),
        (KVCacheError("something"), 2, "kvcache: something\n"),
        (ClosedError("closed"), 1, "kvcache: closed\n"),
        (OSError(98, "Address already in use"), 1, "kvcache: [Errno 98] Address already in use\n"),
        (
            ModuleNotFoundError("No module named 'torch'", name="torch.nn"),
            2,
            "kvcache: this needs torch: pip install 'kvcache-tiers[engine]'\n",
        ),
    ],
)
def test_an_error_is_one_line_and_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, code: int, text: str
) -> None:
    monkeypatch.setattr(frame, "build_app", lambda: failing(error))
    assert run(monkeypatch) == code
    assert capsys.readouterr().err == text


def test_an_unexpected_exception_shows_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (ZeroDivisionError("ours"), ModuleNotFoundError("ours", name="kvcache.nonsense")):
        monkeypatch.setattr(frame, "build_app", lambda error=error: failing(error))
        monkeypatch.setattr(sys, "argv", ["kvcache"])
        with pytest.raises(type(error), match="ours"):
            frame.main()


def test_help_imports_no_heavy_module() -> None:
    script = (
        "import sys\n"
        "from kvcache.cli.main import build_app\n"
        "build_app()\n"
        f"heavy = [name for name in sys.modules if name.split('.')[0] in {sorted(frame.EXTRAS)}]\n"
        "sys.exit(', '.join(heavy) or None)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
