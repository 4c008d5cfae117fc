"""Requests that wait until this process serves."""

from __future__ import annotations

from kvstore import wire
from servers.replication.replica import HeldRequests


def ask(seq: int, done: int = 0, rank: int = 0) -> wire.Barrier:
    return wire.Barrier(wire.Sender(wire.Node("worker", rank, 1), seq, done), 0, seq)


def test_they_come_out_in_order_once() -> None:
    held = HeldRequests()
    first, second, other = ask(1), ask(2), ask(1, rank=1)
    for request in (first, other, second):
        held.add(b"link", request)
    assert held.release() == [(b"link", first), (b"link", other), (b"link", second)]
    assert held.release() == []


def test_a_repeat_keeps_its_place_and_is_answered_over_its_last_link() -> None:
    held = HeldRequests()
    for peer, request in ((b"old", ask(1)), (b"old", ask(2)), (b"new", ask(1)), (b"new", ask(2))):
        held.add(peer, request)
    assert held.release() == [(b"new", ask(1)), (b"new", ask(2))]


def test_what_its_sender_has_an_answer_for_is_forgotten() -> None:
    held = HeldRequests()
    for request in (ask(1), ask(2), ask(1, rank=1), ask(5, done=3), ask(2), ask(3, done=3)):
        held.add(b"link", request)
    assert len(held) == 3
    assert held.release() == [(b"link", ask(1, rank=1)), (b"link", ask(5, done=3)), (b"link", ask(3, done=3))]


def test_who_waits_for_a_file_may_still_have_no_answer() -> None:
    held = HeldRequests()
    waits = wire.AwaitCapture(wire.Sender(wire.Node("worker", 0, 1), 2, 2), 0, 1)
    for request in (waits, ask(5, done=5), waits):
        held.add(b"link", request)
    assert held.release() == [(b"link", waits), (b"link", ask(5, done=5))]
