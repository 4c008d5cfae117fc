"""Sockets of both kinds: what the conformance suite does not know of."""

from __future__ import annotations

import contextlib
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

from kvstore.transport import sockets
from kvstore.transport.sockets import SocketTransport
from kvstore.transport.stream import GREETING
from kvstore.transport.tcp import TcpTransport
from kvstore.transport.unix import UnixTransport


class Kind:
    """Makes transports of one kind, and plain sockets that reach them."""

    def __init__(self, name: str, directory: Path) -> None:
        self.tcp = name == "tcp"
        self.endpoint = "tcp://127.0.0.1:0" if self.tcp else f"ipc://{directory}/here"
        self._made: list[SocketTransport] = []

    def new(self) -> SocketTransport:
        self._made.append(TcpTransport() if self.tcp else UnixTransport())
        return self._made[-1]

    def listening(self) -> SocketTransport:
        made = self.new()
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


@pytest.fixture
def ends(kind: Kind) -> tuple[SocketTransport, SocketTransport, bytes]:
    listener, other = kind.listening(), kind.new()
    return listener, other, other.connect(kind.endpoint)


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
        received = listener.recv(LONG)
        assert received is not None
        peers.append(received[0])
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
        received = listener.recv(LONG)
        assert received is not None
        listener.send(received[0], [b"an answer"])  # which nobody reads: to close is to reset the connection
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
        GREETING + b"\x01",
    ],
    ids=["noise", "half a greeting", "a greeting and noise", "too large", "more than there is memory", "half a number"],
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


def test_who_says_nothing_is_cut_off_and_who_has_spoken_is_not(kind: Kind, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sockets, "HANDSHAKE_S", 0.1)
    listener, other = kind.listening(), kind.new()
    other.send(other.connect(kind.endpoint), [b"hello"])
    received = listener.recv(LONG)
    assert received is not None
    with kind.stranger() as stranger:
        assert stranger.getpeername()
        ended = threading.Event()

        def listen() -> None:
            while stranger.recv(100):
                pass
            ended.set()

        threading.Thread(target=listen, daemon=True).start()

        def cut_off() -> bool:
            assert listener.recv(0.05) is None
            return ended.is_set()

        until(cut_off, "the stranger to be cut off")
    listener.send(received[0], [b"still here"])
    assert other.recv(LONG) is not None


def test_a_link_that_the_other_side_has_given_up_is_forgotten(kind: Kind):
    listener, other = kind.listening(), kind.new()
    other.send(other.connect(kind.endpoint), [b"hello"])
    received = listener.recv(LONG)
    assert received is not None
    for _ in range(40):
        listener.send(received[0], [b"head", bytes(1 << 20)])  # of which the courier has the most
    other.close()
    until(lambda: listener.recv(0.02) is None and not listener._links, "the link to be forgotten")
    listener.send(received[0], [b"nobody"])
