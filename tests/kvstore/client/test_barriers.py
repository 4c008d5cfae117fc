"""Barriers: one that was late is waited at again, and one that let nobody through is come to again."""

from __future__ import annotations

import pytest
from played_session import SCHEDULER, PlayedSession

from kvstore import wire
from kvstore.client.requests import Requests, WorkerBarriers
from kvstore.errors import DeadlineExceeded, UsageError
from kvstore.rule import Rule
from kvstore.ticket import Operation, WaitLimits


class Coming:
    """A worker at barriers. What a wait raises is in ``waits``, first to last; None is that all have come."""

    def __init__(self, *waits: Exception | None) -> None:
        self.waits = list(waits)
        self.session = PlayedSession(answer=self._answer)
        self.session.client.wait = self._wait  # type: ignore[method-assign]
        self.barriers = WorkerBarriers(Requests(self.session, 1, Rule(), WaitLimits(1.0, 1.0)))  # type: ignore[arg-type]

    @property
    def asked(self) -> list[int]:
        """The numbers of the barriers that the scheduler has heard of."""
        return [
            message.number for peer, message in self.session.asked if (peer, type(message)) == (SCHEDULER, wire.Barrier)
        ]

    def _answer(self, peer: bytes, request: wire.Request) -> wire.Reply | None:
        return None if isinstance(request, wire.Barrier) else wire.Ack(request.seq)

    def _wait(self, operation: Operation, timeout: float | None) -> None:
        outcome = self.waits.pop(0)
        if outcome is not None:
            raise outcome
        operation.open.clear()


def test_each_barrier_has_the_next_number() -> None:
    coming = Coming(None, None)
    coming.barriers.wait()
    coming.barriers.wait()
    assert coming.asked == [1, 2]
    assert coming.barriers.passed == 2


def test_at_one_that_was_late_the_next_call_waits_on() -> None:
    coming = Coming(DeadlineExceeded("late"), None)
    with pytest.raises(DeadlineExceeded):
        coming.barriers.wait()
    assert coming.barriers.passed == 0
    coming.barriers.wait()
    assert coming.asked == [1]
    assert coming.barriers.passed == 1


def test_one_that_let_nobody_through_is_come_to_again() -> None:
    coming = Coming(None, UsageError("worker 1 has joined"), None)
    coming.barriers.wait()
    with pytest.raises(UsageError):
        coming.barriers.wait()
    coming.barriers.wait()
    assert coming.asked == [1, 2, 2]
    assert coming.barriers.passed == 2
