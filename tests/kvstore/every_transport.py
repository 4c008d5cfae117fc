"""The transports that the tests in ``transport/conformance`` run on, and what they send."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

from jobkeys import variables
from waiting import LONG

from kvstore.job.curve_keys import CurveKeys
from kvstore.transport import Transport
from kvstore.transport.shm.shared_memory import SharedMemoryTransport
from kvstore.transport.sockets.socket_transport import TcpTransport, UnixTransport
from kvstore.transport.zeromq import ZmqTransport

MEMBERS = variables(3)  # of one job; their ends take turns
SIZES = (0, 1, 100, 64 << 10, 4 << 20)


class Ends:
    """Makes transports that can reach each other, and endpoints for them to listen at; closes them all.

    Attributes:
        kind: which transports.
    """

    def __init__(self, make: Callable[[], Transport], endpoint: str) -> None:
        self._make = make
        self.kind = ""
        self.endpoint = endpoint
        self._made: list[Transport] = []

    def new(self) -> Transport:
        self._made.append(self._make())
        return self._made[-1]

    def pair(self) -> tuple[Transport, Transport, bytes]:
        """A listener, another that has a link to it and is known, and that link."""
        listener, other = self.new(), self.new()
        self.endpoint = listener.bind(self.endpoint)
        link = other.connect(self.endpoint)
        other.send(link, [b"here"])
        assert receive(listener)[1] == [b"here"]
        return listener, other, link

    def close(self) -> None:
        for transport in self._made:
            transport.close()


def shared() -> Transport:
    return SharedMemoryTransport(ZmqTransport(), "conformance")


def near() -> Transport:
    return SharedMemoryTransport(UnixTransport(), "conformance")


def far() -> Transport:
    return SharedMemoryTransport(TcpTransport(), "conformance")


def secured() -> Callable[[], Transport]:
    numbers = itertools.count()
    return lambda: ZmqTransport(keys=CurveKeys.from_env(MEMBERS[next(numbers) % len(MEMBERS)]))


def both() -> Callable[[], Transport]:
    make = secured()
    return lambda: SharedMemoryTransport(make(), "conformance")


def receive(transport: Transport, timeout: float = LONG) -> tuple[bytes, list[memoryview]]:
    """The next message, whose sender is known from then on."""
    received = transport.recv(timeout)
    assert received is not None, "nothing came"
    transport.admit(received[0])
    return received[0], [memoryview(frame) for frame in received[1]]


def pattern(size: int, seed: int = 0) -> bytearray:
    return bytearray(random.Random(seed).randbytes(size))


def acquaint(listener: Transport, other: Transport, link: bytes) -> bytes:
    """Send large frames both ways, so that ends that share memory learn that they can; return the listener's link."""
    other.send(link, [b"head", pattern(64 << 10)])
    peer, _ = receive(listener)
    listener.send(peer, [b"head", pattern(64 << 10)])
    receive(other)
    return peer


def acquainted(ends: Ends) -> tuple[Transport, Transport, bytes]:
    """A pair of ends that share memory by now, if they can."""
    listener, other, link = ends.pair()
    acquaint(listener, other, link)
    return listener, other, link
