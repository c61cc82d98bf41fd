"""What a daemon tells systemd: that it serves, that it ends, and what it keeps for the process after it.

Under a unit with `Type=notify` and `FileDescriptorStoreMax`, `systemctl restart` keeps what is in host memory: at its
end the daemon gives systemd the descriptors of its extents and of their table, and the next process gets them back.
Without systemd nothing of this does anything."""

from __future__ import annotations

import asyncio
import os
import socket
from array import array
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress

from kvcache.cache.cache import Cache
from kvcache.cache.warm_restart import Legacy, leave
from kvcache.daemon.server.client_session import Session
from kvcache.daemon.server.handover import LEAVE_S, memory_file, read_file
from kvcache.log import logger

FIRST = 3
"""Descriptor of those that systemd gives."""
NAME = "kvcache-"
"""Of a descriptor that is kept, and its number: 0 is the table, the others are the extents in its order."""

_log = logger("kvcache.handover")


def notify(*lines: str, descriptors: Sequence[int] = (), environ: Mapping[str, str] = os.environ) -> bool:
    """Whether systemd, or whoever runs this in its way, was told."""
    where = environ.get("NOTIFY_SOCKET", "")
    if where[:1] not in ("/", "@"):
        return False
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors).tobytes())] if descriptors else []
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as connection:
            connection.settimeout(LEAVE_S)
            connection.connect("\0" + where[1:] if where[0] == "@" else where)
            connection.sendmsg(["\n".join(lines).encode()], rights)
    except OSError as error:
        _log.warning("NOTIFY_SOCKET %s: %s", where, error)
        return False
    return True


def keep(cache: Cache, environ: Mapping[str, str] = os.environ) -> None:
    """Leave what is in host memory to the next process of this unit, where it may be kept. Never raises. For a cache in
    which nothing moves any more."""
    room = environ.get("FDSTORE", "")
    if not room.isdigit() or not int(room) or not environ.get("NOTIFY_SOCKET"):
        return
    try:
        table, extents = leave(cache, LEAVE_S, most=int(room) - 1)
        file = memory_file(table)
        try:
            for i, descriptor in enumerate([file, *extents]):
                notify("FDSTORE=1", f"FDNAME={NAME}{i}", "FDPOLL=0", descriptors=[descriptor], environ=environ)
        finally:
            os.close(file)
        _log.info("%d extents are kept for the next process", len(extents))
    except Exception as error:  # noqa: BLE001  it ends in any case
        _log.warning("host memory was not kept: %s", str(error))


def kept(environ: MutableMapping[str, str] = os.environ) -> Legacy | None:
    """What the process before left, if any. It is ours alone from now on: a third one does not get it too."""
    if environ.get("LISTEN_PID") != str(os.getpid()):
        return None
    names = environ.get("LISTEN_FDNAMES", "").split(":")
    given = environ.get("LISTEN_FDS", "")
    count = int(given) if given.isascii() and given.isdigit() else 0
    for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"):
        environ.pop(name, None)
    found: dict[int, int] = {}
    for descriptor, name in zip(range(FIRST, FIRST + count), names, strict=False):
        number = name.removeprefix(NAME)
        if name.startswith(NAME) and number.isdigit() and int(number) not in found:
            found[int(number)] = descriptor
            os.set_inheritable(descriptor, False)
            notify("FDSTOREREMOVE=1", f"FDNAME={name}", environ=environ)
    descriptors = [found[number] for number in sorted(found)]
    try:
        if 0 not in found or sorted(found) != list(range(len(found))):
            raise ValueError(f"descriptors {sorted(found)}: expected all from 0")
        table = read_file(descriptors.pop(0))
        if not table:
            raise ValueError("its table was read before")
    except (ValueError, OSError) as error:
        if found:
            _log.warning("nothing is taken over from the process before: %s", str(error))
        for descriptor in descriptors:
            with suppress(OSError):
                os.close(descriptor)
        return None
    return Legacy(table, descriptors)


# Sees the end of the processes behind sessions, whoever else has their descriptors.


class Watch:
    """Of the loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, ended: Callable[[Session], object]) -> None:
        self._loop, self._ended = loop, ended
        self._watched: dict[bytes, int] = {}  # by session, the descriptor of its process

    def begin(self, session: Session) -> None:
        if not session.pid:
            return
        try:
            descriptor = os.pidfd_open(session.pid)
        except (OSError, AttributeError):  # of another pid namespace: its connection alone tells
            return
        self._watched[session.secret] = descriptor
        self._loop.add_reader(descriptor, self._ended, session)

    def end(self, session: Session) -> None:
        descriptor = self._watched.pop(session.secret, None)
        if descriptor is not None:
            self._loop.remove_reader(descriptor)
            os.close(descriptor)
