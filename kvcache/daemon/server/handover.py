"""One daemon in the place of another, with what that has in host memory.

The new one asks the old one over its socket, and that ends as at SIGTERM: transfers end, what is queued is written.
When nothing moves any more it sends its extents and the table of what is in them (`kvcache.cache.warm_restart`), then
lets go of its drives and is gone. Only then does the new one open anything. Where any of it fails, or nothing comes, it
begins with what is on the drive, as after any other end.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path

from kvcache.cache.cache import Cache
from kvcache.cache.warm_restart import Legacy, leave
from kvcache.daemon.protocol import DESCRIPTORS, VERSION, ProtocolError, answer
from kvcache.daemon.server.connection import credentials
from kvcache.daemon.wire import LateError, Wire
from kvcache.errors import AccessError, ClosedError, KVCacheError, StoreError, UnreachableError
from kvcache.log import logger

ANSWER_S = 5.0
"""For the old one to say that it ends."""
LEAVE_S = 10.0
"""For it to seal what it hands over; the rest stays behind."""
END_S = 120.0
"""For it to be gone: as long as the unit in `deploy/` gives it at SIGTERM. What is queued may take as long."""
MOST_TABLE_BYTES = 1 << 32

_US = "this user, in the same namespaces of users and processes,"

_log = logger("kvcache.handover")


def akin(pid: int, user: int) -> bool:
    """Whether that process is one of ours: of the same user, where users and processes have the same numbers. In
    another container the same number is another user."""
    try:
        same = all(os.path.samefile(f"/proc/{pid}/ns/{kind}", f"/proc/self/ns/{kind}") for kind in ("user", "pid"))
    except OSError:
        return False
    return same and user == os.geteuid()


def give(heir: socket.socket, cache: Cache) -> None:
    """Hand over what is in host memory. Never raises: the drive has what it has."""
    try:
        table, extents = leave(cache, LEAVE_S)
        descriptors = [memory_file(table), *extents]
        try:
            wire = Wire(heir, takes=False)
            for first in range(0, len(descriptors), DESCRIPTORS):
                some = descriptors[first : first + DESCRIPTORS]
                more = len(descriptors) > first + DESCRIPTORS
                wire.send({"left": len(some), "more": more}, some, timeout_s=LEAVE_S)
        finally:
            os.close(descriptors[0])
        _log.info("%d extents were handed over", len(extents))
    except Exception as error:  # noqa: BLE001  it ends in any case
        _log.warning("host memory was not handed over: %s", error)


def take(path: Path, timeout_s: float = END_S) -> Legacy | None:
    """End the daemon that listens there, and have what it leaves, once it is gone. None where nobody listens, or it
    leaves nothing. AccessError where it is another user's, StoreError where it does not end."""
    end = time.monotonic() + timeout_s
    try:
        wire = Wire.connect(str(path), ANSWER_S)
    except UnreachableError:
        return None
    try:
        pid, user, _ = credentials(wire.connection)
        if not akin(pid, user):
            raise AccessError(f"{path}: a daemon of user {user}, process {pid}: only one of {_US} is replaced")
        process = _process(pid)
        try:
            legacy = _ask(wire, end) if _tell(wire, process, pid, end) else None
            if not _gone(wire, process, end):
                if legacy is not None:
                    legacy.close()
                raise StoreError(f"{path}: process {pid} was asked to end, and has not after {timeout_s:g} s")
        finally:
            if process is not None:
                os.close(process)
    finally:
        wire.close()
    return legacy


def _tell(wire: Wire, process: int | None, pid: int, end: float) -> bool:
    """Have it end. False where it will hand over nothing: then it was told as an operator would, by SIGTERM."""
    try:
        wire.send({"op": "hello", "version": VERSION, "role": "heir"}, timeout_s=ANSWER_S)
        answer(wire.receive(max(0.0, end - time.monotonic()))[0])  # one that is only slow is waited for
    except LateError:
        return False  # and it has not ended: `_gone` says so
    except ClosedError:
        return False  # it is ending already
    except KVCacheError as error:  # an earlier version, or another protocol
        _log.warning("the daemon before, process %d, hands over nothing (%s): it is ended by SIGTERM", pid, error)
        _kill(process, pid)
        return False
    return True


def _ask(wire: Wire, end: float) -> Legacy | None:
    """What it hands over, or None."""
    descriptors: list[int] = []
    try:
        more = True
        while more:
            message, some = wire.receive(max(0.0, end - time.monotonic()))
            descriptors += some
            more = message.get("more") is True
        table = read_file(descriptors.pop(0))
    except (KVCacheError, OSError, IndexError) as error:
        _log.warning("nothing is taken over from the daemon before: %s", error)
        for descriptor in descriptors:
            os.close(descriptor)
        return None
    return Legacy(table, descriptors)


def memory_file(data: bytes) -> int:
    """A file in memory with this in it; the caller's to close."""
    descriptor = os.memfd_create("kvcache-legacy", os.MFD_CLOEXEC)
    try:
        with open(os.dup(descriptor), "wb") as file:
            file.write(data)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_file(descriptor: int) -> bytes:
    """What is in it, once: it is empty then. Closes it."""
    try:
        size = os.fstat(descriptor).st_size
        if size > MOST_TABLE_BYTES:
            raise ProtocolError(f"a table of {size} bytes: at most {MOST_TABLE_BYTES} are read")
        data = bytearray()
        while len(data) < size and (piece := os.pread(descriptor, size - len(data), len(data))):
            data += piece
        os.ftruncate(descriptor, 0)
        return bytes(data)
    finally:
        os.close(descriptor)


def _process(pid: int) -> int | None:
    """Its end can be waited for by this; None where it is of another pid namespace."""
    if pid and hasattr(os, "pidfd_open"):
        with suppress(OSError):
            return os.pidfd_open(pid)
    return None


def _kill(process: int | None, pid: int) -> None:
    """End one that does not know how to hand over, as an operator would."""
    if process is not None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, signal.SIGTERM)
    elif pid:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)


def _gone(wire: Wire, process: int | None, end: float) -> bool:
    """Until it has let go of everything: when the process is gone, or at least has hung up."""
    poll, ended = select.poll(), process
    if ended is None:
        ended = wire.connection.fileno()
    poll.register(ended, select.POLLIN | select.POLLHUP)
    return bool(poll.poll(max(0.0, end - time.monotonic()) * 1000))
