"""Handover: a new daemon takes over the host memory of the old one.

The new daemon asks the old one over its socket to end. The old one ends as at SIGTERM: transfers finish, and the write
queue is written. Then it sends the descriptors of its slabs and a table of their records
(`kvcache.cache.warm_restart`), closes its drives and exits. The new daemon opens its cache only after that exit. Where
any step fails, it starts with what is on the drive, as after any restart.
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
from kvcache.cache.warm_restart import WarmRestart, export_state
from kvcache.daemon.protocol import MAX_FRAME_DESCRIPTORS, PROTOCOL_VERSION, ProtocolError, parse_reply
from kvcache.daemon.server.connection import peer_credentials
from kvcache.daemon.wire import Wire, WireTimeoutError
from kvcache.errors import AccessError, ClosedError, KVCacheError, StoreError, UnreachableError
from kvcache.log import logger

REPLY_TIMEOUT_S = 5.0
"""For the old daemon to reply that it ends."""
SEAL_TIMEOUT_S = 10.0
"""For the old daemon to seal slabs for the handover; later slabs are left out."""
EXIT_TIMEOUT_S = 120.0
"""For the old daemon to exit: as long as the unit in `deploy/` allows at SIGTERM, since the write queue may be long."""
MAX_TABLE_BYTES = 1 << 32

_SAME_USER = "this user, in the same namespaces of users and processes,"

_log = logger("kvcache.handover")


def is_same_user(pid: int, user: int) -> bool:
    """Return whether the process has this user, in the same user and process namespaces.

    The same user id in another container is another user.
    """
    try:
        same = all(os.path.samefile(f"/proc/{pid}/ns/{kind}", f"/proc/self/ns/{kind}") for kind in ("user", "pid"))
    except OSError:
        return False
    return same and user == os.geteuid()


def hand_over(successor: socket.socket, cache: Cache) -> None:
    """Send host memory to the new daemon. Never raises: the drive still has its records."""
    try:
        table, slabs = export_state(cache, SEAL_TIMEOUT_S)
        descriptors = [memory_file(table), *slabs]
        try:
            wire = Wire(successor, accepts_descriptors=False)
            for first in range(0, len(descriptors), MAX_FRAME_DESCRIPTORS):
                batch = descriptors[first : first + MAX_FRAME_DESCRIPTORS]
                more = len(descriptors) > first + MAX_FRAME_DESCRIPTORS
                wire.send({"left": len(batch), "more": more}, batch, timeout_s=SEAL_TIMEOUT_S)
        finally:
            os.close(descriptors[0])
        _log.info("handed over host memory: extents=%d", len(slabs))
    except Exception as error:  # noqa: BLE001  best-effort cleanup: the daemon ends in any case
        _log.warning("host memory was not handed over: cause=%s", error)


def take_over(path: Path, timeout_s: float = EXIT_TIMEOUT_S) -> WarmRestart | None:
    """End the daemon that listens at `path`, wait until it has exited, and return its memory.

    Returns:
        None where no daemon listens, or it hands over nothing.

    Raises:
        AccessError: The daemon is another user's.
        StoreError: It has not exited after `timeout_s`.
    """
    end = time.monotonic() + timeout_s
    try:
        wire = Wire.connect(str(path), REPLY_TIMEOUT_S)
    except UnreachableError:
        return None
    try:
        pid, user, _ = peer_credentials(wire.connection)
        if not is_same_user(pid, user):
            raise AccessError(f"{path}: a daemon of user {user}, process {pid}: only one of {_SAME_USER} is replaced")
        process = _open_pidfd(pid)
        try:
            predecessor = _receive_memory(wire, end) if _request_exit(wire, process, pid, end) else None
            if not _wait_for_exit(wire, process, end):
                if predecessor is not None:
                    predecessor.close()
                raise StoreError(f"{path}: process {pid} did not exit within {timeout_s:g} s")
        finally:
            if process is not None:
                os.close(process)
    finally:
        wire.close()
    return predecessor


def _request_exit(wire: Wire, process: int | None, pid: int, end: float) -> bool:
    """Ask the daemon to end. Return False where it hands over nothing; an older version is ended by SIGTERM."""
    try:
        wire.send({"op": "hello", "version": PROTOCOL_VERSION, "role": "heir"}, timeout_s=REPLY_TIMEOUT_S)
        parse_reply(wire.receive(max(0.0, end - time.monotonic()))[0])  # a slow daemon has until `end`
    except WireTimeoutError:
        return False  # it has not ended: `_wait_for_exit` reports that
    except ClosedError:
        return False  # it is ending already
    except KVCacheError as error:  # an earlier version, or another protocol
        _log.warning("ending the previous daemon by SIGTERM: pid=%d; it hands over nothing: %s", pid, error)
        _terminate(process, pid)
        return False
    return True


def _receive_memory(wire: Wire, end: float) -> WarmRestart | None:
    """Receive the memory that is handed over; None where that fails."""
    descriptors: list[int] = []
    try:
        more = True
        while more:
            message, batch = wire.receive(max(0.0, end - time.monotonic()))
            descriptors += batch
            more = message.get("more") is True
        table = read_file(descriptors.pop(0))
    except (KVCacheError, OSError, IndexError) as error:
        _log.warning("nothing is taken over from the previous daemon: cause=%s", error)
        for descriptor in descriptors:
            os.close(descriptor)
        return None
    return WarmRestart(table, descriptors)


def memory_file(data: bytes) -> int:
    """Return the descriptor of a new memory file with this content. The caller closes it."""
    descriptor = os.memfd_create("kvcache-legacy", os.MFD_CLOEXEC)
    try:
        with open(os.dup(descriptor), "wb") as file:
            file.write(data)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_file(descriptor: int) -> bytes:
    """Read a file, empty it, and close it."""
    try:
        size = os.fstat(descriptor).st_size
        if size > MAX_TABLE_BYTES:
            raise ProtocolError(f"a table of {size} bytes: expected at most {MAX_TABLE_BYTES}")
        data = bytearray()
        while len(data) < size and (piece := os.pread(descriptor, size - len(data), len(data))):
            data += piece
        os.ftruncate(descriptor, 0)
        return bytes(data)
    finally:
        os.close(descriptor)


def _open_pidfd(pid: int) -> int | None:
    """Return a pidfd to wait for the process; None in another pid namespace."""
    if pid and hasattr(os, "pidfd_open"):
        with suppress(OSError):
            return os.pidfd_open(pid)
    return None


def _terminate(process: int | None, pid: int) -> None:
    """Send SIGTERM to a daemon that cannot hand over, as an operator would."""
    if process is not None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, signal.SIGTERM)
    elif pid:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)


def _wait_for_exit(wire: Wire, process: int | None, end: float) -> bool:
    """Wait until the process has exited, or at least has hung up; return whether it did before `end`."""
    poll, ended = select.poll(), process
    if ended is None:
        ended = wire.connection.fileno()
    poll.register(ended, select.POLLIN | select.POLLHUP)
    return bool(poll.poll(max(0.0, end - time.monotonic()) * 1000))
