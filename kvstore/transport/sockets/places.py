"""The two kinds of sockets: TCP without encryption (``tcp://host:port``), and unix sockets (``ipc://path``).

Unix sockets lie in a directory that is private to this user. TCP connections keep to a rate, so that the connections
that share a network line share it fairly: none may send much faster than the fastest one did lately (``Pacing``, pure).
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import sys
import termios
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from kvstore.errors import ConfigError
from kvstore.job.curve_keys import no_keys, split_key
from kvstore.transport.sockets.link import Address
from kvstore.transport.system_errors import ignored, require_systems
from kvstore.transport.system_sockets import (
    congestion_control,
    host_and_number,
    listen,
    require_socket_path,
    resolved,
    set_congestion_control,
)
from kvstore.transport.transport import ASK_S, ASKS, BACKLOG, IDLE_S

_INT = struct.Struct("i")
_RATE = struct.Struct("Q")
SO_MAX_PACING_RATE = 47  # of Linux; Python does not name it
_INFO = struct.Struct("=120xQ16xI20xQQ")  # of Linux's tcp_info: bytes_acked, notsent_bytes, busy_time, rwnd_limited


T = TypeVar("T", bound=Hashable)

LOOK_S = 0.25  # between two looks
TIMES = 3  # the limit, of what was reached: high enough for a line that has become free to be filled again soon
LEAST = 1 << 20  # bytes in each ``LOOK_S``; a slower connection waits for something else than the line
BUSY = 0.8  # of the time between two looks
FAST = 500_000_000  # bytes a second; beyond, keeping to a rate costs more processor time than it is good for
UNLIMITED = 2**64 - 1


# Linux lets a connection queue at the network card what it would send within a millisecond, by an estimate that grows
# with its window. Where nothing gets lost, windows only grow, some sooner than others, and their shares of the line
# grow with them. But a round takes as long as the slowest connection. A limit on all estimates makes the shares equal
# again.
class LinkProgress(NamedTuple):
    """A connection, as it is at a look."""

    acked: int  # bytes that the other side has confirmed so far
    busy: float  # seconds so far in which there was something on its way, and the other side had room for more
    more: bool  # whether there is something that has not left yet


class Pacing(Generic[T]):
    """The limit of one process's connections to other hosts; ``T`` is what they are known by."""

    def __init__(self) -> None:
        self._before: dict[T, LinkProgress] = {}
        self._at = 0.0
        self._limited = False

    def look(self, seen: Mapping[T, LinkProgress], now: float) -> int | None:
        """Return how many bytes a second each connection may send from now on; None leaves that as it is.

        Only connections count that have waited for the line, or for those who share it, since the last look.
        """
        elapsed = now - self._at
        least, least_s = LEAST * max(1.0, elapsed / LOOK_S), BUSY * elapsed
        rates = [
            (after.acked - before.acked) / (after.busy - before.busy)
            for connection, after in seen.items()
            if (before := self._before.get(connection)) is not None
            and before.more
            and after.more
            and after.acked - before.acked >= least
            and after.busy - before.busy >= least_s > 0
        ]
        self._before, self._at = dict(seen), now
        if not rates:
            return None
        limit = TIMES * max(rates)
        if limit < FAST:
            self._limited = True
            return int(limit)
        lifted, self._limited = self._limited, False
        return UNLIMITED if lifted else None


class Places:
    """One kind of sockets: how to listen and connect, and which peers may."""

    def listen(self, endpoint: str) -> tuple[socket.socket, str]:
        raise NotImplementedError

    def check(self, endpoint: str) -> None:
        raise NotImplementedError

    def addresses(self, endpoint: str, wait: bool) -> list[Address]:
        """Return the addresses of ``endpoint``; empty if it has none, or if they are slow to find and not ``wait``."""
        raise NotImplementedError

    def admit(self, made: socket.socket) -> bool:
        """Prepare a new connection for use; return whether its peer may connect."""
        raise NotImplementedError

    def wake_at(self, made: socket.socket, count: int) -> None:
        """Have a connection count as readable only when so many bytes have come, if the kind can do that."""

    def share(self, made: Sequence[socket.socket], now: float) -> None:
        """Balance the connections that share a network line. Called every ``LOOK_S`` while a thread receives."""

    def on_way(self, made: socket.socket) -> bool:
        """Whether closing the connection now may lose some of what was sent."""
        return False

    def leave(self) -> None:
        pass


class TcpPlaces(Places):
    """TCP sockets without encryption. A launcher may have opened ``root_fd``, the socket of the first ``listen``."""

    def __init__(self, root_fd: int = -1, congestion: str = "", pacing: bool = True) -> None:
        self._root_fd = root_fd
        self._congestion = congestion_control(congestion)
        self._pacing: Pacing[socket.socket] | None = Pacing() if pacing and sys.platform == "linux" else None

    def listen(self, endpoint: str) -> tuple[socket.socket, str]:
        if self._root_fd >= 0:
            fd, self._root_fd = self._root_fd, -1
            return socket.socket(fileno=fd), endpoint
        return listen(endpoint)

    def check(self, endpoint: str) -> None:
        plain, key = split_key(endpoint)
        host_and_number(plain)
        if key:
            raise no_keys(plain)

    def addresses(self, endpoint: str, wait: bool) -> list[Address]:
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
        with ignored():  # it has ended already
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)

    def share(self, made: Sequence[socket.socket], now: float) -> None:
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


def progress_of(made: socket.socket) -> LinkProgress:
    acked, more, busy_us, held_up_us = _INFO.unpack(made.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size))
    return LinkProgress(acked, (busy_us - held_up_us) / 1e6, more > 0)


SCHEME = "ipc://"
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class UnixPlaces(Places):
    """Unix sockets in a directory that is private to this user."""

    def __init__(self) -> None:
        self._made: list[Path] = []

    def listen(self, endpoint: str) -> tuple[socket.socket, str]:
        """Take the path over from an earlier listener."""
        path = _path(endpoint)
        require_socket_path(path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            path.unlink(missing_ok=True)
            listener.bind(str(path))
            listener.listen(BACKLOG)
        except OSError as exc:
            listener.close()
            raise ConfigError(f"cannot listen at {endpoint}: {exc.strerror}") from None
        self._made.append(path)
        return listener, endpoint

    def check(self, endpoint: str) -> None:
        _path(endpoint)

    def addresses(self, endpoint: str, wait: bool) -> list[Address]:
        return [(socket.AF_UNIX, str(_path(endpoint)))]

    def admit(self, made: socket.socket) -> bool:
        """Accept this user and root. The directory should have kept others out already."""
        return not hasattr(socket, "SO_PEERCRED") or _user(made) in (os.getuid(), 0)

    def leave(self) -> None:
        for path in self._made:
            path.unlink(missing_ok=True)


def _path(endpoint: str) -> Path:
    path = endpoint.removeprefix(SCHEME)
    if path == endpoint or not path:
        raise ConfigError(f"the endpoint {endpoint!r} is not valid; valid: {SCHEME}/directory/name")
    return Path(path)


def _user(made: socket.socket) -> int:
    _, uid, _ = _CREDENTIALS.unpack(made.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(uid)
