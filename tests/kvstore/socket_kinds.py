"""Transports over sockets of one kind, and plain sockets that reach them."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

from waiting import LONG, came

from kvstore.transport.sockets.places import TcpPlaces, UnixPlaces
from kvstore.transport.sockets.socket_transport import Places, SocketTransport
from kvstore.transport.sockets.strangers import StrangerLimits
from kvstore.transport.sockets.stream import GREETING, packed


class Kind:
    """Makes transports of one kind, and plain sockets that reach them."""

    def __init__(self, name: str, directory: Path) -> None:
        self.tcp = name == "tcp"
        self.endpoint = "tcp://127.0.0.1:0" if self.tcp else f"ipc://{directory}/here"
        self._made: list[SocketTransport] = []

    def places(self) -> Places:
        return TcpPlaces() if self.tcp else UnixPlaces()

    def new(self, limits: StrangerLimits | None = None, places: Places | None = None) -> SocketTransport:
        self._made.append(SocketTransport(places or self.places(), limits))
        return self._made[-1]

    def listening(self, limits: StrangerLimits | None = None, places: Places | None = None) -> SocketTransport:
        made = self.new(limits, places)
        self.endpoint = made.bind(self.endpoint)
        return made

    def stranger(self) -> socket.socket:
        place = self.endpoint.partition("://")[2]
        made = socket.socket(socket.AF_INET if self.tcp else socket.AF_UNIX, socket.SOCK_STREAM)
        made.settimeout(LONG)
        made.connect(("127.0.0.1", int(place.rpartition(":")[2])) if self.tcp else place)
        return made

    def close(self) -> None:
        for transport in self._made:
            transport.close()


def hear(listener: SocketTransport) -> bytes:
    received = came(listener)
    listener.admit(received[0])
    return received[0]


def connected(kind: Kind, *messages: list[bytes]) -> socket.socket:
    """A stranger who has greeted, and said these messages."""
    made = kind.stranger()
    made.sendall(GREETING + b"".join(part for frames in messages for part in map(bytes, packed(frames))))
    return made


def ended(made: socket.socket) -> bool:
    """Whether the other side has ended a connection."""
    made.setblocking(False)
    with contextlib.suppress(ConnectionResetError):
        while True:
            try:
                if not made.recv(1 << 16):
                    return True
            except BlockingIOError:
                return False
    return True
