"""The courier: sends what did not leave at once, and ends links whose peers take nothing."""

from __future__ import annotations

import threading
import time

import pytest
from socket_kinds import Kind, connected, hear
from waiting import LONG, until

from kvstore.transport.sockets import link as links
from kvstore.transport.sockets.transport import SocketTransport


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
