"""Sockets of both kinds: what the conformance suite does not know of."""

from __future__ import annotations

import select
import socket
import threading
import time

import pytest
from socket_kinds import Kind, connected, hear
from waiting import LONG, until

from kvstore.transport.sockets import link as links
from kvstore.transport.sockets.socket_transport import SocketTransport


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
    again = listener.recv(LONG)
    assert again is not None
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
    received = listener.recv(LONG)
    assert received is not None
    assert received[1] == [b"bad"]
    listener.refuse(received[0])
    assert listener.gone(received[0])
    assert other.recv(LONG) == (link, [])
    other.send(link, [b"here"])
    again = listener.recv(LONG)
    assert again is not None
    assert again[0] != received[0]
    assert again[1] == [b"here"]
    assert not listener.gone(again[0])


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


def test_who_takes_nothing_of_what_is_sent_is_dropped_and_what_waited_is_freed(
    ends: tuple[SocketTransport, SocketTransport, bytes], kind: Kind, monkeypatch: pytest.MonkeyPatch
):
    listener, other, link = ends
    other.send(link, [b"question"])
    received = listener.recv(LONG)
    assert received is not None
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
