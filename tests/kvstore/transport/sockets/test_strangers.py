"""Whoever has made a link and is not known yet: what they may say, and what they may cost."""

from __future__ import annotations

import contextlib
import math
import random
import socket
import struct
import threading

import pytest
from socket_kinds import Kind, connected, ended, hear
from waiting import LONG, came, until

from kvstore.transport.sockets import socket_transport as sockets
from kvstore.transport.sockets.socket_transport import SocketTransport
from kvstore.transport.sockets.strangers import Budget, StrangerLimits
from kvstore.transport.sockets.stream import GREETING, SHORT_BYTES, Introduction, packed
from kvstore.transport.transport import Frames


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
    received = came(listener)
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


def test_of_too_many_strangers_the_one_that_has_been_silent_for_longest_goes(kind: Kind):
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
    received = came(listener)
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
    first = came(listener)
    assert listener.strangers.links.keys() == {first[0]}
    assert first[1] == messages[0]
    listener.admit(first[0])
    listener.admit(first[0])
    for frames in messages[1:]:
        received = came(listener)
        assert received == (first[0], frames)


def test_who_is_no_member_may_go_on_in_short_messages(kind: Kind):
    listener, other = kind.listening(), kind.new()
    link = other.connect(kind.endpoint)
    for number in range(20):
        other.send(link, [b"%d" % number, b"", bytes(SHORT_BYTES - 10)])
    for number in range(20):
        received = came(listener)
        assert received[1] == [b"%d" % number, b"", bytes(SHORT_BYTES - 10)]
        listener.send(received[0], [b"no"])
        assert other.recv(LONG) == (link, [b"no"])


def test_a_stranger_who_reads_no_answers_is_dropped(kind: Kind):
    listener = kind.listening()
    with connected(kind, [b"hello"]) as made:
        received = came(listener)

        def dropped() -> bool:
            listener.send(received[0], [bytes(1 << 20)])
            return listener.gone(received[0])

        until(dropped, "what has not been read to be too much", step=0)
        until(lambda: ended(made), "the end")
    assert not listener.courier.needed


# ---- how much of the time they get


class Clock:
    """The time, which goes on when a test says so, and whenever a stranger's message has been read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cost: float) -> None:
        self.now = 100.0
        self._cost = cost
        really = Introduction.take

        def take(introduction: Introduction, count: int) -> Frames | None:
            message = really(introduction, count)
            if message is not None:
                self.now += self._cost
            return message

        for name in ("monotonic", "thread_time"):
            monkeypatch.setattr(sockets.time, name, lambda: self.now)
        monkeypatch.setattr(Introduction, "take", take)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """To read a stranger's message takes a second."""
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
    assert not listener.strangers.links, "it has not even been let in"
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
    received = came(listener)
    slow.now += 3.0  # to find out that it is a member
    listener.admit(received[0])
    slow.now += 6.0  # what is done then is done for a member
    made.sendall(b"".join(map(bytes, packed([b"question"]))))
    assert listener.recv(LONG) == (received[0], [b"question"])
    slow.now += 5.5
    if refused:
        listener.refuse(received[0])
    assert listener.recv(0.0) is None
    assert (listener.strangers.opens_at < math.inf) == refused
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


@pytest.fixture
def budget() -> Budget:
    return Budget(share=0.1, burst_s=2.0, least_s=0.5)


def test_as_much_as_is_saved_may_be_spent_at_once(budget: Budget):
    assert budget.spend(1.0, 100.0)
    assert budget.spend(0.9, 100.0)
    assert not budget.spend(0.1, 100.0)


def test_it_grows_with_time_and_not_for_ever(budget: Budget):
    assert not budget.spend(2.0, 100.0)
    assert budget.spend(0.9, 110.0), "a tenth of ten seconds is one"
    assert budget.spend(0.0, 1000.0)
    assert budget.spend(1.5, 1000.0)
    assert not budget.spend(0.5, 1000.0), "two seconds, though more time has passed"


@pytest.mark.parametrize(("spent", "waits"), [(2.0, 5.0), (2.5, 10.0), (12.0, 105.0)])
def test_a_debt_is_paid_off_first(budget: Budget, spent: float, waits: float):
    assert not budget.spend(spent, 100.0)
    assert budget.due() == pytest.approx(100.0 + waits)
    assert not budget.spend(0.0, budget.due() - 5.1)
    assert budget.spend(0.0, 100.0 + waits)


def test_what_is_given_back_may_be_spent_again_and_no_more_is_saved(budget: Budget):
    assert budget.spend(1.5, 100.0)
    budget.refund(1.0)
    assert budget.spend(1.4, 100.0)
    budget.refund(9.0)
    assert not budget.spend(2.0, 100.0)


@pytest.mark.parametrize("seed", range(5))
def test_in_the_long_run_no_more_than_the_share_is_spent(seed: int):
    dice, budget, now, spent, largest = random.Random(seed), Budget(0.02, 1.0, 0.001), 50.0, 0.0, 0.1
    while now < 1050.0:
        cost = dice.random() ** 4 * largest
        now, spent = now + cost, spent + cost
        if not budget.spend(cost, now):
            now = budget.due()
    assert 19.0 <= spent <= 1.0 + 0.02 * 1001.0 + largest
