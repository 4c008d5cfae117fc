"""A member's side of its links, over a transport that the test plays: requests, answers, and what ends them."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from played import BARRIER, WINDOW, Played, acknowledge, ask, client_of

from kvstore import wire
from kvstore.errors import KVStoreError, Mismatch, NodeLost, NotFinite, ServerError, UsageError
from kvstore.member.outstanding import PendingRequest, Question, Turn, ready
from kvstore.ticket import Operation


def test_a_call_returns_the_reply():
    transport = Played(acknowledge)
    client, a, _ = client_of(transport)
    assert client.call(a, "x", wire.Barrier, **BARRIER) == wire.Ack(1)
    assert transport.waits == []


def test_requests_are_numbered_and_say_what_is_done():
    transport = Played()
    client, a, b = client_of(transport)
    operations = [Operation("x", (), client) for _ in range(3)]
    for operation, peer in zip(operations, (a, b, a), strict=True):
        ask(client, peer, operation)
    transport.arrive(b, wire.Ack(2))
    client.poll()
    ask(client, a, Operation("x", (), client))
    transport.arrive(a, wire.Ack(1))
    client.poll()
    ask(client, a, Operation("x", (), client))
    assert [r.node for _, r in transport.asked] == [wire.Node("worker", -1, 77)] * 5
    assert [(peer, r.seq, r.sender.done) for peer, r in transport.asked] == [
        (a, 1, 1),
        (b, 2, 1),
        (a, 3, 1),
        (a, 4, 1),
        (a, 5, 3),
    ]
    assert [operation.done() for operation in operations] == [True, True, False]


def test_what_has_no_answer_is_asked_again_in_order_when_a_link_has_been_made_anew():
    transport = Played()
    client, a, b = client_of(transport)
    operations = [Operation("x", (), client) for _ in range(4)]
    for operation, peer in zip(operations, (a, b, a, a), strict=True):
        ask(client, peer, operation)
    transport.arrive(a, wire.Ack(3))
    transport.arrive(a, [])
    client.poll()
    assert [(peer, request.seq) for peer, request in transport.asked[4:]] == [(a, 1), (a, 4)]
    assert transport.asked[4] == transport.asked[0]
    transport.answers = acknowledge
    transport.arrive(b, [])
    transport.arrive(a, [])
    for operation in operations:
        operation.wait(1.0)
    transport.arrive(a, [])
    client.poll()
    assert len(transport.asked) == 4 + 2 + 3, "all has been answered"


class InTurn(PendingRequest):
    def message(self, sender: wire.Sender) -> wire.Message:
        return wire.Barrier(sender, **BARRIER)


def test_a_request_made_in_turn_is_asked_again_only_if_it_has_gone():
    transport = Played()
    client, a, _ = client_of(transport)
    operation = Operation("x", (), client)
    for _ in range(2):
        client.submit(operation, ready, [InTurn(a, operation, turn=Turn(WINDOW, 0))])
    assert [request.seq for _, request in transport.asked] == [1]
    transport.arrive(a, [])
    client.poll()
    assert [request.seq for _, request in transport.asked] == [1, 1]


def test_a_failure_is_raised_by_its_name_and_does_not_reach_the_taker():
    client, a, _ = client_of(Played(lambda _, request: [wire.Failure(request.seq, "Mismatch", "not so")]))
    operation = Operation("x", (), client)
    ask(client, a, operation, lambda reply: pytest.fail("it was taken"))
    with pytest.raises(Mismatch, match="not so"):
        operation.wait()
    client, a, _ = client_of(Played(lambda _, request: [wire.Failure(request.seq, "SystemExit", "ha")]))
    with pytest.raises(ServerError, match="ha"):
        client.call(a, "x", wire.Barrier, **BARRIER)


def test_what_makes_no_sense_is_dropped(caplog: pytest.LogCaptureFixture):
    transport = Played()
    client, a, b = client_of(transport)
    operation = Operation("x", (), client)
    ask(client, a, operation)
    for nonsense in (
        [b"\xc1"],
        [b""],
        [b"", b""],
        wire.Alive(),
        wire.Barrier(wire.Sender(wire.Node("worker", 0, 0), 1, 1), **BARRIER),
    ):
        transport.arrive(a, nonsense)
    transport.arrive(b, wire.Ack(1))  # not whom it was asked of
    transport.arrive(b"stranger", [b"?"])
    transport.arrive(a, wire.Ack(99))
    transport.arrive(b"stranger", wire.Ack(1))
    assert not operation.done()
    for _ in range(4):
        transport.arrive(a, wire.Alive())
    assert not operation.done()
    first, tenth = [record.message for record in caplog.records]
    assert first.startswith("dropped a bad message from server 0 (1 so far): ")
    assert tenth == "dropped a message from server 0 (10 so far): expected a reply, got Alive"
    transport.arrive(a, wire.Ack(1))
    transport.arrive(a, wire.Failure(1, "ServerError", "a repeat changes nothing"))
    assert operation.wait() is None


def test_an_answer_that_cannot_be_taken_fails_its_ticket_and_no_other():
    transport = Played()
    client, a, b = client_of(transport)
    bad, good = Operation("x", ["k"], client), Operation("y", (), client)

    def take(_reply: Any) -> None:
        raise IndexError("no room")

    ask(client, a, bad, take)
    ask(client, b, good)
    transport.arrive(a, wire.Ack(1))
    transport.arrive(b, wire.Ack(2))
    assert good.wait() is None
    with pytest.raises(KVStoreError, match="the answer could not be taken: IndexError: no room") as info:
        bad.wait()
    assert isinstance(info.value.__cause__, IndexError)


def test_whoever_sees_a_ticket_done_sees_its_error():
    """The error is there before the operation looks done, for another thread may look at any time."""
    transport = Played(lambda _, request: [wire.Failure(request.seq, "ServerError", "x")])
    client, a, _ = client_of(transport)
    seen = []
    ask(client, a, Operation("x", (), client, lambda operation: seen.append(set(operation.open))))
    client.poll()
    assert seen == [{1}]


def test_a_request_that_cannot_be_encoded_leaves_nothing_behind():
    transport = Played(acknowledge)
    client, a, _ = client_of(transport)
    operation = Operation("x", (), client)
    with pytest.raises(UnicodeEncodeError):
        client.ask(operation, Question(a, operation, wire.Leave, {"error": "\ud800"}))
    assert operation.wait() is None
    client.call(a, "y", wire.Barrier, **BARRIER)
    assert [(r.seq, r.sender.done) for _, r in transport.asked] == [(1, 1)]


# ---- endings


def test_what_ends_the_job_ends_all_waits_and_the_first_reason_stays():
    transport = Played()
    client, a, _ = client_of(transport)
    operation = Operation("x", (), client)
    ask(client, a, operation)
    client.fail(NodeLost("server 1 is lost"))
    client.fail(NodeLost("something later"))
    for action in (operation.wait, client.check, lambda: client.call(a, "y", wire.Barrier, **BARRIER)):
        with pytest.raises(NodeLost, match="server 1 is lost"):
            action()
    client.tell(a, wire.Barrier, **BARRIER)
    assert len(transport.asked) == 2, "a farewell goes out all the same"


def test_an_answer_that_was_there_before_the_end_of_the_job_is_taken():
    transport = Played()
    client, a, _ = client_of(transport)
    operation = Operation("x", (), client)
    ask(client, a, operation)
    transport.arrive(a, wire.Failure(1, "NotFinite", "push 3 by this worker"))
    client.fail(NodeLost("worker 0 has failed"))
    with pytest.raises(NotFinite, match="push 3 by this worker"):
        operation.wait()


def test_after_closing_every_call_says_so():
    transport = Played()
    client, a, _ = client_of(transport)
    operation = Operation("x", (), client)
    ask(client, a, operation)
    client.close()
    assert transport.closed
    for action in (operation.wait, operation.done, lambda: client.call(a, "y", wire.Barrier, **BARRIER)):
        with pytest.raises(UsageError, match="this process has left the job"):
            action()


def test_a_request_that_no_peer_would_take_is_refused_at_the_call():
    transport = Played(acknowledge)
    client, server, _ = client_of(transport)
    keys = [f"{number:01000}" for number in range(17_000)]
    with pytest.raises(UsageError, match="use fewer at once"):
        client.call(server, "telling", wire.Ready, store=0, keys=keys)
    assert not transport.asked
    client.call(server, "telling", wire.Ready, store=0, keys=keys[:100])


@pytest.mark.parametrize("times", [1, 2, 3])
def test_what_ends_the_making_of_new_links_is_raised_and_the_next_call_makes_them(times: int):
    """The handler of an alarm raises what looks like an error of the system's."""
    transport = Played(acknowledge)
    client, a, _ = client_of(transport)
    left = [TimeoutError("an alarm") for _ in range(times)]

    def abandon() -> None:
        if left:
            raise left.pop()

    transport.abandon = abandon  # type: ignore[method-assign]
    client.reconnect()
    for _ in range(2):
        with contextlib.suppress(TimeoutError):
            client.call(a, "x", wire.Barrier, **BARRIER)
    assert not left
    assert isinstance(client.call(a, "x", wire.Barrier, **BARRIER), wire.Ack)
