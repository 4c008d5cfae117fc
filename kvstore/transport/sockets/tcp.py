"""TCP sockets without encryption. Endpoints are ``tcp://host:port``. How lost links are mended is in ``courier.py``."""

from __future__ import annotations

import fcntl
import socket
import struct
import sys
import termios
from collections.abc import Sequence

from kvstore.errors import ConfigError
from kvstore.job.address import host_and_port, tcp_endpoint
from kvstore.job.curve_keys import no_keys, split_key
from kvstore.transport.base import ASK_S, ASKS, BACKLOG, IDLE_S
from kvstore.transport.sockets.link import Address
from kvstore.transport.sockets.pacing import LinkProgress, Pacing
from kvstore.transport.sockets.strangers import StrangerLimits
from kvstore.transport.sockets.transport import SocketTransport
from kvstore.transport.system_errors import ignored, require_systems

SCHEME = "tcp://"
_INT = struct.Struct("i")
_RATE = struct.Struct("Q")
_NAME = 16  # bytes of a congestion control's name
SO_MAX_PACING_RATE = 47  # of Linux; Python does not name it
_INFO = struct.Struct("=120xQ16xI20xQQ")  # of Linux's tcp_info: bytes_acked, notsent_bytes, busy_time, rwnd_limited


class TcpPlaces:
    """See ``Places``.

    Args:
        root_fd: a listening socket for the first ``listen``, opened by whoever started this process; -1 for none.
        congestion: the congestion control of connections; empty for the system's, but not BBR, where there is another.
        pacing: whether connections keep to a rate, so that they share network lines fairly; see ``Pacing``.

    Raises:
        ConfigError: this process may not use that congestion control.
    """

    def __init__(self, root_fd: int = -1, congestion: str = "", pacing: bool = True) -> None:
        self._root_fd = root_fd
        self._congestion = _congestion(congestion)
        self._pacing: Pacing[socket.socket] | None = Pacing() if pacing and sys.platform == "linux" else None

    def listen(self, endpoint: str) -> tuple[socket.socket, str]:
        """Listen at ``tcp://host:port``; port 0 takes a free one."""
        host, port = _split(endpoint)
        if self._root_fd >= 0:
            fd, self._root_fd = self._root_fd, -1
            return socket.socket(fileno=fd), endpoint
        addresses = _resolved(host, port)
        if isinstance(addresses, str):
            raise ConfigError(f"cannot listen at {endpoint}: {addresses}")
        family, address = addresses[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
        except OSError as exc:
            listener.close()
            raise ConfigError(f"cannot listen at {endpoint}: {exc.strerror}") from None
        ip, number = listener.getsockname()[:2]
        return listener, tcp_endpoint(ip, number)

    def check(self, endpoint: str) -> None:
        """Require a host and a port, and no key."""
        plain, key = split_key(endpoint)
        _split(plain)
        if key:
            raise no_keys(plain)

    def addresses(self, endpoint: str, wait: bool) -> list[Address]:
        """The host's addresses. Those of a name take a while to resolve, and may change."""
        addresses = _resolved(*_split(endpoint), 0 if wait else socket.AI_NUMERICHOST)
        return [] if isinstance(addresses, str) else addresses

    def admit(self, made: socket.socket) -> bool:
        """Accept anyone. Messages leave at once, and keepalive probes keep idle connections known to firewalls."""
        with ignored():  # it has ended already
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in (("TCP_KEEPIDLE", IDLE_S), ("TCP_KEEPINTVL", ASK_S), ("TCP_KEEPCNT", ASKS)):
                if hasattr(socket, name):
                    made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
            if self._congestion:
                made.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, self._congestion)
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


def _congestion(wanted: str) -> bytes:
    """Return the congestion control to give each connection; empty to leave the system's.

    BBR lets each connection send at a pace of its own, and nearly nothing for 0.2 s every 10 s (Cardwell et al. 2016).
    A connection that has a line to itself hardly suffers. But a round takes as long as the slowest of the connections
    that share a line.
    """
    for name in [wanted] if wanted else ["cubic", "reno"] if _system().startswith("bbr") else []:
        with socket.socket() as probe, ignored(AttributeError):
            probe.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
            return name.encode()
    if wanted:
        raise ConfigError(
            f"KVSTORE_CONGESTION={wanted!r} is not valid; valid: nothing, or one that `sysctl "
            "net.ipv4.tcp_allowed_congestion_control` lists"
        )
    return b""


def _system() -> str:
    """The congestion control that connections have by default; empty where the system does not tell."""
    with ignored(AttributeError), socket.socket() as probe:
        return probe.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _NAME).rstrip(b"\0").decode()
    return ""


def _split(endpoint: str) -> tuple[str, int]:
    host, port = host_and_port(endpoint)
    if not endpoint.startswith(SCHEME) or not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"the endpoint {endpoint!r} is not valid; valid: {SCHEME}host:port")
    return host, int(port)


def _resolved(host: str, port: int, flags: int = 0) -> list[Address] | str:
    """The addresses of ``host``, the preferred first; or in words why there are none."""
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    except (OSError, UnicodeError) as exc:
        return str(exc)
    return [(socket.AddressFamily(family), address) for family, _, _, _, address in infos]
