"""Messages over every transport: whole, in order, and waited for."""

from __future__ import annotations

import threading
import time

import pytest
from every_transport import SIZES, Ends, pattern, receive
from waiting import LONG

from kvstore.transport.memory import ScatteredFrame
from kvstore.transport.sockets.socket_transport import SocketTransport


def test_frames_arrive_whole_and_in_order(ends: Ends):
    listener, other, link = ends.pair()
    messages = [[pattern(size, size)] for size in SIZES]
    messages += [[b"head", *(pattern(size) for size in SIZES)], [b"", b""], [b"x"] * 200]
    for frames in messages:
        other.send(link, frames)
    for frames in messages:
        assert receive(listener)[1] == frames


def test_a_frame_in_several_places_arrives_as_one(ends: Ends):
    listener, other, link = ends.pair()
    places = [pattern(size, size) for size in SIZES[1:]]
    other.send(link, [b"head", ScatteredFrame(map(memoryview, places)), b"tail"])
    assert receive(listener)[1] == [b"head", b"".join(places), b"tail"]


def test_what_has_been_detached_may_change(ends: Ends):
    listener, other, link = ends.pair()
    other.send(link, [b"hello"])
    receive(listener)
    if not other.gathers(link):
        other.detach()
        return
    places = [bytearray(b"x" * (1 << 20)) for _ in range(40)]  # more than fits into any socket
    other.send(link, [b"head", ScatteredFrame(map(memoryview, places)), b"tail"])
    other.detach()
    for place in places:
        place[:] = b"y" * (1 << 20)
    other.send(link, [b"next"])
    assert receive(listener)[1] == [b"head", b"x" * (40 << 20), b"tail"]
    assert receive(listener)[1] == [b"next"]


def test_what_is_urgent_may_overtake_what_waits_and_nothing_else(ends: Ends):
    listener, other, link = ends.pair()
    other.send(link, [b"hello"])
    receive(listener)
    begun = [b"begun", pattern(1) * (40 << 20)]  # more than fits into any socket
    waiting = [(b"first", 1), (b"second", 1), (b"urgent", 2), (b"last", None), (b"after", 9)]
    other.send(link, begun)
    for name, priority in waiting:
        other.send(link, [name], priority)
    came = [bytes(receive(listener)[1][0]) for _ in range(1 + len(waiting))]
    in_order = [name for name, _ in waiting]
    urgent_first = [b"urgent", b"first", b"second", b"last", b"after"]
    assert came in ([b"begun", *in_order], [b"begun", *urgent_first])
    if isinstance(other, SocketTransport):
        assert came == [b"begun", *urgent_first]


def test_an_interrupt_wakes_a_waiting_recv(ends: Ends):
    listener, _, _ = ends.pair()
    woken = threading.Event()

    def wait() -> None:
        assert listener.recv(LONG) is None
        woken.set()

    thread = threading.Thread(target=wait)
    thread.start()
    listener.interrupt()
    assert woken.wait(LONG / 2)
    thread.join()


def test_interrupts_count_for_the_next_recv_and_do_not_pile_up(ends: Ends):
    listener, other, link = ends.pair()
    for _ in range(1000):
        listener.interrupt()
    began = time.monotonic()
    assert listener.recv(LONG) is None
    assert time.monotonic() - began < LONG / 2
    other.send(link, [b"x"])
    received = listener.recv(LONG) or listener.recv(LONG)
    assert received is not None
    assert received[1] == [b"x"]


def test_an_interrupt_loses_no_message(ends: Ends):
    listener, other, link = ends.pair()
    stop = threading.Event()

    def ring() -> None:
        while not stop.is_set():
            listener.interrupt()

    thread = threading.Thread(target=ring)
    thread.start()
    heard = []
    try:
        for number in range(50):
            other.send(link, [b"%d" % number])
            while (received := listener.recv(LONG)) is None:
                pass
            heard.append(int(bytes(received[1][0])))
    finally:
        stop.set()
        thread.join()
    assert heard == list(range(50))


@pytest.mark.parametrize("timeout", [0.0, 0.05])
def test_recv_returns_after_its_timeout(ends: Ends, timeout: float):
    listener, _, _ = ends.pair()
    began = time.monotonic()
    assert listener.recv(timeout) is None
    assert timeout * 0.9 <= time.monotonic() - began < LONG / 2
