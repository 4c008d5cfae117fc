"""One link over a socket, alone."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.transport.sockets.link import Link, Outgoing
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


def message(name: bytes) -> list[memoryview]:
    """A message in three parts."""
    return [memoryview(name), memoryview(b":" * len(name)), memoryview(b".")]


def whole(name: bytes) -> bytes:
    return b"".join(message(name))


def leave(queue: Outgoing, step: int = 1 << 20, most: int = 256) -> bytes:
    """All that leaves, so many bytes at a time."""
    left = b""
    while queue:
        some = b"".join(queue.head(most))[:step]
        queue.gone(len(some))
        left += some
    return left


def filled(*messages: tuple[bytes, int | None]) -> Outgoing:
    queue = Outgoing()
    for name, priority in messages:
        queue.put(message(name), priority)
    return queue


def order(*names: bytes) -> bytes:
    return b"".join(map(whole, names))


@pytest.mark.parametrize("step", [1, 2, 3, 1000])
@pytest.mark.parametrize("most", [1, 2, 256])
def test_messages_without_a_priority_go_in_order(step: int, most: int):
    assert leave(filled((b"a", None), (b"bb", None), (b"c", None)), step, most) == order(b"a", b"bb", b"c")


def test_the_urgent_go_first_and_equals_in_order():
    queue = filled((b"a", -3), (b"b", -1), (b"c", -3), (b"d", 0), (b"e", -1))
    assert leave(queue) == order(b"d", b"b", b"e", b"a", b"c")


def test_what_has_no_priority_overtakes_nothing_and_is_not_overtaken():
    queue = filled((b"a", 1), (b"b", 2), (b"wall", None), (b"c", 3), (b"d", 9))
    assert leave(queue) == order(b"b", b"a", b"wall", b"d", b"c")


def test_what_has_begun_is_finished_first():
    queue = filled((b"slow", 1))
    queue.head(1)
    queue.gone(2)
    queue.put(message(b"urgent"), 9)
    assert leave(queue) == whole(b"slow")[2:] + whole(b"urgent")


def test_what_must_be_said_first_goes_before_all():
    queue = filled((b"a", 9), (b"b", None))
    queue.first(memoryview(b"hello"))
    assert leave(queue, step=3) == b"hello" + order(b"a", b"b")


def test_what_is_cleared_is_gone_and_the_queue_goes_on():
    queue = filled((b"a", 1), (b"b", None))
    queue.head(1)
    queue.clear()
    assert not queue
    queue.put(message(b"c"), 1)
    assert leave(queue) == whole(b"c")


def test_copies_do_not_change_with_what_was_put():
    places = [bytearray(b"begun"), bytearray(b"waits")]
    queue = Outgoing()
    for place in places:
        queue.put([memoryview(place)], 1)
    queue.head(1)
    queue.gone(2)
    queue.detach()
    for place in places:
        place[:] = b"?????"
    assert leave(queue) == b"gunwaits"


PRIORITIES = st.one_of(st.none(), st.integers(-3, 3))


@given(st.lists(PRIORITIES, max_size=12), st.integers(1, 30))
def test_any_messages_leave_whole_by_section_then_priority_then_age(priorities: list[int | None], step: int):
    names = [bytes([97 + number]) * (1 + number) for number in range(len(priorities))]
    queue = filled(*zip(names, priorities, strict=True))
    expected: list[bytes] = []
    section: list[tuple[int, bytes]] = []
    for name, priority in [*zip(names, priorities, strict=True), (b"", None)]:
        if priority is not None:
            section.append((-priority, name))
            continue
        expected += [its for _, its in sorted(section, key=lambda entry: entry[0])]
        section.clear()
        expected.append(name)
    assert leave(queue, step) == order(*expected[:-1])
