"""Unix sockets, in a directory that is private to this user. Endpoints are ``ipc://path``."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Sequence
from pathlib import Path

from kvstore.errors import ConfigError
from kvstore.transport.base import BACKLOG
from kvstore.transport.directory import require_socket_path
from kvstore.transport.sockets.link import Address
from kvstore.transport.sockets.strangers import StrangerLimits
from kvstore.transport.sockets.transport import SocketTransport

SCHEME = "ipc://"
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class UnixPlaces:
    """See ``Places``."""

    def __init__(self) -> None:
        self._made: list[Path] = []

    def listen(self, endpoint: str) -> tuple[socket.socket, str]:
        """Listen at ``ipc://path``. Takes the path over from an earlier listener."""
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
        """Require a path."""
        _path(endpoint)

    def addresses(self, endpoint: str, wait: bool) -> list[Address]:
        """The path."""
        return [(socket.AF_UNIX, str(_path(endpoint)))]

    def admit(self, made: socket.socket) -> bool:
        """Accept this user and root. The directory should have kept others out already."""
        return not hasattr(socket, "SO_PEERCRED") or _user(made) in (os.getuid(), 0)

    def wake_at(self, made: socket.socket, count: int) -> None:
        """No effect: unix sockets are readable whenever anything has come."""

    def share(self, made: Sequence[socket.socket], now: float) -> None:
        """No effect: there is no network line."""

    def on_way(self, made: socket.socket) -> bool:
        """False: what was sent is with the other side."""
        return False

    def leave(self) -> None:
        """Remove the sockets' files."""
        for path in self._made:
            path.unlink(missing_ok=True)


class UnixTransport(SocketTransport):
    """One member's end of its links over unix sockets; see ``Transport``.

    Args:
        limits: see ``SocketTransport``.
    """

    def __init__(self, limits: StrangerLimits | None = None) -> None:
        super().__init__(UnixPlaces(), limits)


def _path(endpoint: str) -> Path:
    path = endpoint.removeprefix(SCHEME)
    if path == endpoint or not path:
        raise ConfigError(f"the endpoint {endpoint!r} is not valid; valid: {SCHEME}/directory/name")
    return Path(path)


def _user(made: socket.socket) -> int:
    """The user of the process that has made this connection."""
    _, uid, _ = _CREDENTIALS.unpack(made.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(uid)
