"""One link over a socket, alone."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence

import pytest

from kvstore.transport.sockets.link import Link
from kvstore.transport.sockets.stream import GREETING, packed


class Interrupt(BaseException):
    """What the handler of a signal raises."""


class Interrupted(socket.socket):
    """A socket that sends a part, and then a signal comes."""

    over = False

    def sendmsg(self, buffers: Sequence[memoryview], *args: object) -> int:  # type: ignore[override]
        if self.over:
            return super().sendmsg(buffers, *args)  # type: ignore[arg-type]
        self.over = True
        super().sendmsg([buffers[0][:10]])
        raise Interrupt


@pytest.fixture
def pair() -> Iterator[tuple[Interrupted, socket.socket]]:
    near, far = socket.socketpair()
    with far, Interrupted(fileno=near.detach()) as made:
        far.settimeout(5.0)
        yield made, far


def test_after_an_exception_in_the_middle_of_a_send_nothing_more_goes_over_that_connection(
    pair: tuple[Interrupted, socket.socket],
) -> None:
    """The courier would send again what has left: the stream would shift, and values with it."""
    near, far = pair
    near.over = True
    link = Link(b"peer")
    link.take(near)
    assert link.flush()
    assert far.recv(100) == GREETING
    near.over = False
    with pytest.raises(Interrupt):
        link.put(packed([b"x" * 1000]))
    assert link.flush(), "nothing is left to do"
    assert not link.queue
    received = b""
    while data := far.recv(100):
        received += data
    assert len(received) == 10
