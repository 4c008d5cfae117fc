"""Tickets and the requests behind them: who is done, who failed, and whom a reply belongs to."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.errors import KVStoreError, ServerError, WireError
from kvstore.member.outstanding import Outstanding, Sent
from kvstore.memory import Parts
from kvstore.spec import shorten
from kvstore.ticket import Ticket
from kvstore.wire import Ack, Values

S0, S1 = b"server 0", b"server 1"


class Answers:
    """A waiter that settles what it is told to when somebody waits."""

    def __init__(self, outstanding: Outstanding) -> None:
        self.outstanding = outstanding
        self.coming: list[tuple[bytes, int]] = []
        self.waits: list[float | None] = []

    def wait(self, ticket: Ticket, timeout: float | None) -> None:
        self.waits.append(timeout)
        self.poll()

    def poll(self) -> None:
        while self.coming:
            peer, seq = self.coming.pop(0)
            self.outstanding.settle(peer, Ack(seq), None)


def test_what_was_sent_and_not_answered_can_be_sent_again() -> None:
    outstanding, ticket = Outstanding(), Ticket("push", ["w"])
    seqs = [outstanding.add(peer, ticket, None) for peer in (S0, S1, S0, S0, S0)]
    sent = [Sent([b"%d" % seq], seq) for seq in seqs]
    sent[3] = Sent([b"head", Parts([memoryview(b"callers"), memoryview(b"own")])], None)
    for seq, its in list(zip(seqs, sent, strict=True))[:4]:
        outstanding.sent(seq, its)
    assert outstanding.again(S0) == [sent[0], sent[2], sent[3]]
    outstanding.settle(S0, Ack(seqs[0]), None)
    outstanding.detach()
    assert outstanding.again(S0) == [sent[2]], "what lies in callers' arrays may have changed"
    assert outstanding.again(S1) == [sent[1]]
    assert len(ticket.open) == 4


def test_a_ticket_is_done_when_all_its_requests_are() -> None:
    outstanding, ticket = Outstanding(), Ticket("push", ["w"])
    one, two = outstanding.add(S0, ticket, None), outstanding.add(S1, ticket, None)
    assert len(outstanding) == 2
    outstanding.settle(S1, Ack(two), None)
    assert not ticket.done()
    assert outstanding.of(ticket) == {one: S0}
    outstanding.settle(S0, Ack(one), None)
    assert ticket.done()
    assert ticket.wait() is None
    assert len(outstanding) == 0


def test_sequence_numbers_grow_and_done_is_below_the_oldest_open_one() -> None:
    outstanding, ticket = Outstanding(), Ticket("push")
    assert outstanding.done == 1
    numbers = [outstanding.add(S0, ticket, None) for _ in range(3)]
    assert numbers == [1, 2, 3]
    outstanding.settle(S0, Ack(2), None)
    assert outstanding.done == 1
    outstanding.settle(S0, Ack(1), None)
    assert outstanding.done == 3
    outstanding.settle(S0, Ack(3), None)
    assert outstanding.done == 4


def test_a_repeat_and_a_strangers_answer_are_dropped() -> None:
    outstanding, ticket, taken = Outstanding(), Ticket("pull"), []
    seq = outstanding.add(S0, ticket, taken.append)
    outstanding.settle(S1, Values(seq, buffers=[]), None)
    outstanding.settle(S0, Values(seq + 1, buffers=[]), None)
    assert taken == []
    assert not ticket.done()
    for _ in range(2):
        outstanding.settle(S0, Values(seq, buffers=[]), None)
    assert taken == [Values(seq, buffers=[])]
    assert ticket.done()


def test_a_failure_is_not_handed_to_whoever_takes_the_answer() -> None:
    outstanding, failed, taken = Outstanding(), [], []
    ticket = Ticket("pull", ["w"], None, failed.append)
    outstanding.settle(S0, Ack(outstanding.add(S0, ticket, taken.append)), ServerError("no"))
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
    assert failed == [ticket]


def test_an_answer_that_cannot_be_taken_fails_the_ticket() -> None:
    outstanding, ticket = Outstanding(), Ticket("pull")

    def take(reply: Any) -> None:
        raise WireError("of another length")

    outstanding.settle(S0, Ack(outstanding.add(S0, ticket, take)), None)
    assert ticket.done()
    with pytest.raises(WireError, match="of another length"):
        ticket.wait()


def test_whatever_goes_wrong_while_an_answer_is_taken_is_the_tickets() -> None:
    outstanding, ticket = Outstanding(), Ticket("pull")
    outstanding.settle(S0, Ack(outstanding.add(S0, ticket, lambda reply: [][0])), None)
    with pytest.raises(KVStoreError, match="IndexError") as caught:
        ticket.wait()
    assert isinstance(caught.value.__cause__, IndexError)


def test_a_request_that_could_not_be_sent_is_withdrawn() -> None:
    outstanding, ticket = Outstanding(), Ticket("push")
    outstanding.withdraw(outstanding.add(S0, ticket, None))
    assert ticket.done()
    assert len(outstanding) == 0
    assert outstanding.done == 2


def test_done_takes_in_what_has_arrived_and_wait_passes_the_deadline_on() -> None:
    outstanding = Outstanding()
    waiter = Answers(outstanding)
    ticket = Ticket("push", ["w"], waiter, None, 5.0)
    seq = outstanding.add(S0, ticket, None)
    assert repr(ticket) == "<Ticket push of 'w' waiting>"
    assert not ticket.done()
    waiter.wait = lambda ticket, timeout: waiter.waits.append(timeout)  # type: ignore[method-assign]
    ticket.wait()
    ticket.wait(0.5)
    assert waiter.waits == [5.0, 0.5]
    waiter.coming.append((S0, seq))
    assert ticket.done()
    assert repr(ticket) == "<Ticket push of 'w' done>"
    ticket.wait()
    assert waiter.waits == [5.0, 0.5]


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
