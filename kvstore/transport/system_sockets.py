"""Sockets of the system, which our own links and ZeroMQ's are made of: where to listen, congestion control, bells."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import Any

from kvstore.errors import ConfigError
from kvstore.job.address import host_and_port, tcp_endpoint
from kvstore.job.curve_keys import split_key
from kvstore.job.directory import require_private
from kvstore.transport.system_errors import ignored
from kvstore.transport.transport import BACKLOG

SCHEME = "tcp://"
_NAME = 16  # bytes of a congestion control's name


def listen(endpoint: str) -> tuple[socket.socket, str]:
    """Listen at ``tcp://host:port``; port 0 takes a free one. Return the socket, and the endpoint with its address."""
    addresses = resolved(*host_and_number(endpoint))
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


def host_and_number(endpoint: str) -> tuple[str, int]:
    host, port = host_and_port(endpoint)
    if not endpoint.startswith(SCHEME) or not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"the endpoint {endpoint!r} is not valid; valid: {SCHEME}host:port")
    return host, int(port)


def resolved(host: str, port: int, flags: int = 0) -> list[tuple[socket.AddressFamily, Any]] | str:
    """Return the addresses of ``host``, the preferred first; or in words why there are none."""
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    except (OSError, UnicodeError) as exc:
        return str(exc)
    return [(socket.AddressFamily(family), address) for family, _, _, _, address in infos]


def congestion_control(wanted: str) -> bytes:
    """Return the congestion control to give each connection; empty to leave the system's.

    BBR lets each connection send at a pace of its own, and nearly nothing for 0.2 s every 10 s (Cardwell et al. 2016).
    A connection that has a line to itself hardly suffers. But a round takes as long as the slowest of the connections
    that share a line.

    Args:
        wanted: its name; empty for the system's, but not BBR, where there is another.
    """
    for name in [wanted] if wanted else ["cubic", "reno"] if _system().startswith("bbr") else []:
        with socket.socket() as probe, ignored(AttributeError):
            set_congestion_control(probe, name.encode())
            return name.encode()
    if wanted:
        raise ConfigError(
            f"KVSTORE_CONGESTION={wanted!r} is not valid; valid: nothing, or one that `sysctl "
            "net.ipv4.tcp_allowed_congestion_control` lists"
        )
    return b""


def set_congestion_control(made: socket.socket, name: bytes) -> None:
    """Give a connection, or all that a listening socket accepts, a congestion control; empty leaves it."""
    if name:
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)


def _system() -> str:
    with ignored(AttributeError), socket.socket() as probe:
        return probe.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _NAME).rstrip(b"\0").decode()
    return ""


MAX_PATH = 107  # bytes of a unix socket's path


def require_socket_path(path: Path) -> None:
    if len(os.fsencode(path)) > MAX_PATH:
        raise ConfigError(
            f"{path} is longer than the {MAX_PATH} bytes that a unix socket's path may have: set a shorter TMPDIR"
        )
    try:
        require_private(path.parent)
    except ConfigError as exc:
        raise ConfigError(f"cannot listen at {path}: {exc}") from None


PROBE_S = 1.0


def listening(endpoint: str) -> bool | None:
    """Return whether anybody listens at an endpoint; None if that cannot be known."""
    bare = split_key(endpoint)[0]
    try:
        if bare.startswith("ipc://"):
            with socket.socket(socket.AF_UNIX) as made:
                made.settimeout(PROBE_S)
                made.connect(bare.removeprefix("ipc://"))
                return True
        host, port = host_and_port(bare)
        with socket.create_connection((host, int(port)), PROBE_S):
            return True
    except (ConnectionRefusedError, FileNotFoundError):
        return False
    except OSError:
        return None


class Bell:
    """Readable from the first ``ring`` until ``silence``."""

    def __init__(self) -> None:
        self._hand, self._ear = socket.socketpair()
        self._hand.setblocking(False)
        self._ear.setblocking(False)

    def fileno(self) -> int:
        return self._ear.fileno()

    def ring(self) -> None:
        """Wake the thread that waits, or else the next one that does. Any thread may call it."""
        with ignored():  # full: a wake-up is already there; closed: nobody waits
            self._hand.send(b"\0")

    def silence(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._ear.recv(4096)

    def close(self) -> None:
        self._hand.close()
        self._ear.close()
