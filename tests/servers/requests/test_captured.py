from __future__ import annotations

import pytest
from asking import Worker

from kvstore import wire
from kvstore.errors import CheckpointError, UsageError
from servers.requests.captured import MOST, CaptureDesk

DONE = wire.Captured(0, 10, "ab", [3], "sgd", "/there")


def test_who_waits_is_answered_when_the_file_is_there() -> None:
    desk: CaptureDesk[object] = CaptureDesk()
    worker = Worker()
    desk.begin(2, 7)
    request = wire.AwaitCapture(worker.me(), 2, 7)
    assert desk.wait(worker.peer, request) == []
    assert desk.explain(worker.node, request.seq) == "is writing checkpoint 7"
    assert desk.explain(worker.node, request.seq + 1) == ""
    (answer,) = desk.ended(2, 7, DONE)
    assert answer == (worker.peer, request, wire.Captured(request.seq, 10, "ab", [3], "sgd", "/there"))
    again = wire.AwaitCapture(worker.me(), 2, 7)
    assert desk.wait(worker.peer, again)[0].reply.seq == again.seq


def test_who_asks_again_is_answered_over_both_links_once() -> None:
    desk: CaptureDesk[object] = CaptureDesk()
    worker = Worker()
    desk.begin(0, 1)
    request = wire.AwaitCapture(worker.me(), 0, 1)
    for peer in (b"old", b"new", b"new"):
        assert desk.wait(peer, request) == []
    assert [answer.peer for answer in desk.ended(0, 1, DONE)] == [b"old", b"new"]


def test_an_error_is_the_answer_of_its_class() -> None:
    desk: CaptureDesk[object] = CaptureDesk()
    worker = Worker()
    desk.begin(0, 1)
    assert desk.ended(0, 1, CheckpointError("disk full")) == []
    (answer,) = desk.wait(worker.peer, wire.AwaitCapture(worker.me(), 0, 1))
    assert answer.reply == wire.Failure(1, "CheckpointError", "disk full")


def test_a_number_is_asked_for_once_and_few_are_remembered() -> None:
    desk: CaptureDesk[object] = CaptureDesk()
    worker = Worker()
    desk.begin(0, 1)
    with pytest.raises(UsageError, match="before"):
        desk.begin(0, 1)
    desk.forget(0, 1)
    for number in range(1, MOST + 2):
        desk.begin(0, number)
        desk.ended(0, number, DONE)
    (answer,) = desk.wait(worker.peer, wire.AwaitCapture(worker.me(), 0, 1))
    assert "not known" in answer.reply.text
