"""Tells which connections of a ZeroMQ socket are lost. ZeroMQ makes them again, and tells only a monitor."""

from __future__ import annotations

import struct

import zmq

from kvstore.job.address import host_and_port

_MONITOR = "inproc://losses"  # of the socket's own context
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
_EVENT = struct.Struct("=HI")  # of the first frame: which it is, and a number that depends on that
_V4 = "::ffff:"  # what ZeroMQ puts before IPv4 addresses where IPv6 is on


class Losses:
    """Watches a socket's connections.

    A connection without a successful handshake does not count: nothing has left over it.

    Args:
        context: the socket's, and of no other.
        sock: whose connections to watch.

    Attributes:
        monitor: is readable when there is something to find.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], sock: zmq.Socket[bytes]) -> None:
        self._socket = sock
        self._endpoints: set[str] = set()
        self._begun: set[str] = set()
        self.monitor = context.socket(zmq.PAIR)
        self.monitor.set(zmq.RCVHWM, 0)  # or ZeroMQ's own thread waits for who does not look
        sock.monitor(_MONITOR, _EVENTS)
        self.monitor.connect(_MONITOR)

    def watch(self, endpoint: str) -> None:
        """Watch those to ``endpoint``, from one on that begins now."""
        self._endpoints.add(endpoint)
        self._begun.discard(endpoint)

    def forget(self, endpoint: str) -> None:
        """Watch those to ``endpoint`` no more."""
        self._endpoints.discard(endpoint)
        self._begun.discard(endpoint)

    def find(self) -> set[str]:
        """Return the endpoints to which a connection has been lost since they were last returned, or watched."""
        lost: set[str] = set()
        while int(self.monitor.get(zmq.EVENTS)) & zmq.POLLIN:
            event, name = self.monitor.recv_multipart()
            kind, _ = _EVENT.unpack(event)
            endpoints = {endpoint for endpoint in self._endpoints if may_be(endpoint, name.decode(errors="replace"))}
            if kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._begun |= endpoints
            else:
                lost |= endpoints & self._begun
        return lost

    def close(self) -> None:
        """Watch no more. The socket must be closed already."""
        self.monitor.close(linger=0)


def may_be(endpoint: str, name: str) -> bool:
    """Whether ZeroMQ may call ``endpoint`` ``name``. That has an address where the endpoint may have a host's name."""
    if endpoint == name:
        return True
    (host, port), (other, number) = host_and_port(endpoint), host_and_port(name)
    return port == number and (_is_name(host) or host == other.removeprefix(_V4))


def _is_name(host: str) -> bool:
    return ":" not in host and bool(host.strip("0123456789."))
