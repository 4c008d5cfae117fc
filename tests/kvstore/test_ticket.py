"""Operations and the tickets for them: done, failed, waited for; and what a ticket shows."""

from __future__ import annotations

import pytest

import kvstore as kv
from kvstore.errors import ServerError
from kvstore.ticket import Operation, Ticket, WaitLimits, claim, finish


class Waiter:
    """Answers the requests that it is told to answer, when it is asked whether there is anything new."""

    def __init__(self) -> None:
        self.waits: list[float | None] = []
        self.operation: Operation | None = None
        self.answered: list[int] = []

    def wait(self, operation: Operation, timeout: float | None) -> None:
        self.waits.append(timeout)

    def poll(self) -> None:
        if self.operation is not None:
            self.operation.open.difference_update(self.answered)


def test_done_takes_in_what_has_arrived_and_wait_passes_the_timeout_on() -> None:
    waiter = Waiter()
    operation = waiter.operation = Operation("push", ["w"], waiter, None, WaitLimits(5.0, 9.0))
    operation.open.add(1)
    ticket = Ticket(operation)
    assert repr(ticket) == "<Ticket push of 'w' waiting>"
    assert not ticket.done()
    ticket.wait()
    ticket.wait(0.5)
    assert waiter.waits == [None, 0.5]
    waiter.answered.append(1)
    assert ticket.done()
    assert repr(ticket) == "<Ticket push of 'w' done>"
    assert repr(operation) == "<Operation push of 'w' done>"
    ticket.wait()
    assert waiter.waits == [None, 0.5], "nobody waits for what is done"


def test_a_ticket_shows_wait_done_and_result_alone() -> None:
    ticket = Ticket("push", [1, 2])
    assert [name for name in dir(ticket) if not name.startswith("_")] == ["done", "result", "wait"]
    with pytest.raises(AttributeError):
        ticket.error = ServerError("no")  # type: ignore[attr-defined]


def test_a_ticket_by_name_is_done_from_the_start() -> None:
    ticket = Ticket("push", [1, 2])
    assert ticket.done()
    assert ticket.wait(0) is None
    assert str(ticket) == "push of 1, 2"
    assert str(Ticket("barrier")) == "barrier"


def test_the_result_is_what_wait_returns() -> None:
    operation = Operation("join")
    ticket = Ticket(operation)
    assert ticket.result is None
    operation.take(3)
    assert (ticket.result, ticket.wait()) == (3, 3)


def test_an_error_is_raised_by_wait_and_claim_shows_it() -> None:
    ticket = Ticket("pull", ["w"])
    operation = claim(ticket)
    operation.fail(ServerError("no"))
    assert not operation.raised
    for _ in range(2):
        with pytest.raises(ServerError, match="no"):
            ticket.wait()
    assert operation.raised
    assert repr(ticket) == "<Ticket pull of 'w' failed>"


def test_finish_waits_if_that_is_wanted() -> None:
    ticket = Ticket("push")
    claim(ticket).fail(ServerError("no"))
    assert finish(ticket, wait=False) is ticket
    with pytest.raises(ServerError):
        finish(ticket, wait=True)


def test_the_public_name_is_the_facade() -> None:
    assert kv.Ticket is Ticket


def test_the_first_error_stays() -> None:
    failed: list[Operation] = []
    operation = Operation("push", [], None, failed.append)
    operation.fail(ServerError("first"))
    operation.fail(ServerError("second"))
    assert str(operation.error) == "first"
    assert set(failed) == {operation}


def test_an_error_that_is_raised_again_and_again_holds_no_frames() -> None:
    """Each ``raise`` of one instance adds to its traceback, which keeps what the frames refer to."""
    operation = Operation("push")
    operation.fail(ServerError("no"))
    lengths = []
    for _ in range(3):
        with pytest.raises(ServerError) as caught:
            operation.wait()
        lengths.append(len(caught.traceback))
    assert len(set(lengths)) == 1
    assert operation.error is not None
    assert operation.error.__traceback__ is None
