"""A connection from another host, or by TCP from this one, as the daemon's loop sees it."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from kvcache.daemon.door import Shown
from kvcache.daemon.peer import RECEIVED, Peer
from kvcache.daemon.tcp import keep_alive
from kvcache.daemon.tls import shown_by


class Guest(Peer):
    """Without TLS where `context` is None."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        connection: socket.socket,
        context: ssl.SSLContext | None,
        on_message: Callable[[Peer, dict[str, Any]], None],
        on_end: Callable[[Peer], None],
    ) -> None:
        """OSError where it hung up already."""
        host, port = connection.getpeername()[:2]
        self._where, self._origin = f"{host}:{port}", network(host)
        keep_alive(connection)
        connection.setblocking(False)
        self._greeted = context is None
        if context is not None:
            connection = context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        super().__init__(loop, connection, on_message, on_end)

    def _know(self, connection: socket.socket) -> None:
        """The kernel knows nothing of it."""
        self.pid, self.uid = 0, -1

    def __str__(self) -> str:
        return self._where

    @property
    def origin(self) -> str:
        return self._origin

    def shown(self, token_hash: str) -> Shown:
        certificates = shown_by(self.connection) if isinstance(self.connection, ssl.SSLSocket) else ()
        return Shown(token_hash=token_hash, certificates=certificates, remote=True)

    def _readable(self) -> bool:
        return (self._greeted or self._greet()) and super()._readable()

    def _greet(self) -> bool:
        """A step of the handshake; whether it is over."""
        assert isinstance(self.connection, ssl.SSLSocket)
        try:
            self.connection.do_handshake()
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLWantWriteError:
            self._loop.add_writer(self.connection, self._greet_on)
            return False
        except (OSError, ValueError):  # another language, another certificate, an end
            self.close()
            return False
        self._greeted = True
        return True

    def _greet_on(self) -> None:
        self._loop.remove_writer(self.connection)
        self._readable()

    def _receive(self) -> int:
        try:
            count = self.connection.recv_into(RECEIVED)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None
        if isinstance(self.connection, ssl.SSLSocket) and self.connection.pending():
            self._go_on_soon()  # no event will tell of what is decrypted already
        return count

    def _read_on(self) -> None:
        if self._full and isinstance(self.connection, ssl.SSLSocket) and self.connection.pending():
            self._go_on_soon()
        super()._read_on()

    def _transmit(self, data: memoryview) -> int:
        try:
            return self.connection.send(data)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    def close(self) -> None:
        if self.open and isinstance(self.connection, ssl.SSLSocket) and self._greeted:
            with suppress(OSError, ValueError):
                self.connection.unwrap()  # says that it ends, as far as that can be said at once
        super().close()


def network(host: str) -> str:
    """Of an address: of version 6 what one subscriber has at the least, since it has as many addresses as it likes."""
    address = ipaddress.ip_address(host.partition("%")[0])
    return host if address.version == 4 else str(ipaddress.ip_network((address, 64), strict=False))
