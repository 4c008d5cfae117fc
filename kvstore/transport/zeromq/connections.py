"""The connections that a ZeroMQ socket makes: what each is given, and which are lost.

ZeroMQ makes lost connections again by itself. It tells only a monitor of either.
"""

from __future__ import annotations

import socket
import struct

import zmq

from kvstore.job.address import host_and_port
from kvstore.transport.system_errors import ignored
from kvstore.transport.tcp_sockets import set_congestion_control

_MONITOR = "inproc://connections"  # of the socket's own context
_EVENTS = zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
_EVENT = struct.Struct("=HI")  # of the first frame: which it is, and a number: of these, that of the system's socket
_V4 = "::ffff:"  # what ZeroMQ puts before IPv4 addresses where IPv6 is on


class Connections:
    """Watches the connections that a socket makes.

    A connection without a successful handshake cannot be lost: nothing has left over it.

    Args:
        context: the socket's, and of no other.
        sock: whose connections to watch.
        congestion: the congestion control that they are given; see ``set_congestion_control``.

    Attributes:
        monitor: is readable when there is something to find.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], sock: zmq.Socket[bytes], congestion: bytes = b""
    ) -> None:
        self._congestion = congestion
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
        """Return the endpoints to which a connection has been lost since they were last returned, or watched.

        New connections are given what they are to have.
        """
        lost: set[str] = set()
        while int(self.monitor.get(zmq.EVENTS)) & zmq.POLLIN:
            event, name = self.monitor.recv_multipart()
            kind, number = _EVENT.unpack(event)
            if kind == zmq.EVENT_CONNECTED:
                give(number, self._congestion)
                continue
            endpoints = {endpoint for endpoint in self._endpoints if may_be(endpoint, name.decode(errors="replace"))}
            if kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._begun |= endpoints
            else:
                lost |= endpoints & self._begun
        return lost

    def close(self) -> None:
        """Watch no more. The socket must be closed already."""
        self.monitor.close(linger=0)


def give(number: int, congestion: bytes) -> None:
    """Give the connection with a number a congestion control, unless it has ended already, or is none of TCP's.

    If ZeroMQ has closed it, its number may be that of another socket by now: all of this process's are to have the
    same. What is used is a copy, since nobody but ZeroMQ may close the original, whatever exception comes.
    """
    with ignored(), socket.fromfd(number, socket.AF_INET, socket.SOCK_STREAM) as made:
        set_congestion_control(made, congestion)


def may_be(endpoint: str, name: str) -> bool:
    """Whether ZeroMQ may call ``endpoint`` ``name``. That has an address where the endpoint may have a host's name."""
    if endpoint == name:
        return True
    (host, port), (other, number) = host_and_port(endpoint), host_and_port(name)
    return port == number and (_is_name(host) or host == other.removeprefix(_V4))


def _is_name(host: str) -> bool:
    return ":" not in host and bool(host.strip("0123456789."))
