"""TCP sockets without encryption. Endpoints are ``tcp://host:port``. How lost links are mended is in ``courier.py``."""

from __future__ import annotations

import fcntl
import socket
import struct
import sys
import termios
from collections.abc import Sequence

from kvstore.job.curve_keys import no_keys, split_key
from kvstore.transport.base import ASK_S, ASKS, IDLE_S
from kvstore.transport.sockets.link import Address
from kvstore.transport.sockets.pacing import LinkProgress, Pacing
from kvstore.transport.sockets.strangers import StrangerLimits
from kvstore.transport.sockets.transport import SocketTransport
from kvstore.transport.system_errors import ignored, require_systems
from kvstore.transport.tcp_sockets import (
    congestion_control,
    host_and_number,
    listen,
    resolved,
    set_congestion_control,
)

_INT = struct.Struct("i")
_RATE = struct.Struct("Q")
SO_MAX_PACING_RATE = 47  # of Linux; Python does not name it
_INFO = struct.Struct("=120xQ16xI20xQQ")  # of Linux's tcp_info: bytes_acked, notsent_bytes, busy_time, rwnd_limited


class TcpPlaces:
    """See ``Places``.

    Args:
        root_fd: a listening socket for the first ``listen``, opened by whoever started this process; -1 for none.
        congestion: see ``congestion_control``.
        pacing: whether connections keep to a rate, so that they share network lines fairly; see ``Pacing``.

    Raises:
        ConfigError: this process may not use that congestion control.
    """

    def __init__(self, root_fd: int = -1, congestion: str = "", pacing: bool = True) -> None:
        self._root_fd = root_fd
        self._congestion = congestion_control(congestion)
        self._pacing: Pacing[socket.socket] | None = Pacing() if pacing and sys.platform == "linux" else None

    def listen(self, endpoint: str) -> tuple[socket.socket, str]:
        """Listen at ``tcp://host:port``; port 0 takes a free one."""
        if self._root_fd >= 0:
            fd, self._root_fd = self._root_fd, -1
            return socket.socket(fileno=fd), endpoint
        return listen(endpoint)

    def check(self, endpoint: str) -> None:
        """Require a host and a port, and no key."""
        plain, key = split_key(endpoint)
        host_and_number(plain)
        if key:
            raise no_keys(plain)

    def addresses(self, endpoint: str, wait: bool) -> list[Address]:
        """The host's addresses. Those of a name take a while to resolve, and may change."""
        addresses = resolved(*host_and_number(endpoint), 0 if wait else socket.AI_NUMERICHOST)
        return [] if isinstance(addresses, str) else addresses

    def admit(self, made: socket.socket) -> bool:
        """Accept anyone. Messages leave at once, and keepalive probes keep idle connections known to firewalls."""
        with ignored():  # it has ended already
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in (("TCP_KEEPIDLE", IDLE_S), ("TCP_KEEPINTVL", ASK_S), ("TCP_KEEPCNT", ASKS)):
                if hasattr(socket, name):
                    made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
            set_congestion_control(made, self._congestion)
        return True

    def wake_at(self, made: socket.socket, count: int) -> None:
        """Readable when so many bytes have come, or the system's buffer is full, or the connection has ended."""
        with ignored():  # it has ended already
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)

    def share(self, made: Sequence[socket.socket], now: float) -> None:
        """Limit the rate of connections to other hosts, which share a network line."""
        if self._pacing is None:
            return
        progress: dict[socket.socket, LinkProgress] = {}
        for connection in made:
            with ignored(struct.error):  # it has ended already, or the system says less
                if connection.getsockname()[0] != connection.getpeername()[0]:
                    progress[connection] = progress_of(connection)
        limit = self._pacing.look(progress, now)
        if limit is not None:
            for connection in progress:
                with ignored():
                    connection.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, _RATE.pack(limit))

    def on_way(self, made: socket.socket) -> bool:
        """Whether the other host has not confirmed all that was sent.

        Closing a connection that has unread data resets it, and what has not arrived is lost.
        """
        try:
            count = fcntl.ioctl(made, termios.TIOCOUTQ, bytes(_INT.size))
        except OSError as exc:  # it has ended, or nobody can tell here
            require_systems(exc)
            return False
        return bool(_INT.unpack(count)[0])

    def leave(self) -> None:
        """No effect: nothing is left behind."""


class TcpTransport(SocketTransport):
    """One member's end of its plain links over TCP; see ``Transport``.

    Args:
        root_fd, congestion, pacing: see ``TcpPlaces``.
        limits: see ``SocketTransport``.
    """

    def __init__(
        self, root_fd: int = -1, congestion: str = "", pacing: bool = True, limits: StrangerLimits | None = None
    ) -> None:
        super().__init__(TcpPlaces(root_fd, congestion, pacing), limits)


def progress_of(made: socket.socket) -> LinkProgress:
    """Return how far a connection is, as Linux tells."""
    acked, more, busy_us, held_up_us = _INFO.unpack(made.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size))
    return LinkProgress(acked, (busy_us - held_up_us) / 1e6, more > 0)
