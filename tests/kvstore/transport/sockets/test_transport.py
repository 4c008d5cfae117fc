"""Sockets of both kinds: what the conformance suite does not know of."""

from __future__ import annotations

import contextlib
import math
import select
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import LONG, until

from kvstore.transport.sockets import link as links
from kvstore.transport.sockets import transport as sockets
from kvstore.transport.sockets.strangers import Stranger, StrangerLimits, Strangers
from kvstore.transport.sockets.stream import GREETING, SHORT_BYTES, packed
from kvstore.transport.sockets.tcp import TcpTransport
from kvstore.transport.sockets.transport import SocketTransport
from kvstore.transport.sockets.unix import UnixTransport


class Kind:
    """Makes transports of one kind, and plain sockets that reach them."""

    def __init__(self, name: str, directory: Path) -> None:
        self.tcp = name == "tcp"
        self.endpoint = "tcp://127.0.0.1:0" if self.tcp else f"ipc://{directory}/here"
        self._made: list[SocketTransport] = []

    def new(self, limits: StrangerLimits | None = None) -> SocketTransport:
        self._made.append(TcpTransport(limits=limits) if self.tcp else UnixTransport(limits))
        return self._made[-1]

    def listening(self, limits: StrangerLimits | None = None) -> SocketTransport:
        made = self.new(limits)
        self.endpoint = made.bind(self.endpoint)
        return made

    def stranger(self) -> socket.socket:
        place = self.endpoint.partition("://")[2]
        made = socket.socket(socket.AF_INET if self.tcp else socket.AF_UNIX, socket.SOCK_STREAM)
        made.settimeout(LONG)
        made.connect(("127.0.0.1", int(place.rpartition(":")[2])) if self.tcp else place)
        return made

    def close(self) -> None:
        for transport in self._made:
            transport.close()


@pytest.fixture(params=["unix", "tcp"])
def kind(request: pytest.FixtureRequest) -> Iterator[Kind]:
    with tempfile.TemporaryDirectory() as directory:
        made = Kind(request.param, Path(directory))
        yield made
        made.close()


def hear(listener: SocketTransport) -> bytes:
    """Take a message; its sender is known from then on."""
    received = listener.recv(LONG)
    assert received is not None
    listener.admit(received[0])
    return received[0]


@pytest.fixture
def ends(kind: Kind) -> tuple[SocketTransport, SocketTransport, bytes]:
    """A listener, another that has a link to it and is known, and that link."""
    listener, other = kind.listening(), kind.new()
    link = other.connect(kind.endpoint)
    other.send(link, [b"here"])
    hear(listener)
    return listener, other, link


def test_what_fits_leaves_in_the_call_that_sends_it(ends: tuple[SocketTransport, SocketTransport, bytes]):
    listener, other, link = ends
    other.send(link, [b"first"])  # which has perhaps waited for the connection
    received = listener.recv(LONG)
    assert received is not None
    listener.send(received[0], [b"head", b"x" * 1000])
    assert not listener._courier.needed, "no thread was needed"
    assert other.recv(LONG) is not None


def test_a_link_that_is_lost_is_made_anew_and_says_so(ends: tuple[SocketTransport, SocketTransport, bytes]):
    listener, other, link = ends
    other.send(link, [b"before"])
    received = listener.recv(LONG)
    assert received is not None
    (made,) = [its.socket for its in other._links.values()]
    assert made is not None
    listener.send(received[0], [b"read before the end"])
    until(lambda: bool(select.select([made], [], [], 0)[0]), "the answer is here")
    made.shutdown(socket.SHUT_RDWR)
    assert other.recv(LONG) == (link, [b"read before the end"])
    for _ in range(3):  # of which none can leave before it is told
        other.send(link, [b"lost"])
    assert other.recv(LONG) == (link, [])
    other.send(link, [b"after"])
    again = listener.recv(LONG)
    assert again is not None
    assert again[1] == [b"after"]
    assert again[0] != received[0]
    listener.send(received[0], [b"nobody reads this"])
    listener.send(again[0], [b"answer"])
    assert other.recv(LONG) == (link, [b"answer"])


def test_a_link_may_be_lost_again_before_anybody_is_told(ends: tuple[SocketTransport, SocketTransport, bytes]):
    listener, other, link = ends
    (its,) = other._links.values()
    for number in range(3):
        other.send(link, [b"%d" % number])
        received = listener.recv(LONG)
        assert received is not None
        assert received[1] == [b"%d" % number]
        listener.admit(received[0])
        for count in (1, 2):
            before = its.socket
            assert before is not None
            before.shutdown(socket.SHUT_RDWR)
            while its.socket is before:
                other._read(its)  # sees the end, and nobody asks for messages
            until(lambda count=count: len(other._received) == count, "the link is made anew")  # it is used by then
        assert [other.recv(LONG), other.recv(LONG)] == [(link, [])] * 2


def test_no_thread_is_started_after_connecting(
    ends: tuple[SocketTransport, SocketTransport, bytes], monkeypatch: pytest.MonkeyPatch
):
    """Python 3.12 starts none while a program ends, which is when the last messages leave."""
    listener, other, link = ends
    monkeypatch.setattr(threading.Thread, "start", None)
    other.send(link, [bytes(8 << 20)])
    received = listener.recv(LONG)
    assert received is not None
    assert len(received[1][0]) == 8 << 20
    listener.close()
    assert other.recv(0.1) is None
    assert other._links[link].lonely, "and goes on being seen to"


def test_what_does_not_fit_leaves_although_its_sender_does_nothing_more(
    ends: tuple[SocketTransport, SocketTransport, bytes],
):
    listener, other, link = ends
    large = bytes(range(256)) * (1 << 16)
    for _ in range(3):
        other.send(link, [b"head", large])
    other.send(link, [b"last"])
    for _ in range(3):
        received = listener.recv(LONG)
        assert received is not None
        assert bytes(received[1][1]) == large
    received = listener.recv(LONG)
    assert received is not None
    assert received[1] == [b"last"]


def test_both_may_send_more_than_fits_before_either_receives(ends: tuple[SocketTransport, SocketTransport, bytes]):
    listener, other, link = ends
    other.send(link, [b"hello"])
    received = listener.recv(LONG)
    assert received is not None
    for _ in range(4):
        other.send(link, [b"to", bytes(1 << 22)])
        listener.send(received[0], [b"back", bytes(1 << 22)])
    for end in (listener, other):
        for _ in range(4):
            message = end.recv(LONG)
            assert message is not None
            assert len(message[1][1]) == 1 << 22


def test_a_peer_that_does_not_read_delays_nobody_else(kind: Kind):
    listener, slow, quick = kind.listening(), kind.new(), kind.new()
    peers = []
    for other in (slow, quick):
        other.send(other.connect(kind.endpoint), [b"hello"])
        peers.append(hear(listener))
    listener.send(peers[0], [b"head", bytes(64 << 20)])
    for _ in range(20):
        listener.send(peers[1], [b"head", bytes(1 << 20)])
        received = quick.recv(LONG)
        assert received is not None
        assert len(received[1][1]) == 1 << 20
    received = slow.recv(LONG)
    assert received is not None
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


def test_who_hangs_up_without_a_word_is_not_called_all_the_time(kind: Kind):
    listener = kind.listening()
    calls = []

    def hang_up(made: socket.socket) -> bool:
        calls.append(made)
        return False

    listener._places.admit = hang_up  # type: ignore[method-assign]
    other = kind.new()
    link = other.connect(kind.endpoint)
    end = time.monotonic() + 0.6
    while time.monotonic() < end:
        assert listener.recv(0.005) is None
        assert other.recv(0.005) in (None, (link, []))
    assert 2 <= len(calls) <= 8, "after 20 ms, 40, 80, ..."


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
        received = listener.recv(LONG)
        assert received is not None
        assert bytes(received[1][1]) == bytes([number]) * (1 << 18)
        closing.join(LONG)
        assert not closing.is_alive()


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        GREETING[:3],
        GREETING + b"\xff" * 100,
        GREETING + struct.pack("<IQ", 1, 1 << 62),
        GREETING + struct.pack("<IQ", 1, 1 << 36) + b"x",
        GREETING + struct.pack("<IQ", 1, SHORT_BYTES + 1) + b"x",
        GREETING + struct.pack("<I5Q", 5, *[0] * 5),
        GREETING + b"\x01",
    ],
    ids=[
        "noise",
        "half a greeting",
        "a greeting and noise",
        "too large",
        "more than there is memory",
        "long",
        "many frames",
        "half a number",
    ],
)
def test_who_speaks_otherwise_is_cut_off_and_costs_others_nothing(
    ends: tuple[SocketTransport, SocketTransport, bytes], kind: Kind, said: bytes
):
    listener, other, link = ends
    with kind.stranger() as stranger:
        stranger.sendall(said)
        with contextlib.suppress(OSError):  # it may have been cut off already
            stranger.shutdown(socket.SHUT_WR)
        assert listener.recv(0.2) is None
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(100) in (b"", GREETING)
            assert stranger.recv(1) == b""
    other.send(link, [b"x"])
    received = listener.recv(LONG)
    assert received is not None
    assert received[1] == [b"x"]


@pytest.mark.parametrize("said", [b"", GREETING, GREETING + b"".join(map(bytes, packed([b"hello"])))])
def test_who_says_nothing_is_cut_off_and_who_is_known_is_not(kind: Kind, said: bytes):
    listener, other = kind.listening(StrangerLimits(silence_s=0.1)), kind.new()
    other.send(other.connect(kind.endpoint), [b"hello"])
    known = hear(listener)
    with kind.stranger() as stranger:
        stranger.sendall(said)
        ended = threading.Event()

        def listen() -> None:
            while stranger.recv(100):
                pass
            ended.set()

        threading.Thread(target=listen, daemon=True).start()

        def cut_off() -> bool:
            listener.recv(0.05)
            return ended.is_set()

        until(cut_off, "the stranger to be cut off")
    listener.send(known, [b"still here"])
    assert other.recv(LONG) is not None


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


# ---- strangers


def connected(kind: Kind, *messages: list[bytes]) -> socket.socket:
    """A stranger who has greeted, and said these messages."""
    made = kind.stranger()
    made.sendall(GREETING + b"".join(part for frames in messages for part in map(bytes, packed(frames))))
    return made


def ended(made: socket.socket) -> bool:
    """Whether the other side has ended a connection."""
    made.setblocking(False)
    with contextlib.suppress(ConnectionResetError):
        while True:
            try:
                if not made.recv(1 << 16):
                    return True
            except BlockingIOError:
                return False
    return True


def test_of_too_many_strangers_the_one_that_has_been_silent_for_longest_goes(
    kind: Kind,
):
    listener = kind.listening(StrangerLimits(links=4))
    strangers = [connected(kind, [b"%d" % number]) for number in range(4)]
    for _ in strangers:
        assert listener.recv(LONG) is not None
    strangers[0].sendall(b"".join(map(bytes, packed([b"again"]))))
    assert listener.recv(LONG) is not None
    strangers += [connected(kind, [b"%d" % number]) for number in range(4, 6)]
    for _ in range(2):
        assert listener.recv(LONG) is not None
    until(lambda: [ended(made) for made in strangers] == [False, True, True, False, False, False], "two to be dropped")
    for made in strangers:
        made.close()


def test_thousands_of_strangers_cost_no_more_than_a_few(kind: Kind):
    """They have greeted and say nothing more; who is known is heard all the same, and so is who comes."""
    listener, known, late = kind.listening(StrangerLimits(links=8)), kind.new(), kind.new()
    link = known.connect(kind.endpoint)
    known.send(link, [b"here"])
    hear(listener)
    strangers = []
    for _ in range(500):
        strangers.append(connected(kind))
        assert listener.recv(0) is None
    until(lambda: listener.recv(0.01) is None and sum(map(ended, strangers)) == 492, "all but eight to be dropped")
    known.send(link, [b"head", bytes(1 << 20)])
    received = listener.recv(LONG)
    assert received is not None
    assert len(received[1][1]) == 1 << 20
    late.send(late.connect(kind.endpoint), [b"here"])
    hear(listener)
    for made in strangers:
        made.close()


def test_a_stranger_is_taken_one_message_at_a_time_and_what_follows_waits_until_it_is_known(kind: Kind):
    listener, other = kind.listening(), kind.new()
    link = other.connect(kind.endpoint)
    messages = [[b"here"], [b"second"], [b"head", bytes(1 << 20)], [b"last"]]
    for frames in messages:
        other.send(link, frames)
    first = listener.recv(LONG)
    assert first is not None
    assert listener._strangers.links.keys() == {first[0]}
    assert first[1] == messages[0]
    listener.admit(first[0])
    listener.admit(first[0])
    for frames in messages[1:]:
        received = listener.recv(LONG)
        assert received is not None
        assert received == (first[0], frames)


def test_who_is_no_member_may_go_on_in_short_messages(kind: Kind):
    listener, other = kind.listening(), kind.new()
    link = other.connect(kind.endpoint)
    for number in range(20):
        other.send(link, [b"%d" % number, b"", bytes(SHORT_BYTES - 10)])
    for number in range(20):
        received = listener.recv(LONG)
        assert received is not None
        assert received[1] == [b"%d" % number, b"", bytes(SHORT_BYTES - 10)]
        listener.send(received[0], [b"no"])
        assert other.recv(LONG) == (link, [b"no"])


def test_who_is_refused_is_made_anew_and_asks_again(ends: tuple[SocketTransport, SocketTransport, bytes]):
    listener, other, link = ends
    for frames in ([b"bad"], [b"never looked at"]):
        other.send(link, frames)
    until(lambda: len(listener._received) == 2 or listener.recv(0.01), "both to be here")
    received = listener.recv(LONG)
    assert received is not None
    listener.refuse(received[0])
    assert listener.gone(received[0])
    assert other.recv(LONG) == (link, [])
    other.send(link, [b"here"])
    again = hear(listener)
    assert again != received[0]
    assert not listener.gone(again)


def test_a_link_of_this_side_cannot_be_refused(ends: tuple[SocketTransport, SocketTransport, bytes]):
    listener, other, link = ends
    other.send(link, [b"question"])
    received = listener.recv(LONG)
    assert received is not None
    for answer in (b"bad", b"good"):
        listener.send(received[0], [answer])
    assert other.recv(LONG) == (link, [b"bad"])
    other.refuse(link)
    assert other.recv(LONG) == (link, [b"good"]), "what has come over it stays, and above all that it was made anew"
    other.admit(link)
    assert not other.gone(link)
    other.send(link, [b"still"])
    received = listener.recv(LONG)
    assert received is not None
    assert received[1] == [b"still"]


def test_a_stranger_who_reads_no_answers_is_dropped(kind: Kind):
    listener = kind.listening()
    with connected(kind, [b"hello"]) as made:
        received = listener.recv(LONG)
        assert received is not None

        def dropped() -> bool:
            listener.send(received[0], [bytes(1 << 20)])
            return listener.gone(received[0])

        until(dropped, "what has not been read to be too much", step=0)
        until(lambda: ended(made), "the end")
    assert not listener._courier.needed


def test_who_takes_nothing_of_what_is_sent_is_dropped_and_what_waited_is_freed(
    ends: tuple[SocketTransport, SocketTransport, bytes], monkeypatch: pytest.MonkeyPatch
):
    listener, other, link = ends
    other.send(link, [b"question"])
    received = listener.recv(LONG)
    assert received is not None
    for _ in range(8):
        listener.send(received[0], [bytes(8 << 20)])
    (answers,) = (its.queue for its in listener._links.values())
    assert answers
    monkeypatch.setattr(links, "STALLED_S", 0.1)
    listener.send(received[0], [b"another"])  # nobody has waited for so long yet, and the courier does not look
    with listener._changed:
        listener._courier.call()
    until(lambda: listener.recv(0.02) is None and listener.gone(received[0]), "the link to be dropped")
    assert not answers
    while other.recv(LONG) != (link, []):
        pass
    other.send(link, [b"here"])
    hear(listener)


def test_who_takes_a_little_now_and_then_is_not(kind: Kind, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(links, "STALLED_S", 2.0)
    listener = kind.listening()
    with connected(kind, [b"hello"]) as made:
        peer, left = hear(listener), 32 << 20
        listener.send(peer, [bytes(left)])
        for _ in range(8):
            time.sleep(0.5)
            assert listener.recv(0) is None
            for _ in range(4):
                left -= len(made.recv(1 << 20))
        assert not listener.gone(peer)
        while left > 0:
            left -= len(made.recv(1 << 20))


# ---- how much of the time strangers get


class Clock:
    """The time, which goes on when a test says so, and whenever a stranger is heard."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cost: float) -> None:
        self.now = 100.0
        self._cost = cost
        really = Strangers._hear

        def hear(strangers: Strangers, stranger: Stranger) -> object:
            self.now += self._cost
            return really(strangers, stranger)

        for name in ("monotonic", "thread_time"):
            monkeypatch.setattr(sockets.time, name, lambda: self.now)
        monkeypatch.setattr(Strangers, "_hear", hear)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """To hear a stranger takes a second."""
    return Clock(monkeypatch, 1.0)


def test_strangers_wait_when_their_time_is_over_and_members_do_not(slow: Clock, kind: Kind):
    listener = kind.listening(
        StrangerLimits(share=0.1, burst_s=1.5, pause_s=0.5, turn_s=10.0, step_s=10.0, silence_s=1e6)
    )
    member = connected(kind, [b"here"])
    known = hear(listener)
    strangers = [connected(kind, [b"%d" % number]) for number in range(4)]
    until(lambda: listener.recv(0.0), "the first of them")
    until(lambda: listener.recv(0.0), "the second")
    began = slow.now
    for number in range(3):
        member.sendall(b"".join(map(bytes, packed([b"%d" % number]))))
        assert listener.recv(LONG) == (known, [b"%d" % number])
    assert slow.now == began, "no stranger has been heard, though two have something to say"
    slow.now += 9.0
    assert listener.recv(0.0) is None
    slow.now += 2.0  # 0.5 s of debt, and 0.5 s to go on with, at a tenth of the time
    until(lambda: listener.recv(0.0), "the third")
    assert listener.recv(0.0) is None
    for made in (member, *strangers):
        made.close()


def test_newcomers_wait_too(slow: Clock, kind: Kind):
    listener = kind.listening(
        StrangerLimits(share=0.1, burst_s=0.5, pause_s=0.5, turn_s=10.0, step_s=10.0, silence_s=1e6)
    )
    first = connected(kind, [b"here"])
    hear(listener)
    second = connected(kind, [b"here"])
    assert listener.recv(0.0) is None
    assert not listener._strangers.links, "it has not even been let in"
    slow.now += 10.5
    hear(listener)
    first.close()
    second.close()


@pytest.mark.parametrize("refused", [False, True])
def test_what_a_message_takes_is_at_the_cost_of_strangers_if_it_is_refused_and_given_back_once_they_are_known(
    slow: Clock, kind: Kind, refused: bool
):
    listener = kind.listening(
        StrangerLimits(share=0.1, burst_s=5.0, pause_s=0.5, turn_s=10.0, step_s=10.0, silence_s=1e6)
    )
    made = connected(kind, [b"here"])
    received = listener.recv(LONG)
    assert received is not None
    slow.now += 3.0  # to find out that it is a member
    listener.admit(received[0])
    slow.now += 6.0  # what is done then is done for a member
    made.sendall(b"".join(map(bytes, packed([b"question"]))))
    assert listener.recv(LONG) == (received[0], [b"question"])
    slow.now += 5.5
    if refused:
        listener.refuse(received[0])
    assert listener.recv(0.0) is None
    assert (listener._strangers.opens_at < math.inf) == refused
    made.close()


def test_a_long_garbage_collection_meanwhile_does_not_close_the_door_for_minutes(
    monkeypatch: pytest.MonkeyPatch, kind: Kind
):
    clock = Clock(monkeypatch, 300.0)
    listener = kind.listening(
        StrangerLimits(share=0.1, burst_s=0.5, pause_s=0.5, turn_s=1000.0, step_s=2.0, silence_s=1e6)
    )
    first = connected(kind, [b"here"])
    hear(listener)
    second = connected(kind, [b"here"])
    assert listener.recv(0.0) is None, "the budget is spent"
    clock.now += 20.5  # 1.5 s of debt, and 0.5 s to go on with, at a tenth of the time
    hear(listener)
    first.close()
    second.close()
