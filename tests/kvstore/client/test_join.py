"""A worker's pauses: the scheduler hears first, then each server with the clocks of its segments, and it goes on."""

from __future__ import annotations

import numpy as np
import pytest
from placed import entries_for
from played_session import SCHEDULER, PlayedSession

from kvstore import wire
from kvstore.client.entries import Entries, PushClocks
from kvstore.client.requests import Joining, Requests
from kvstore.errors import DeadlineExceeded, UsageError
from kvstore.rule import Rule
from kvstore.spec import Spec
from kvstore.ticket import Operation, WaitLimits


def known() -> Entries:
    return entries_for({"cut": Spec((6,), "float32"), "w": Spec((2,), "float32")}, servers=2, bound=5)


class Rig:
    """A worker that has pushed "cut" three times and "w" five times; servers are at round 7 of everything."""

    def __init__(self, answers: bool = True) -> None:
        self.answers = answers
        self.entries = known()
        self.clocks = PushClocks()
        self.clocks.grow(2)
        self.clocks.note(np.array([0, 1]), np.array([3, 5]), push=1)
        self.session = PlayedSession(answer=self._answer)
        requests = Requests(self.session, 1, Rule(), WaitLimits(1.0, 1.0))  # type: ignore[arg-type]
        self.session.asked.clear()
        self.joining = Joining(requests, self.clocks)

    def _answer(self, peer: bytes, request: wire.Request) -> wire.Reply | None:
        if isinstance(request, wire.Pause) and peer != SCHEDULER:
            return wire.Resume(request.seq, 1, [7] * len(request.ids)) if self.answers else None
        return wire.Ack(request.seq)


def test_the_scheduler_hears_of_it_before_any_server() -> None:
    rig = Rig()
    rig.joining.begin(rig.entries)
    assert [peer for peer, _ in rig.session.asked] == [SCHEDULER, b"server 0", b"server 1"]
    assert {message.number for _, message in rig.session.asked} == {1}


def test_servers_get_the_clocks_of_their_segments() -> None:
    rig = Rig()
    rig.joining.begin(rig.entries)
    clocks = {number: clock for _, m in rig.session.asked[1:] for number, clock in zip(m.ids, m.clocks, strict=True)}
    assert clocks == {
        **{segment.id: 3 for segment in rig.entries["cut"].segments},
        **{segment.id: 5 for segment in rig.entries["w"].segments},
    }
    assert {message.pushes for _, message in rig.session.asked[1:]} == {8}


def test_the_next_push_follows_the_rounds_of_the_others() -> None:
    rig = Rig()
    assert not rig.joining.under_way
    rig.joining.begin(rig.entries)
    assert rig.joining.under_way
    rig.joining.wait(None)
    assert rig.joining.end(rig.entries) == 1
    assert not rig.joining.under_way
    assert rig.clocks.pushed[:2].tolist() == [7, 7]


def test_each_pause_has_a_number_of_its_own() -> None:
    rig = Rig()
    for number in (1, 2):
        rig.session.asked.clear()
        rig.joining.begin(rig.entries)
        rig.joining.end(rig.entries)
        assert {message.number for _, message in rig.session.asked} == {number}


def test_a_worker_whose_call_was_late_still_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(operation: Operation, timeout: float | None) -> None:
        raise DeadlineExceeded(f"{operation} is not done after {timeout} s")

    rig = Rig(answers=False)
    rig.joining.begin(rig.entries)
    monkeypatch.setattr(rig.session.client, "wait", late)
    with pytest.raises(DeadlineExceeded):
        rig.joining.wait(0.5)
    assert rig.joining.under_way


def test_a_pause_that_is_refused_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(operation: Operation, timeout: float | None) -> None:
        raise UsageError("no")

    rig = Rig(answers=False)
    rig.joining.begin(rig.entries)
    monkeypatch.setattr(rig.session.client, "wait", refused)
    with pytest.raises(UsageError):
        rig.joining.wait(None)
    assert not rig.joining.under_way
