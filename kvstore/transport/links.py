"""Which transport a job's links go over."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.config import Config
from kvstore.transport.base import Transport


def links(config: Config) -> Callable[[], Transport]:
    """Return what makes ends of links: unix sockets or TCP, as the scheduler's are, and ZeroMQ for TCP with keys."""
    if config.root.startswith("ipc://"):
        from kvstore.transport.unix import UnixTransport

        return UnixTransport
    if config.keys is None:
        from kvstore.transport.tcp import TcpTransport

        return lambda: TcpTransport(config.root_fd)
    from kvstore.transport.zeromq import ZmqTransport

    return lambda: ZmqTransport(config.root_fd, config.keys)
