"""The daemon under systemd: readiness, status, and memory that is kept across a restart. Also watches client processes.

Under a unit with `Type=notify` and `FileDescriptorStoreMax`, `systemctl restart` keeps host memory. When it ends, the
daemon stores the descriptors of its slabs and of their table in systemd; the next process receives them. Without
systemd these functions do nothing.
"""

from __future__ import annotations

import asyncio
import os
import socket
from array import array
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress

from kvcache.cache.cache import Cache
from kvcache.cache.warm_restart import WarmRestart, export_state
from kvcache.daemon.server.client_session import ClientSession
from kvcache.daemon.server.handover import SEAL_TIMEOUT_S, memory_file, read_file
from kvcache.log import logger

FIRST_DESCRIPTOR = 3
"""First descriptor that systemd passes."""
DESCRIPTOR_NAME_PREFIX = "kvcache-"
"""Prefix of a stored descriptor's name, before its number: 0 is the table, the others are the slabs in its order."""

_log = logger("kvcache.handover")


def notify(*lines: str, descriptors: Sequence[int] = (), environ: Mapping[str, str] = os.environ) -> bool:
    """Send lines to systemd, or to a supervisor with its protocol; return whether that succeeded."""
    where = environ.get("NOTIFY_SOCKET", "")
    if where[:1] not in ("/", "@"):
        return False
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors).tobytes())] if descriptors else []
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as connection:
            connection.settimeout(SEAL_TIMEOUT_S)
            connection.connect("\0" + where[1:] if where[0] == "@" else where)
            connection.sendmsg(["\n".join(lines).encode()], rights)
    except OSError as error:
        _log.warning("NOTIFY_SOCKET %s: %s", where, error)
        return False
    return True


def store_descriptors(cache: Cache, environ: Mapping[str, str] = os.environ) -> None:
    """Store host memory for the next process of this unit, where the unit allows it. Never raises.

    The cache must be quiescent: no transfer and no write is running.
    """
    max_descriptors = environ.get("FDSTORE", "")
    if not max_descriptors.isdigit() or not int(max_descriptors) or not environ.get("NOTIFY_SOCKET"):
        return
    try:
        table, slabs = export_state(cache, SEAL_TIMEOUT_S, most=int(max_descriptors) - 1)
        file = memory_file(table)
        try:
            for i, descriptor in enumerate([file, *slabs]):
                notify(
                    "FDSTORE=1",
                    f"FDNAME={DESCRIPTOR_NAME_PREFIX}{i}",
                    "FDPOLL=0",
                    descriptors=[descriptor],
                    environ=environ,
                )
        finally:
            os.close(file)
        _log.info("kept host memory for the next process: extents=%d", len(slabs))
    except Exception as error:  # noqa: BLE001  best-effort cleanup: the daemon ends in any case
        _log.warning("host memory was not kept: cause=%s", str(error))


def take_descriptors(environ: MutableMapping[str, str] = os.environ) -> WarmRestart | None:
    """Return the memory that the previous process stored, or None; remove it from systemd's store.

    A third process therefore does not receive the same memory.
    """
    if environ.get("LISTEN_PID") != str(os.getpid()):
        return None
    names = environ.get("LISTEN_FDNAMES", "").split(":")
    descriptor_count = environ.get("LISTEN_FDS", "")
    count = int(descriptor_count) if descriptor_count.isascii() and descriptor_count.isdigit() else 0
    for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"):
        environ.pop(name, None)
    found: dict[int, int] = {}
    for descriptor, name in zip(range(FIRST_DESCRIPTOR, FIRST_DESCRIPTOR + count), names, strict=False):
        number = name.removeprefix(DESCRIPTOR_NAME_PREFIX)
        if name.startswith(DESCRIPTOR_NAME_PREFIX) and number.isdigit() and int(number) not in found:
            found[int(number)] = descriptor
            os.set_inheritable(descriptor, False)
            notify("FDSTOREREMOVE=1", f"FDNAME={name}", environ=environ)
    descriptors = [found[number] for number in sorted(found)]
    try:
        if 0 not in found or sorted(found) != list(range(len(found))):
            raise ValueError(f"descriptors {sorted(found)}: expected all from 0")
        table = read_file(descriptors.pop(0))
        if not table:
            raise ValueError("its table was read already")
    except (ValueError, OSError) as error:
        if found:
            _log.warning("nothing is taken over from the previous process: cause=%s", str(error))
        for descriptor in descriptors:
            with suppress(OSError):
                os.close(descriptor)
        return None
    return WarmRestart(table, descriptors)


# Detects the end of a client's process, even while another process holds its descriptors.


class PidfdWatcher:
    """Watches the processes of client sessions on the event loop. Thread safety: the loop's thread only."""

    def __init__(self, loop: asyncio.AbstractEventLoop, ended: Callable[[ClientSession], object]) -> None:
        self._loop, self._on_exit = loop, ended
        self._pidfds: dict[bytes, int] = {}  # by session secret

    def watch(self, session: ClientSession) -> None:
        if not session.pid:
            return
        try:
            descriptor = os.pidfd_open(session.pid)
        except (OSError, AttributeError):  # another pid namespace, or no pidfd: only the connection shows the end
            return
        self._pidfds[session.secret] = descriptor
        self._loop.add_reader(descriptor, self._on_exit, session)

    def unwatch(self, session: ClientSession) -> None:
        descriptor = self._pidfds.pop(session.secret, None)
        if descriptor is not None:
            self._loop.remove_reader(descriptor)
            os.close(descriptor)
