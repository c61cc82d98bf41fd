"""A proxy on loopback in front of a server, that lies, hangs, cuts or hangs up when told."""

from __future__ import annotations

import re
import socket
import threading
from contextlib import suppress

_COMMAND = re.compile(rb"\*\d+\r\n\$\d+\r\n[A-Z]+\r\n")


class RedisProxy:
    """`answer`: given instead of each command's own reply. `hang`: nothing comes back. `cut`: hang up after so many
    bytes of replies, counted over a connection. `drop`: hang up at the first byte. All but `drop` leave the handshake
    alone, as long as they are set after it. `delay_s`: each piece of a reply comes so much later."""

    def __init__(self, port: int) -> None:
        self._server_port = port
        self.answer = b""
        self.hang = self.drop = False
        self.delay_s = 0.0
        self.cut: int | None = None
        self.connections = 0
        self._ends: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def clear_faults(self) -> None:
        self.answer, self.hang, self.drop, self.cut, self.delay_s = b"", False, False, None, 0.0

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            server = socket.create_connection(("127.0.0.1", self._server_port))
            self._ends += [client, server]
            for work in (self._upwards, self._downwards):
                thread = threading.Thread(target=work, args=(client, server))
                self._threads.append(thread)
                thread.start()

    def _upwards(self, client: socket.socket, server: socket.socket) -> None:
        while data := _receive(client):
            if self.drop:
                break
            if self.answer and not self.hang:
                _send(client, self.answer * len(_COMMAND.findall(data)))
            elif not self.hang:
                _send(server, data)
        _close(client, server)

    def _downwards(self, client: socket.socket, server: socket.socket) -> None:
        passed = 0
        while data := _receive(server):
            if self.delay_s:
                threading.Event().wait(self.delay_s)
            if self.cut is not None:
                data = data[: max(0, self.cut - passed)]
                passed += len(data)
            _send(client, data)
            if self.cut is not None and passed >= self.cut:
                break
        _close(client, server)

    def end(self) -> None:
        _close(self._listener, *self._ends)
        for thread in self._threads:
            thread.join()
        for each in [self._listener, *self._ends]:
            each.close()


def _receive(source: socket.socket) -> bytes:
    try:
        return source.recv(1 << 16)
    except OSError:
        return b""


def _send(target: socket.socket, data: bytes) -> None:
    with suppress(OSError):
        target.sendall(data)


def _close(*ends: socket.socket) -> None:
    for each in ends:
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
