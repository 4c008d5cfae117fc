"""What kinds of sockets differ in, for ``SocketTransport``: ``tcp.py`` has one kind, ``unix.py`` another."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Protocol

from kvstore.transport.sockets.link import Address


class Places(Protocol):
    """One kind of sockets: how to listen and connect, and who may connect."""

    def listen(self, endpoint: str) -> tuple[socket.socket, str]:
        """Return a listening socket and its endpoint; raise ``ConfigError`` if that is not possible."""
        ...

    def check(self, endpoint: str) -> None:
        """Raise ``ConfigError`` if ``endpoint`` cannot be connected to."""
        ...

    def addresses(self, endpoint: str, wait: bool) -> list[Address]:
        """Return the addresses of ``endpoint``; empty if it has none, or if they are slow to find and not ``wait``."""
        ...

    def admit(self, made: socket.socket) -> bool:
        """Prepare a new connection for use; return whether its peer may connect."""
        ...

    def wake_at(self, made: socket.socket, count: int) -> None:
        """Have a connection count as readable only when so many bytes have come, if the kind can do that."""
        ...

    def share(self, made: Sequence[socket.socket], now: float) -> None:
        """Balance the connections that share a network line. Called every ``LOOK_S`` while a thread receives."""
        ...

    def on_way(self, made: socket.socket) -> bool:
        """Whether closing the connection now may lose some of what was sent."""
        ...

    def leave(self) -> None:
        """Remove what listening has left behind."""
        ...
