"""Sockets of both kinds: what the conformance suite does not know of."""

from __future__ import annotations

import select
import socket
import time

from socket_kinds import Kind, hear
from waiting import LONG, until

from kvstore.transport.sockets.transport import SocketTransport


def test_what_fits_leaves_in_the_call_that_sends_it(ends: tuple[SocketTransport, SocketTransport, bytes]):
    listener, other, link = ends
    other.send(link, [b"first"])  # which has perhaps waited for the connection
    received = listener.recv(LONG)
    assert received is not None
    listener.send(received[0], [b"head", b"x" * 1000])
    assert not listener.courier.needed, "no thread was needed"
    assert other.recv(LONG) is not None


def test_a_link_that_is_lost_is_made_anew_and_says_so(ends: tuple[SocketTransport, SocketTransport, bytes]):
    listener, other, link = ends
    other.send(link, [b"before"])
    received = listener.recv(LONG)
    assert received is not None
    (made,) = [link.socket for link in other._links.values()]
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
    (lost,) = other._links.values()
    for number in range(3):
        other.send(link, [b"%d" % number])
        received = listener.recv(LONG)
        assert received is not None
        assert received[1] == [b"%d" % number]
        listener.admit(received[0])
        for count in (1, 2):
            before = lost.socket
            assert before is not None
            before.shutdown(socket.SHUT_RDWR)
            while lost.socket is before:
                other._read(lost)  # sees the end, and nobody asks for messages
            until(lambda count=count: len(other._received) == count, "the link is made anew")  # it is used by then
        assert [other.recv(LONG), other.recv(LONG)] == [(link, [])] * 2


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
