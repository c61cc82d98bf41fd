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

from kvcache.daemon.discovery import SCHEME, prepare
from kvcache.errors import StoreError
from kvcache.log import logger
from kvcache.machine import running
from kvcache.settings import TABLE
from kvcache.settings.sources import load

LINGER_S = 10.0
"""Between the last connection and the end; the first one has a minute to come."""
START_S = 60.0
"""For a daemon to read its journal and listen, at most."""
_LOOK_S = 0.02
_DETACH = """import os, sys
child = os.fork()
if child:
    os.write(int(sys.argv[1]), b"%d" % child)
    os._exit(0)
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])"""
"""Tells the number of a process that is nobody's child."""
_STEM = "engine-"
_PROCESS = re.compile(r"\d+")

_log = logger("kvcache.daemon")


@contextmanager
def _refusals() -> Iterator[None]:
    """What the system refuses is said as a StoreError."""
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"no private daemon: the system refuses what it needs ({error}); see that there are descriptors (ulimit "
            "-n), processes (ulimit -u) and memory left, and room in the runtime directory, or name a running daemon"
        ) from error


@_refusals()
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
    that makes no sense, StoreError where it does not start, with its own words or the system's.
    """
    loaded = load(settings_file, environ, **settings)
    given = {name: str(loaded.value(name)) for name in TABLE if _decides(name) and loaded.given(name)}
    directories = loaded.nvme.directories if loaded.nvme.enabled else ()
    path = socket_path(engine, environ)
    if answers(path):
        return f"{SCHEME}{path}"
    with _starting(path.parent):
        end = time.monotonic() + timeout_s  # whoever had the lock may have taken as long
        while not answers(path):
            _sweep(path.parent)
            owner = _private_owner(path.parent, directories)
            if owner is not None and answers(owner):
                return f"{SCHEME}{_shared(owner, given)}"
            try:
                _start(path, settings_file, linger_s, end, {**environ, **variables(settings)}, given)
            except StoreError:
                ending = _process_of(_lock_of(path)) or owner is not None  # which writes what is queued first
                if not ending or time.monotonic() > end:
                    raise
                time.sleep(_LOOK_S)
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
    end: float,
    environ: Mapping[str, str],
    given: Mapping[str, str],
) -> None:
    """Nobody's child: an engine that ends with all of its own (vLLM does) leaves it its time to write."""
    _tell_given(path, given)
    words = ["-m", "kvcache.cli.main", "daemon", "--socket", str(path), "--linger-s", str(linger_s)]
    if settings_file is not None:
        words.append(os.fspath(settings_file))
    ours = [str(Path(__file__).parents[2]), *filter(None, [environ.get("PYTHONPATH")])]  # however we were found
    log = path.with_suffix(".log")
    environ = {**environ, "PYTHONPATH": os.pathsep.join(ours)}
    alive, told = os.pipe()  # the daemon holds its end open as long as it runs
    try:
        try:
            with log.open("wb") as said:
                subprocess.run(  # noqa: S603  our own command
                    [sys.executable, "-I", "-S", "-c", _DETACH, str(told), *words],
                    stdin=subprocess.DEVNULL,
                    stdout=said,
                    stderr=said,
                    env=environ,
                    pass_fds=(told,),
                    start_new_session=True,
                    check=False,
                )
        finally:
            os.close(told)
        number = os.read(alive, 32)
        os.set_blocking(alive, False)
        while not answers(path):
            if not number or _ended(alive):
                lines = log.read_text(errors="replace").strip().splitlines() or ["it left without a word"]
                raise StoreError(f"no private daemon: {lines[-1].removeprefix('kvcache: ')}")
            if time.monotonic() > end:
                with suppress(ProcessLookupError):
                    os.kill(int(number), signal.SIGKILL)
                raise StoreError(f"no private daemon: it did not listen in time; see {log}")
            time.sleep(_LOOK_S)
    finally:
        os.close(alive)


def _ended(alive: int) -> bool:
    """Whether nobody holds the other end of this pipe."""
    try:
        return not os.read(alive, 1)
    except BlockingIOError:
        return False


def _decides(name: str) -> bool:
    """Whether a setting makes one cache another than the next: not what is said, to whom and where."""
    return name.partition(".")[0] not in ("control", "daemon", "log", "trace")


def _private_owner(runtime: Path, directories: Sequence[Path]) -> Path | None:
    """The socket of the private daemon that has one of these NVMe directories; None where nobody has, or another."""
    for directory in directories:
        lock = directory / "LOCK"
        named = Path(_text(lock).rpartition(SCHEME)[2])
        if named.parent == runtime and named.name.startswith(_STEM) and _process_of(lock):
            return named
    return None


def _shared(owner: Path, given: Mapping[str, str]) -> Path:
    """StoreError where its daemon was started with other settings than are given here, or nobody can tell."""
    file = _given_file(owner)
    try:
        theirs = dict(json.loads(file.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise StoreError(
            f"another engine's daemon ({SCHEME}{owner}) has the NVMe directory, and its settings cannot be read from "
            f"{file} ({error}): end that daemon, or give an nvme.path of its own"
        ) from None
    other = sorted(name for name in {*theirs, *given} if theirs.get(name) != given.get(name))
    if other:
        raise StoreError(
            f"another engine's daemon ({SCHEME}{owner}) has the NVMe directory, with {other[0]} = "
            f"{theirs.get(other[0], 'the default')} and not {given.get(other[0], 'the default')}: "
            "give the same settings to share it, or an nvme.path of its own"
        )
    _log.info("shares %s, which has the same NVMe directory and settings", owner)
    return owner


def _process_of(lock: Path) -> int | None:
    """Which process a lock's file names, if it runs. The lock itself is not tried: whoever opens the directory at that
    moment would be refused."""
    number = _PROCESS.search(_text(lock))
    return int(number[0]) if number is not None and running(int(number[0])) else None


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _lock_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.lock")


def _given_file(path: Path) -> Path:
    """What was set otherwise than by default, as text, by name."""
    return path.with_suffix(".json")


def _tell_given(path: Path, given: Mapping[str, str]) -> None:
    """Whole or not at all: others compare it with theirs."""
    file = _given_file(path)
    new = file.with_suffix(".new")
    new.write_text(json.dumps(given))
    new.replace(file)


def _sweep(directory: Path) -> None:
    """Remove what the daemons of ended engines left behind."""
    for left in directory.glob(f"{_STEM}*.log"):
        path = left.with_suffix(".socket")
        if not answers(path) and _process_of(_lock_of(path)) is None:
            for name in (path, left, _lock_of(path), _given_file(path), path.with_suffix(".new")):
                with suppress(OSError):
                    name.unlink()
