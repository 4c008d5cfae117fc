"""Which transport a job's links go over."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.errors import ConfigError
from kvstore.job.config import Config
from kvstore.transport.base import Transport


def links(config: Config) -> Callable[[], Transport]:
    """Return what makes ends of links: unix sockets or TCP, as the scheduler's are, and ZeroMQ for TCP with keys.

    Raises:
        ConfigError: a congestion control was chosen, and ZeroMQ takes none.
    """
    if config.root.startswith("ipc://"):
        from kvstore.transport.sockets.unix import UnixTransport

        return UnixTransport
    if config.keys is None:
        from kvstore.transport.sockets.tcp import TcpTransport

        return lambda: TcpTransport(config.root_fd, config.congestion, config.pacing)
    if config.congestion:
        raise ConfigError(
            f"KVSTORE_CONGESTION={config.congestion} is for links that are not encrypted; "
            "those with keys are ZeroMQ's, and have the system's: "
            "leave it out, and set the sysctl net.ipv4.tcp_congestion_control"
        )
    from kvstore.transport.zeromq.transport import ZmqTransport

    return lambda: ZmqTransport(config.root_fd, config.keys)
