"""Tickets and the requests behind them: who is done, who failed, and whom a reply belongs to."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from kvstore.errors import KVStoreError, ServerError, WireError
from kvstore.member.outstanding import Effect, Outstanding, Question, Request, Sender
from kvstore.spec import shorten
from kvstore.ticket import Limits, Ticket
from kvstore.transport.memory import Parts
from kvstore.wire import Ack, Barrier, Message, Values

S0, S1 = b"server 0", b"server 1"


def barrier(sender: Sender) -> Message:
    return Barrier(*sender, store=0, number=0)


def added(
    outstanding: Outstanding, ticket: Ticket, *peers: bytes, take: Callable[[Any], None] | None = None
) -> list[Request]:
    requests: list[Request] = [Question(peer, ticket, barrier, take) for peer in peers]
    outstanding.number(requests)
    outstanding.add(requests)
    return requests


class Answers:
    """A waiter that settles what it is told to when somebody waits."""

    def __init__(self, outstanding: Outstanding) -> None:
        self.outstanding = outstanding
        self.coming: list[Request] = []
        self.waits: list[float | None] = []

    def wait(self, ticket: Ticket, timeout: float | None) -> None:
        self.waits.append(timeout)
        self.poll()

    def poll(self) -> None:
        while self.coming:
            request = self.coming.pop(0)
            self.outstanding.settle(request, Ack(request.seq), None)


def test_a_ticket_is_done_when_all_its_requests_are() -> None:
    outstanding, ticket = Outstanding(), Ticket("push", ["w"])
    one, two = added(outstanding, ticket, S0, S1)
    assert len(outstanding) == 2
    outstanding.settle(two, Ack(two.seq), None)
    assert not ticket.done()
    assert outstanding.of(ticket) == {one.seq: S0}
    assert outstanding.requests_of(ticket) == [one]
    outstanding.settle(one, Ack(one.seq), None)
    assert ticket.done()
    assert ticket.wait() is None
    assert len(outstanding) == 0


def test_sequence_numbers_grow_and_done_is_below_the_oldest_open_one() -> None:
    outstanding, ticket = Outstanding(), Ticket("push")
    assert outstanding.done == 1
    one, two, three = added(outstanding, ticket, S0, S0, S0)
    assert [one.seq, two.seq, three.seq] == [1, 2, 3]
    assert list(outstanding) == [one, two, three]
    outstanding.settle(two, Ack(2), None)
    assert outstanding.done == 1
    outstanding.settle(one, Ack(1), None)
    assert outstanding.done == 3
    outstanding.settle(three, Ack(3), None)
    assert outstanding.done == 4


def test_numbers_that_were_not_used_are_given_again() -> None:
    outstanding, ticket = Outstanding(), Ticket("push")
    refused = Question(S0, ticket, barrier)
    outstanding.number([refused])
    (made,) = added(outstanding, ticket, S0)
    assert (refused.seq, made.seq) == (1, 1)
    assert outstanding.find(S0, 1) is made


def test_a_repeat_and_a_strangers_answer_find_nothing() -> None:
    outstanding, ticket, taken = Outstanding(), Ticket("pull"), []
    (request,) = added(outstanding, ticket, S0, take=taken.append)
    assert outstanding.find(S1, request.seq) is None
    assert outstanding.find(S0, request.seq + 1) is None
    assert outstanding.find(S0, request.seq) is request
    outstanding.settle(request, Values(request.seq, buffers=[]), None)
    assert outstanding.find(S0, request.seq) is None
    assert taken == [Values(request.seq, buffers=[])]
    assert ticket.done()


def test_a_failure_is_not_handed_to_whoever_takes_the_answer() -> None:
    outstanding, failed, taken = Outstanding(), [], []
    ticket = Ticket("pull", ["w"], None, failed.append)
    (request,) = added(outstanding, ticket, S0, take=taken.append)
    outstanding.settle(request, Ack(request.seq), ServerError("no"))
    assert taken == []
    assert failed == [ticket]
    assert repr(ticket) == "<Ticket pull of 'w' failed>"
    for _ in range(2):
        with pytest.raises(ServerError, match="no"):
            ticket.wait()
    assert ticket.raised


def test_the_first_error_stays() -> None:
    failed: list[Ticket] = []
    ticket = Ticket("push", [], None, failed.append)
    ticket.fail(ServerError("first"))
    ticket.fail(ServerError("second"))
    assert str(ticket.error) == "first"
    assert set(failed) == {ticket}


def test_an_error_that_is_raised_again_and_again_holds_no_frames() -> None:
    """Each ``raise`` of one instance adds to its traceback, which keeps what the frames refer to."""
    ticket = Ticket("push")
    ticket.fail(ServerError("no"))
    lengths = []
    for _ in range(3):
        with pytest.raises(ServerError) as caught:
            ticket.wait()
        lengths.append(len(caught.traceback))
    assert len(set(lengths)) == 1
    assert ticket.error is not None
    assert ticket.error.__traceback__ is None


def test_an_answer_that_cannot_be_taken_fails_the_ticket() -> None:
    outstanding, ticket = Outstanding(), Ticket("pull")

    def take(reply: Any) -> None:
        raise WireError("of another length")

    (request,) = added(outstanding, ticket, S0, take=take)
    outstanding.settle(request, Ack(request.seq), None)
    assert ticket.done()
    with pytest.raises(WireError, match="of another length"):
        ticket.wait()


def test_whatever_goes_wrong_while_an_answer_is_taken_is_the_tickets() -> None:
    outstanding, ticket = Outstanding(), Ticket("pull")
    (request,) = added(outstanding, ticket, S0, take=lambda reply: [][0])
    outstanding.settle(request, Ack(request.seq), None)
    with pytest.raises(KVStoreError, match="IndexError") as caught:
        ticket.wait()
    assert isinstance(caught.value.__cause__, IndexError)


def test_what_is_the_callers_is_copied_once_the_call_is_over() -> None:
    """A message that refers to arrays of the caller's is whole when they change."""

    class Push(Request):
        early = False

        def message(self, sender: Sender) -> Message:
            return barrier(sender)

    array = bytearray(b"values")
    push = Push(S0, Ticket("push"))
    assert push.borrows, "it has not been made yet, and will read what is the caller's"
    push.frames = [b"head", Parts([memoryview(array), memoryview(b"!")])]
    assert push.borrows
    push.own()
    assert not push.borrows
    array[:] = b"others"
    assert [bytes(frame) for frame in push.frames] == [b"head", b"values!"]  # type: ignore[arg-type]


# ---- exceptions at any moment


class Interrupt(Exception):
    """What the handler of a signal raises."""


class Counting(Question):
    """Its answer adds to a column, as values and counts do: what is to be after it is worked out before."""

    __slots__ = ("column",)

    def __init__(self, peer: bytes, ticket: Ticket, column: list[int]) -> None:
        super().__init__(peer, ticket, barrier)
        self.column = column

    def take(self, reply: Any) -> Effect:
        after = self.column[0] + 1
        return lambda: self.column.__setitem__(0, after)


def interrupted(action: Callable[[], None], after: int) -> bool:
    """Call ``action``; raise at its line number ``after``, of this package's. Return whether it came so far."""
    lines = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines
        if "kvstore" not in frame.f_code.co_filename:
            return None
        if event == "line":
            lines += 1
            if lines > after:
                sys.settrace(None)
                raise Interrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    except Interrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_requests_are_added_all_or_not_at_all() -> None:
    after, made = 0, []
    while True:
        outstanding, ticket, clock = Outstanding(), Ticket("push"), [0]
        requests: list[Request] = [Question(peer, ticket, barrier) for peer in (S0, S1)]
        outstanding.number(requests)

        def add(outstanding=outstanding, requests=requests, clock=clock) -> None:
            outstanding.add(requests, lambda: clock.__setitem__(0, 1))

        came = interrupted(add, after)
        outstanding.finish()
        assert not outstanding.torn
        assert (len(outstanding), len(ticket.open), outstanding.done, clock) in ((0, 0, 1, [0]), (2, 2, 1, [1]))
        (later,) = added(outstanding, ticket, S0)
        assert later.seq == len(outstanding)
        made.append(len(outstanding) == 3)
        if not came:
            break
        after += 1
    assert made == sorted(made), "first it is not made, and from some line on it is"
    assert made[0] is False
    assert made[-1] is True


def test_an_answer_counts_once_or_not_at_all() -> None:
    after, done = 0, []
    while True:
        outstanding, ticket, column = Outstanding(), Ticket("push"), [0]
        request = Counting(S0, ticket, column)
        outstanding.number([request])
        outstanding.add([request])

        def settle(outstanding=outstanding, request=request) -> None:
            outstanding.settle(request, Ack(request.seq), None)

        came = interrupted(settle, after)
        outstanding.finish()
        assert (len(outstanding), ticket.open, column) in ((0, set(), [1]), (1, {1}, [0]))
        done.append(not ticket.open)
        if outstanding.find(S0, 1) is not None:  # it is asked again, and answered again
            settle()
        assert (len(outstanding), ticket.open, column) == (0, set(), [1])
        if not came:
            break
        after += 1
    assert set(done) == {True, False}


# ---- tickets


def test_done_takes_in_what_has_arrived_and_wait_passes_the_deadline_on() -> None:
    outstanding = Outstanding()
    waiter = Answers(outstanding)
    ticket = Ticket("push", ["w"], waiter, None, Limits(5.0, 9.0))
    requests = added(outstanding, ticket, S0)
    assert repr(ticket) == "<Ticket push of 'w' waiting>"
    assert not ticket.done()
    waiter.wait = lambda ticket, timeout: waiter.waits.append(timeout)  # type: ignore[method-assign]
    ticket.wait()
    ticket.wait(0.5)
    assert waiter.waits == [None, 0.5]
    waiter.coming += requests
    assert ticket.done()
    assert repr(ticket) == "<Ticket push of 'w' done>"
    ticket.wait()
    assert waiter.waits == [None, 0.5]


def test_a_ticket_of_a_local_store_is_done_from_the_start() -> None:
    ticket = Ticket("push", [1, 2])
    assert ticket.done()
    assert ticket.wait(0) is None
    assert str(ticket) == "push of 1, 2"
    assert str(Ticket("barrier")) == "barrier"


def test_errors_of_a_ticket_are_this_packages() -> None:
    assert issubclass(ServerError, KVStoreError)


@pytest.mark.parametrize(
    ("count", "text"), [(0, ""), (2, "0, 1"), (8, "0, 1, 2, 3, 4, 5, 6, 7"), (10, "0, 1, 2, 3, 4, 5, 6, 7 and 2 more")]
)
def test_many_keys_are_shortened(count: int, text: str) -> None:
    assert shorten(range(count)) == text
