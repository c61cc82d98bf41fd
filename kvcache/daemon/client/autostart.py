"""Starts or finds the private daemon of an engine whose scheduler and workers are several processes.

    where = find_or_start(engine_id, host__capacity_bytes="8GiB")
    cache = kvcache.open(where)

The first process of the engine starts the daemon, and the others find it by the engine's id. The daemon ends when the
engine does: once no process has been connected for `linger_s`. An operator has nothing to run beforehand.

A restarted engine has another id, and the daemon of the previous one may still hold the NVMe directory that both
configure. The new engine then uses that daemon. So does any other engine with this directory and the same settings:
what is in host memory is there at once.
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
"""Time between the last connection and the daemon's end. The first client has a minute to connect."""
START_TIMEOUT_S = 60.0
"""Most time for a daemon to read its journal and listen."""
_POLL_S = 0.02
_DETACH = """import os, sys
child = os.fork()
if child:
    os.write(int(sys.argv[1]), b"%d" % child)
    os._exit(0)
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])"""
"""Starts a process that is not a child of the engine, and writes its pid to a pipe."""
_FILE_PREFIX = "engine-"
_PID_PATTERN = re.compile(r"\d+")

_log = logger("kvcache.daemon")


@contextmanager
def _os_errors_as_store_error() -> Iterator[None]:
    """Convert an OSError into a StoreError."""
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"cannot start a private daemon: the system refused a resource ({error}); check descriptors (ulimit "
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
    """Return the address of this engine's daemon for `kvcache.open`; the daemon answers by then.

    `settings` and the file are as for `kvcache.open`. The settings of the process that starts the daemon apply.

    Raises:
        ConfigError: A setting is invalid.
        StoreError: The daemon does not start; the text is the daemon's or the system's.
    """
    loaded = load(settings_file, environ, **settings)
    given = {name: str(loaded.value(name)) for name in TABLE if _affects_cache(name) and loaded.given(name)}
    directories = loaded.nvme.directories if loaded.nvme.enabled else ()
    path = socket_path(engine, environ)
    if is_listening(path):
        return f"{UNIX_SCHEME}{path}"
    with _starting(path.parent):
        end = time.monotonic() + timeout_s  # the process that had the lock may have used as much time
        while not is_listening(path):
            _sweep(path.parent)
            owner = _private_daemon_of(path.parent, directories)
            if owner is not None and is_listening(owner):
                return f"{UNIX_SCHEME}{_check_shareable(owner, given)}"
            try:
                _start(path, settings_file, linger_s, end, {**environ, **settings_environment(settings)}, given)
            except StoreError:
                ending = _process_of(_lock_of(path)) or owner is not None  # an ending daemon writes its queue first
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
    """Return keywords of `kvcache.open` as environment variables."""
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
    """Hold the lock under which one process starts a daemon at a time. The system frees it when that process ends."""
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
    """Start a daemon that is not a child of this process.

    An engine that kills its children when it ends (vLLM does) thereby leaves the daemon time to write.
    """
    _write_settings(path, given)
    command = ["-m", "kvcache.cli.main", "daemon", "--socket", str(path), "--linger-s", str(linger_s)]
    if settings_file is not None:
        command.append(os.fspath(settings_file))
    python_path = [str(Path(__file__).parents[3]), *filter(None, [environ.get("PYTHONPATH")])]  # of this package
    log = path.with_suffix(".log")
    environ = {**environ, "PYTHONPATH": os.pathsep.join(python_path)}
    alive, write_fd = os.pipe()  # the daemon holds its end open while it runs
    try:
        try:
            with log.open("wb") as log_file:
                subprocess.run(  # noqa: S603  the command is built here
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
                lines = log.read_text(errors="replace").strip().splitlines() or ["it exited without a message"]
                raise StoreError(f"cannot start a private daemon: {lines[-1].removeprefix('kvcache: ')}")
            if time.monotonic() > end:
                with suppress(ProcessLookupError):
                    os.kill(int(number), signal.SIGKILL)
                raise StoreError(f"cannot start a private daemon: it did not listen in time; see {log}")
            time.sleep(_POLL_S)
    finally:
        os.close(alive)


def _ended(alive: int) -> bool:
    """Return whether the daemon has closed the other end of this pipe."""
    try:
        return not os.read(alive, 1)
    except BlockingIOError:
        return False


def _affects_cache(name: str) -> bool:
    """Return whether a setting changes the cache itself, and not its logging or its sockets."""
    return name.partition(".")[0] not in ("control", "daemon", "log", "trace")


def _private_daemon_of(runtime: Path, directories: Sequence[Path]) -> Path | None:
    """Return the socket of the running private daemon that holds one of these NVMe directories, or None."""
    for directory in directories:
        lock = directory / "LOCK"
        named = Path(_read_text(lock).rpartition(UNIX_SCHEME)[2])
        if named.parent == runtime and named.name.startswith(_FILE_PREFIX) and _process_of(lock):
            return named
    return None


def _check_shareable(owner: Path, given: Mapping[str, str]) -> Path:
    """Return the socket `owner`, where its daemon has these settings.

    Raises:
        StoreError: Its settings differ, or cannot be read.
    """
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
    _log.info("using the daemon of another engine: address=%s, with the same NVMe directory and settings", owner)
    return owner


def _process_of(lock: Path) -> int | None:
    """Return the process that a lock file names, if it runs.

    The lock itself is not tried: a process that opens the directory at that moment would be refused.
    """
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
    """Return the file with the settings that differ from the defaults: text by name, as JSON."""
    return path.with_suffix(".json")


def _write_settings(path: Path, given: Mapping[str, str]) -> None:
    """Write the settings atomically, because other processes compare them with theirs."""
    file = _settings_file(path)
    new = file.with_suffix(".new")
    new.write_text(json.dumps(given))
    new.replace(file)


def _sweep(directory: Path) -> None:
    """Remove the files of daemons that have ended."""
    for log_path in directory.glob(f"{_FILE_PREFIX}*.log"):
        path = log_path.with_suffix(".socket")
        if not is_listening(path) and _process_of(_lock_of(path)) is None:
            for name in (path, log_path, _lock_of(path), _settings_file(path), path.with_suffix(".new")):
                with suppress(OSError):
                    name.unlink()
