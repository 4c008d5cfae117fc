"""Which transport a job's links go over."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.errors import ConfigError
from kvstore.job.config import Config
from kvstore.transport.base import Transport


def links(config: Config) -> Callable[[], Transport]:
    """Return what makes ends of links.

        where the scheduler is     KVSTORE_TRANSPORT=zeromq     else
        ipc://                     ZeroMQ                       unix sockets
        tcp://, without keys       ZeroMQ                       TCP
        tcp://, with keys          ZeroMQ with CURVE            ZeroMQ with CURVE

    Raises:
        ConfigError: a congestion control was chosen for links over TCP, and these are ZeroMQ's, which take none.
    """
    inside = config.root.startswith("ipc://")
    if config.transport == "zeromq" or (config.keys is not None and not inside):
        return _zeromq(config, inside)
    if inside:
        from kvstore.transport.sockets.unix import UnixTransport

        return UnixTransport
    from kvstore.transport.sockets.tcp import TcpTransport

    return lambda: TcpTransport(config.root_fd, config.congestion, config.pacing)


def _zeromq(config: Config, inside: bool) -> Callable[[], Transport]:
    from kvstore.transport.zeromq.transport import ZmqTransport

    if config.congestion and not inside:
        raise ConfigError(
            f"KVSTORE_CONGESTION={config.congestion!r} has no effect on links of ZeroMQ, which have the system's "
            "congestion control, and links with keys are ZeroMQ's: leave it out, and set the sysctl "
            "net.ipv4.tcp_congestion_control"
        )
    keys = None if inside else config.keys  # the directory keeps strangers out
    return lambda: ZmqTransport(config.root_fd, keys)
