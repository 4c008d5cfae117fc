"""Sockets of both kinds, and messages in a stream of bytes."""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from socket_kinds import Kind, connected, hear
from waiting import LONG, came, until

from kvstore.errors import WireError
from kvstore.transport.memory import SMALL
from kvstore.transport.sockets import link as links
from kvstore.transport.sockets.link import Link, Outgoing
from kvstore.transport.sockets.socket_transport import SocketTransport
from kvstore.transport.sockets.stream import GREETING, MAX_FRAMES, Incoming, packed
from kvstore.transport.transport import MAX_FRAME

# ---- sockets of both kinds: what the conformance suite does not know of


def test_what_fits_leaves_in_the_call_that_sends_it(ends: tuple[SocketTransport, SocketTransport, bytes]):
    listener, other, link = ends
    other.send(link, [b"first"])  # which has perhaps waited for the connection
    received = came(listener)
    listener.send(received[0], [b"head", b"x" * 1000])
    assert not listener.courier.needed, "no thread was needed"
    assert other.recv(LONG) is not None


def test_a_link_that_is_lost_is_made_anew_and_says_so(ends: tuple[SocketTransport, SocketTransport, bytes]):
    listener, other, link = ends
    other.send(link, [b"before"])
    received = came(listener)
    (made,) = [link.socket for link in other.links.values()]
    assert made is not None
    listener.send(received[0], [b"read before the end"])
    until(lambda: bool(select.select([made], [], [], 0)[0]), "the answer is here")
    made.shutdown(socket.SHUT_RDWR)
    assert other.recv(LONG) == (link, [b"read before the end"])
    for _ in range(3):  # of which none can leave before it is told
        other.send(link, [b"lost"])
    assert other.recv(LONG) == (link, [])
    other.send(link, [b"after"])
    again = came(listener)
    assert again[1] == [b"after"]
    assert again[0] != received[0]
    listener.send(received[0], [b"nobody reads this"])
    listener.send(again[0], [b"answer"])
    assert other.recv(LONG) == (link, [b"answer"])


def test_a_link_may_be_lost_again_before_anybody_is_told(kind: Kind, monkeypatch: pytest.MonkeyPatch):
    places, cuts = kind.places(), 0
    really = places.admit

    def cut(made: socket.socket) -> bool:
        nonlocal cuts
        if cuts:
            cuts -= 1
            made.shutdown(socket.SHUT_RDWR)
        return really(made)

    monkeypatch.setattr(places, "admit", cut)
    listener, other = kind.listening(), kind.new(places=places)
    link = other.connect(kind.endpoint)
    other.send(link, [b"0"])
    hear(listener)
    (lost,) = other.links.values()
    for number in range(1, 4):
        assert lost.socket is not None
        cuts = 2  # of the connections that take the place of this one
        lost.socket.shutdown(socket.SHUT_RDWR)

        def heard(number: int = number) -> bool:
            told = other.recv(0.01)
            if told is not None:
                assert told == (link, [])
                other.send(link, [b"%d" % number])  # as a client does that has not been answered
            received = listener.recv(0.01)
            if received is None:
                return False
            assert received[1] == [b"%d" % number]
            listener.admit(received[0])
            return True

        until(heard, "what was sent when the last loss was told", step=0.0)
        assert cuts == 0


def test_a_peer_that_does_not_read_delays_nobody_else(kind: Kind):
    listener, slow, quick = kind.listening(), kind.new(), kind.new()
    peers = []
    for other in (slow, quick):
        other.send(other.connect(kind.endpoint), [b"hello"])
        peers.append(hear(listener))
    listener.send(peers[0], [b"head", bytes(64 << 20)])
    for _ in range(20):
        listener.send(peers[1], [b"head", bytes(1 << 20)])
        received = came(quick)
        assert len(received[1][1]) == 1 << 20
    received = came(slow)
    assert len(received[1][1]) == 64 << 20


def test_a_link_goes_on_with_whoever_listens_next(kind: Kind):
    first, other = kind.listening(), kind.new()
    link = other.connect(kind.endpoint)
    other.send(link, [b"1"])
    assert first.recv(LONG) is not None
    first.close()
    assert other.recv(0.05) is None
    second = kind.listening()

    def comes() -> bool:
        assert other.recv(0) in (None, (link, []))
        other.send(link, [b"2"])
        return second.recv(0.05) is not None

    until(comes, "the link is made again")


def test_who_hangs_up_without_a_word_is_not_called_all_the_time(kind: Kind, monkeypatch: pytest.MonkeyPatch):
    calls = []

    def hang_up(made: socket.socket) -> bool:
        calls.append(made)
        return False

    places = kind.places()
    monkeypatch.setattr(places, "admit", hang_up)
    listener = kind.listening(places=places)
    other = kind.new()
    link = other.connect(kind.endpoint)
    end = time.monotonic() + 0.6
    while time.monotonic() < end:
        assert listener.recv(0.005) is None
        assert other.recv(0.005) in (None, (link, []))
    assert 2 <= len(calls) <= 8, "after 20 ms, 40, 80, ..."


def test_a_link_that_the_other_side_has_given_up_is_forgotten(kind: Kind):
    listener, other = kind.listening(), kind.new()
    other.send(other.connect(kind.endpoint), [b"hello"])
    peer = hear(listener)
    assert not listener.gone(peer)
    for _ in range(40):
        listener.send(peer, [b"head", bytes(1 << 20)])  # of which the courier has the most
    other.close()
    until(lambda: listener.recv(0.02) is None and listener.gone(peer), "the link to be forgotten")
    listener.send(peer, [b"nobody"])


def test_who_is_refused_is_made_anew_and_asks_again(ends: tuple[SocketTransport, SocketTransport, bytes]):
    listener, other, link = ends
    for frames in ([b"bad"], [b"never looked at"]):
        other.send(link, frames)
    received = came(listener)
    assert received[1] == [b"bad"]
    listener.refuse(received[0])
    assert listener.gone(received[0])
    assert other.recv(LONG) == (link, [])
    other.send(link, [b"here"])
    again = came(listener)
    assert again[0] != received[0]
    assert again[1] == [b"here"]
    assert not listener.gone(again[0])


def test_a_link_of_this_side_cannot_be_refused(ends: tuple[SocketTransport, SocketTransport, bytes]):
    listener, other, link = ends
    other.send(link, [b"question"])
    received = came(listener)
    for answer in (b"bad", b"good"):
        listener.send(received[0], [answer])
    assert other.recv(LONG) == (link, [b"bad"])
    other.refuse(link)
    assert other.recv(LONG) == (link, [b"good"]), "what has come over it stays, and above all that it was made anew"
    other.admit(link)
    assert not other.gone(link)
    other.send(link, [b"still"])
    received = came(listener)
    assert received[1] == [b"still"]


def test_no_thread_is_started_after_connecting(
    ends: tuple[SocketTransport, SocketTransport, bytes], monkeypatch: pytest.MonkeyPatch
):
    """Python 3.12 starts none while a program ends, which is when the last messages leave."""
    listener, other, link = ends
    monkeypatch.setattr(threading.Thread, "start", None)
    other.send(link, [bytes(8 << 20)])
    received = came(listener)
    assert len(received[1][0]) == 8 << 20
    listener.close()
    assert other.recv(0.1) is None
    assert other.links[link].lonely, "and goes on being seen to"


def test_what_does_not_fit_leaves_although_its_sender_does_nothing_more(
    ends: tuple[SocketTransport, SocketTransport, bytes],
):
    listener, other, link = ends
    large = bytes(range(256)) * (1 << 16)
    for _ in range(3):
        other.send(link, [b"head", large])
    other.send(link, [b"last"])
    for _ in range(3):
        received = came(listener)
        assert bytes(received[1][1]) == large
    received = came(listener)
    assert received[1] == [b"last"]


def test_both_may_send_more_than_fits_before_either_receives(ends: tuple[SocketTransport, SocketTransport, bytes]):
    listener, other, link = ends
    other.send(link, [b"hello"])
    received = came(listener)
    for _ in range(4):
        other.send(link, [b"to", bytes(1 << 22)])
        listener.send(received[0], [b"back", bytes(1 << 22)])
    for end in (listener, other):
        for _ in range(4):
            message = came(end)
            assert len(message[1][1]) == 1 << 22


def test_close_waits_for_what_is_queued_as_long_as_it_may(ends: tuple[SocketTransport, SocketTransport, bytes]):
    listener, other, link = ends
    other.send(link, [b"head", bytes(8 << 20)])
    closing = threading.Thread(target=other.close, args=(LONG,))
    closing.start()
    received = listener.recv(LONG)
    closing.join(LONG)
    assert not closing.is_alive()
    assert received is not None
    assert len(received[1][1]) == 8 << 20


def test_what_is_sent_last_arrives_although_answers_are_not_read(kind: Kind):
    listener = kind.listening()
    for number in range(20):
        other = kind.new()
        other.send(other.connect(kind.endpoint), [b"hello"])
        listener.send(hear(listener), [b"an answer"])  # which nobody reads: to close is to reset the connection
        other.send(b"to:0", [b"last", bytes([number]) * (1 << 18)])
        closing = threading.Thread(target=other.close, args=(LONG,))
        closing.start()
        received = came(listener)
        assert bytes(received[1][1]) == bytes([number]) * (1 << 18)
        closing.join(LONG)
        assert not closing.is_alive()


def test_who_takes_nothing_of_what_is_sent_is_dropped_and_what_waited_is_freed(
    ends: tuple[SocketTransport, SocketTransport, bytes], kind: Kind, monkeypatch: pytest.MonkeyPatch
):
    listener, other, link = ends
    other.send(link, [b"question"])
    received = came(listener)
    for _ in range(8):
        listener.send(received[0], [bytes(8 << 20)])
    (answers,) = (link.queue for link in listener.links.values())
    assert answers
    monkeypatch.setattr(links, "STALLED_S", 0.1)
    with connected(kind, [b"hello"]):
        listener.send(hear(listener), [bytes(8 << 20)])  # the courier looks at all links when there is something new
    until(lambda: listener.recv(0.02) is None and listener.gone(received[0]), "the link to be dropped")
    assert not answers
    while other.recv(LONG) != (link, []):
        pass
    other.send(link, [b"here"])
    hear(listener)


@pytest.mark.parametrize("kind", ["unix"], indirect=True)  # it takes a while, and a link counts alike over both kinds
def test_who_takes_a_little_now_and_then_is_not(kind: Kind, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(links, "STALLED_S", 2.0)
    listener = kind.listening()
    with connected(kind, [b"hello"]) as made:
        peer, left = hear(listener), 32 << 20
        listener.send(peer, [bytes(left)])
        for _ in range(6):
            time.sleep(0.5)
            assert listener.recv(0) is None
            for _ in range(4):
                left -= len(made.recv(1 << 20))
        assert not listener.gone(peer)
        while left > 0:
            left -= len(made.recv(1 << 20))


# ---- messages in a stream of bytes: whatever the pieces in which it comes, the same messages; else an error


SIZES = st.sampled_from([0, 1, 7, 100, SMALL - 1, SMALL, SMALL + 1, 40_000, 70_000, 200_000])
MESSAGES = st.lists(st.lists(SIZES, min_size=1, max_size=6), max_size=6)


def frame(size: int, seed: int) -> bytes:
    return bytes((seed + i) % 251 for i in range(min(size, 251))) * (size // 251 + 1)


def heard(stream: bytes, pieces: list[int]) -> list[list[bytes]]:
    """What comes out if the stream comes in pieces of these sizes, over and over."""
    incoming, messages, at, turn = Incoming(), [], 0, 0
    stream = GREETING + stream
    while at < len(stream):
        room = incoming.room()
        assert len(room) > 0
        count = min(len(room), pieces[turn % len(pieces)], len(stream) - at)
        room[:count] = stream[at : at + count]
        messages += incoming.take(count)
        at, turn = at + count, turn + 1
    return [[bytes(part) for part in message] for message in messages]


@given(MESSAGES, st.lists(st.sampled_from([1, 3, 100, 5000, 65_536, 1 << 20]), min_size=1, max_size=4))
def test_messages_come_whole_and_in_order_whatever_the_pieces(sizes: list[list[int]], pieces: list[int]):
    sent = [[frame(size, 7 * i + j)[:size] for j, size in enumerate(message)] for i, message in enumerate(sizes)]
    stream = b"".join(bytes(part) for message in sent for part in packed(message))
    if len(stream) > 100_000:
        pieces = [max(piece, 1000) for piece in pieces]
    assert heard(stream, pieces) == sent


def test_in_a_large_frame_a_good_part_of_it_is_worth_waking_up_for():
    incoming, large = Incoming(), 1 << 20
    start = GREETING + struct.pack("<IQQ", 2, 1, large) + b"x"
    assert incoming.enough == 1
    for at in range(len(start)):
        incoming.room()[:1] = start[at : at + 1]
        incoming.take(1)
        assert incoming.enough == 1 or at == len(start) - 1
    assert incoming.enough == 256 << 10
    assert incoming.take(large - 100) == []
    assert incoming.enough == 100, "no more than will come"
    assert len(incoming.take(100)) == 1
    assert incoming.enough == 1


def test_a_message_of_very_many_frames():
    sent = [b"%d" % number for number in range(20_000)]
    assert heard(b"".join(map(bytes, packed(sent))) * 2, [50_000]) == [sent, sent]


def test_large_frames_are_sent_and_received_where_they_lie():
    large = bytearray(1 << 20)
    header, small, part = packed([b"head", large])
    assert bytes(header) == struct.pack("<IQQ", 2, 4, 1 << 20)
    assert bytes(small) == b"head"
    assert part is large
    incoming = Incoming()
    room = incoming.room()
    start = GREETING + bytes(header) + bytes(small)
    room[: len(start)] = start
    assert incoming.take(len(start)) == []
    assert incoming.greeted
    room = incoming.room()
    assert len(room) == 1 << 20, "the rest is received in one piece, into the frame itself"
    (message,) = incoming.take(1 << 20)
    assert memoryview(message[1]).obj is room.obj
    assert not memoryview(message[0]).readonly, "torch takes no memory that it must not write"


def test_who_has_not_greeted_takes_little_memory():
    incoming = Incoming()
    assert len(incoming.room()) < 1000
    for at in range(len(GREETING)):
        assert not incoming.greeted
        incoming.room()[:1] = GREETING[at : at + 1]
        assert incoming.take(1) == []
    assert incoming.greeted
    assert len(incoming.room()) > SMALL


@pytest.mark.parametrize(
    "start",
    [
        struct.pack("<I", 0),
        struct.pack("<I", MAX_FRAMES + 1),
        struct.pack("<IQ", 1, MAX_FRAME + 1),
        struct.pack("<IQQ", 2, 1, 1 << 63),
    ],
)
def test_what_is_no_stream_of_messages_is_an_error(start: bytes):
    with pytest.raises(WireError, match=r"a message of|a frame of"):
        heard(start, [1])


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n", b"kvstore\x02", b"\0" * 8, struct.pack("<IQ", 1, 4) + b"head"])
def test_who_does_not_greet_is_no_stream_of_messages(said: bytes):
    incoming = Incoming()
    incoming.room()[: len(said)] = said
    with pytest.raises(WireError, match="must begin with the greeting"):
        incoming.take(len(said))
    assert not incoming.greeted


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
