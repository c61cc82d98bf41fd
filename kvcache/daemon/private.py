"""A daemon of one engine alone, for engines whose scheduler and workers are several processes.

    where = find_or_start(engine_id, host__capacity_bytes="8GiB")
    cache = kvcache.open(where)

Whichever process of the engine comes first starts it, the others find it by the engine's id. It ends when the engine
does: once none of its processes has been connected for a while. Nobody has to run anything to begin with.
"""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from kvcache.config import load
from kvcache.daemon.address import SCHEME
from kvcache.daemon.control.place import prepare
from kvcache.errors import StoreError
from kvcache.settings import TABLE

LINGER_S = 10.0
"""Between the last connection and the end; the first one has a minute to come."""
START_S = 60.0
"""For a daemon to read its journal and listen, at most."""
_LOOK_S = 0.02
_STEM = "engine-"


def find_or_start(
    engine: str,
    settings_file: str | os.PathLike[str] | None = None,
    *,
    linger_s: float = LINGER_S,
    timeout_s: float = START_S,
    environ: Mapping[str, str] = os.environ,
    **settings: Any,
) -> str:
    """Where `kvcache.open` reaches the daemon of this engine, which answers when this returns.

    `settings` and the file are as for `kvcache.open`; those of the process that starts it hold. ConfigError for one
    that makes no sense, StoreError with the daemon's own words where it does not start.
    """
    load(settings_file, environ, **settings)
    path = socket_path(engine, environ)
    if answers(path):
        return f"{SCHEME}{path}"
    with _starting(path.parent):
        if not answers(path):
            _sweep(path.parent)
            _start(path, settings_file, linger_s, timeout_s, {**environ, **variables(settings)})
    return f"{SCHEME}{path}"


def socket_path(engine: str, environ: Mapping[str, str] = os.environ) -> Path:
    return prepare(environ) / f"{_STEM}{sha256(engine.encode()).hexdigest()[:16]}.socket"


def answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(os.fspath(path))
        except OSError:
            return False
    return True


def variables(settings: Mapping[str, Any]) -> dict[str, str]:
    """Keywords of `kvcache.open` as variables of a process's environment."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            flat.update({f"{name}.{inner}": of_it for inner, of_it in value.items()})
        else:
            flat[name.replace("__", ".")] = value
    return {
        TABLE[name].variable: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in flat.items()
    }


@contextmanager
def _starting(directory: Path) -> Iterator[None]:
    """One process starts a daemon at a time; the system lets go of the lock when that process ends."""
    descriptor = os.open(directory / f"{_STEM}start.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _start(
    path: Path,
    settings_file: str | os.PathLike[str] | None,
    linger_s: float,
    timeout_s: float,
    environ: Mapping[str, str],
) -> None:
    words = [sys.executable, "-m", "kvcache.cli.main", "daemon", "--socket", str(path), "--linger-s", str(linger_s)]
    if settings_file is not None:
        words.append(os.fspath(settings_file))
    ours = [str(Path(__file__).parents[2]), *filter(None, [environ.get("PYTHONPATH")])]  # however we were found
    log = path.with_suffix(".log")
    environ = {**environ, "PYTHONPATH": os.pathsep.join(ours)}
    with log.open("wb") as said:
        process = subprocess.Popen(  # noqa: S603  our own command
            words,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            env=environ,
            start_new_session=True,
        )
    end = time.monotonic() + timeout_s
    while not answers(path):
        if process.poll() is not None:
            lines = log.read_text(errors="replace").strip().splitlines() or [f"it left with {process.returncode}"]
            raise StoreError(f"no private daemon: {lines[-1].removeprefix('kvcache: ')}")
        if time.monotonic() > end:
            process.kill()
            process.wait()
            raise StoreError(f"no private daemon: it did not listen within {timeout_s:g} s; see {log}")
        time.sleep(_LOOK_S)
    threading.Thread(target=process.wait, name="kvcache-private", daemon=True).start()  # leaves no zombie behind


def _sweep(directory: Path) -> None:
    """Remove what the daemons of ended engines left behind."""
    for left in directory.glob(f"{_STEM}*.log"):
        path = left.with_suffix(".socket")
        if not answers(path):
            for name in (path, left, path.with_name(f"{path.name}.lock")):
                with suppress(OSError):
                    name.unlink()
