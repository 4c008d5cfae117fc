"""Which transport a job's links go over."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.job.config import Config
from kvstore.transport.transport import Transport


def links(config: Config) -> Callable[[], Transport]:
    """Return what makes ends of links.

    where the scheduler is     KVSTORE_TRANSPORT=zeromq     else
    ipc://                     ZeroMQ                       unix sockets
    tcp://, without keys       ZeroMQ                       TCP
    tcp://, with keys          ZeroMQ with CURVE            ZeroMQ with CURVE
    """
    inside = config.root.startswith("ipc://")
    if config.transport == "zeromq" or (config.keys is not None and not inside):
        return _zeromq(config, inside)
    if inside:
        from kvstore.transport.sockets.socket_transport import UnixTransport

        return UnixTransport
    from kvstore.transport.sockets.socket_transport import TcpTransport

    return lambda: TcpTransport(config.root_fd, config.congestion, config.pacing)


def _zeromq(config: Config, inside: bool) -> Callable[[], Transport]:
    from kvstore.transport.zeromq import ZmqTransport

    keys = None if inside else config.keys  # the directory keeps strangers out
    congestion = "" if inside else config.congestion
    return lambda: ZmqTransport(config.root_fd, keys, congestion)
