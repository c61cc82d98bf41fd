"""A daemon of one engine alone, for engines whose scheduler and workers are several processes.

    where = find_or_start(engine_id, host__capacity_bytes="8GiB")
    cache = kvcache.open(where)

Whichever process of the engine comes first starts it, the others find it by the engine's id. It ends when the engine
does: once none of its processes has been connected for a while. Nobody has to run anything to begin with.

An engine that is restarted has another id, and the daemon of the one before may still be there, with the NVMe directory
that both name. It is the one that the new engine gets, as does any other engine that names this directory and gives the
same settings: what is in host memory is there at once.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from kvcache.daemon.discovery import UNIX_SCHEME, make_socket_directory
from kvcache.errors import StoreError
from kvcache.log import logger
from kvcache.machine import is_running
from kvcache.settings import TABLE
from kvcache.settings.sources import load

LINGER_S = 10.0
"""Between the last connection and the end; the first one has a minute to come."""
START_TIMEOUT_S = 60.0
"""For a daemon to read its journal and listen, at most."""
_POLL_S = 0.02
_DETACH = """import os, sys
child = os.fork()
if child:
    os.write(int(sys.argv[1]), b"%d" % child)
    os._exit(0)
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])"""
"""Tells the number of a process that is nobody's child."""
_FILE_PREFIX = "engine-"
_PID_PATTERN = re.compile(r"\d+")

_log = logger("kvcache.daemon")


@contextmanager
def _os_errors_as_store_error() -> Iterator[None]:
    """What the system refuses is said as a StoreError."""
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"no private daemon: the system refuses what it needs ({error}); see that there are descriptors (ulimit "
            "-n), processes (ulimit -u) and memory left, and room in the runtime directory, or name a running daemon"
        ) from error


@_os_errors_as_store_error()
def find_or_start(
    engine: str,
    settings_file: str | os.PathLike[str] | None = None,
    *,
    linger_s: float = LINGER_S,
    timeout_s: float = START_TIMEOUT_S,
    environ: Mapping[str, str] = os.environ,
    **settings: Any,
) -> str:
    """Where `kvcache.open` reaches the daemon of this engine, which answers when this returns.

    `settings` and the file are as for `kvcache.open`; those of the process that starts it hold. ConfigError for one
    that makes no sense, StoreError where it does not start, with its own words or the system's.
    """
    loaded = load(settings_file, environ, **settings)
    given = {name: str(loaded.value(name)) for name in TABLE if _affects_cache(name) and loaded.given(name)}
    directories = loaded.nvme.directories if loaded.nvme.enabled else ()
    path = socket_path(engine, environ)
    if is_listening(path):
        return f"{UNIX_SCHEME}{path}"
    with _starting(path.parent):
        end = time.monotonic() + timeout_s  # whoever had the lock may have taken as long
        while not is_listening(path):
            _sweep(path.parent)
            owner = _private_daemon_of(path.parent, directories)
            if owner is not None and is_listening(owner):
                return f"{UNIX_SCHEME}{_check_shareable(owner, given)}"
            try:
                _start(path, settings_file, linger_s, end, {**environ, **settings_environment(settings)}, given)
            except StoreError:
                ending = _process_of(_lock_of(path)) or owner is not None  # which writes what is queued first
                if not ending or time.monotonic() > end:
                    raise
                time.sleep(_POLL_S)
    return f"{UNIX_SCHEME}{path}"


def socket_path(engine: str, environ: Mapping[str, str] = os.environ) -> Path:
    return make_socket_directory(environ) / f"{_FILE_PREFIX}{sha256(engine.encode()).hexdigest()[:16]}.socket"


def is_listening(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(os.fspath(path))
        except OSError:
            return False
    return True


def settings_environment(settings: Mapping[str, Any]) -> dict[str, str]:
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
    descriptor = os.open(directory / f"{_FILE_PREFIX}start.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _start(
    path: Path,
    settings_file: str | os.PathLike[str] | None,
    linger_s: float,
    end: float,
    environ: Mapping[str, str],
    given: Mapping[str, str],
) -> None:
    """Nobody's child: an engine that ends with all of its own (vLLM does) leaves it its time to write."""
    _write_settings(path, given)
    command = ["-m", "kvcache.cli.main", "daemon", "--socket", str(path), "--linger-s", str(linger_s)]
    if settings_file is not None:
        command.append(os.fspath(settings_file))
    python_path = [str(Path(__file__).parents[3]), *filter(None, [environ.get("PYTHONPATH")])]  # however we were found
    log = path.with_suffix(".log")
    environ = {**environ, "PYTHONPATH": os.pathsep.join(python_path)}
    alive, write_fd = os.pipe()  # the daemon holds its end open as long as it runs
    try:
        try:
            with log.open("wb") as log_file:
                subprocess.run(  # noqa: S603  our own command
                    [sys.executable, "-I", "-S", "-c", _DETACH, str(write_fd), *command],
                    stdin=subprocess.DEVNULL,
                    stdout=log_file,
                    stderr=log_file,
                    env=environ,
                    pass_fds=(write_fd,),
                    start_new_session=True,
                    check=False,
                )
        finally:
            os.close(write_fd)
        number = os.read(alive, 32)
        os.set_blocking(alive, False)
        while not is_listening(path):
            if not number or _ended(alive):
                lines = log.read_text(errors="replace").strip().splitlines() or ["it left without a word"]
                raise StoreError(f"no private daemon: {lines[-1].removeprefix('kvcache: ')}")
            if time.monotonic() > end:
                with suppress(ProcessLookupError):
                    os.kill(int(number), signal.SIGKILL)
                raise StoreError(f"no private daemon: it did not listen in time; see {log}")
            time.sleep(_POLL_S)
    finally:
        os.close(alive)


def _ended(alive: int) -> bool:
    """Whether nobody holds the other end of this pipe."""
    try:
        return not os.read(alive, 1)
    except BlockingIOError:
        return False


def _affects_cache(name: str) -> bool:
    """Whether a setting makes one cache another than the next: not what is said, to whom and where."""
    return name.partition(".")[0] not in ("control", "daemon", "log", "trace")


def _private_daemon_of(runtime: Path, directories: Sequence[Path]) -> Path | None:
    """The socket of the private daemon that has one of these NVMe directories; None where nobody has, or another."""
    for directory in directories:
        lock = directory / "LOCK"
        named = Path(_read_text(lock).rpartition(UNIX_SCHEME)[2])
        if named.parent == runtime and named.name.startswith(_FILE_PREFIX) and _process_of(lock):
            return named
    return None


def _check_shareable(owner: Path, given: Mapping[str, str]) -> Path:
    """StoreError where its daemon was started with other settings than are given here, or nobody can tell."""
    file = _settings_file(owner)
    try:
        running_settings = dict(json.loads(file.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise StoreError(
            f"another engine's daemon ({UNIX_SCHEME}{owner}) has the NVMe directory, and its settings "
            f"cannot be read from "
            f"{file} ({error}): end that daemon, or give an nvme.path of its own"
        ) from None
    other = sorted(name for name in {*running_settings, *given} if running_settings.get(name) != given.get(name))
    if other:
        raise StoreError(
            f"another engine's daemon ({UNIX_SCHEME}{owner}) has the NVMe directory, with {other[0]} = "
            f"{running_settings.get(other[0], 'the default')} and not {given.get(other[0], 'the default')}: "
            "give the same settings to share it, or an nvme.path of its own"
        )
    _log.info("shares %s, which has the same NVMe directory and settings", owner)
    return owner


def _process_of(lock: Path) -> int | None:
    """Which process a lock's file names, if it runs. The lock itself is not tried: whoever opens the directory at that
    moment would be refused."""
    number = _PID_PATTERN.search(_read_text(lock))
    return int(number[0]) if number is not None and is_running(int(number[0])) else None


def _read_text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _lock_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.lock")


def _settings_file(path: Path) -> Path:
    """What was set otherwise than by default, as text, by name."""
    return path.with_suffix(".json")


def _write_settings(path: Path, given: Mapping[str, str]) -> None:
    """Whole or not at all: others compare it with theirs."""
    file = _settings_file(path)
    new = file.with_suffix(".new")
    new.write_text(json.dumps(given))
    new.replace(file)


def _sweep(directory: Path) -> None:
    """Remove what the daemons of ended engines left behind."""
    for log_path in directory.glob(f"{_FILE_PREFIX}*.log"):
        path = log_path.with_suffix(".socket")
        if not is_listening(path) and _process_of(_lock_of(path)) is None:
            for name in (path, log_path, _lock_of(path), _settings_file(path), path.with_suffix(".new")):
                with suppress(OSError):
                    name.unlink()
