"""The address by which other hosts reach this one, and whether their addresses answer."""

from __future__ import annotations

import errno
import os
import selectors
import socket
import time
from collections.abc import Iterable

from kvstore.errors import ConfigError
from kvstore.job.address import Address, choose
from launcher.errors import LaunchError

Target = tuple[str, str, int]


def address(*, host: str = "", interface: str = "", toward: str = "") -> Address:
    """Choose an address as `kvstore.job.address.choose` does. Errors name options of launch.py instead of variables."""
    try:
        return choose(host=host, interface=interface, toward=toward)
    except ConfigError as error:
        text = str(error).replace("DMLC_NODE_HOST=", "--host-ip ").replace("DMLC_INTERFACE=", "--interface ")
        text = text.replace("DMLC_NODE_HOST", "--host-ip")
        raise LaunchError(f"cannot choose an address for this host: {text}") from None


def unreachable(targets: Iterable[Target], seconds: float) -> list[tuple[str, str]]:
    """Connect to all targets at once, and disconnect.

    `targets`: (name, address, port) of each. Returns (name, reason) of the targets that did not answer in time.
    """
    failures: list[tuple[str, str]] = []
    sockets: dict[int, socket.socket] = {}
    with selectors.DefaultSelector() as selector:
        for name, address, port in targets:
            sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
            sock.setblocking(False)
            try:
                code = sock.connect_ex((address, port))
            except (OSError, ValueError, TypeError):  # another host has sent the address, which may be anything
                sock.close()
                failures.append((name, f"{address[:40]!r} is not an address"))
                continue
            if code in (0, errno.EINPROGRESS):
                sockets[sock.fileno()] = sock
                selector.register(sock.fileno(), selectors.EVENT_WRITE, name)
            else:
                sock.close()
                failures.append((name, os.strerror(code).lower()))
        deadline = time.monotonic() + seconds
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                code = sockets[key.fd].getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if code:
                    failures.append((key.data, os.strerror(code).lower()))
                selector.unregister(key.fd)
                sockets.pop(key.fd).close()
        for key in list(selector.get_map().values()):
            failures.append((key.data, f"no answer within {seconds:g} s"))
            sockets[key.fd].close()
    return failures


def listener(address: str) -> socket.socket:
    """A socket that listens at a free port of an address of this host.

    Raises OSError: this host does not have the address.
    """
    sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.bind((address, 0))
        sock.listen(1024)
    except OSError:
        sock.close()
        raise
    return sock
