"""Ports of loopback for servers of the tests."""

from __future__ import annotations

import os
import random
import socket
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST = 10_000
_drawn = random.Random(os.getpid())
_given: set[int] = set()


def free_port() -> int:
    """One that no process uses now, that was not given before, and that the system gives to no connection.

    A port below those of outgoing connections: between this call and the server's start, any client of the machine
    may get one of those, and the server then ends at once.
    """
    end = int(_RANGE.read_text().split()[0]) if _RANGE.exists() else 32_768
    while True:
        port = _drawn.randrange(_FIRST, end)
        if port in _given:
            continue
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        _given.add(port)
        return port
