"""A member's side of its links, over a transport that the test plays: requests, answers, and what ends them."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from played import BARRIER, Answers, Played, acknowledge, ask, client_of, over

from kvstore import wire
from kvstore.errors import DeadlineExceeded, KVStoreError, Mismatch, NodeLost, NotFinite, ServerError, UsageError
from kvstore.member import client as client_module
from kvstore.member.client import SLICE_S, Client
from kvstore.member.outstanding import Question
from kvstore.ticket import Operation, WaitLimits


def test_a_call_returns_the_reply():
    transport, client, a, _ = over(Played(acknowledge))
    assert client.call(a, "x", wire.Barrier, **BARRIER) == wire.Ack(1)
    assert transport.waits == []


def test_requests_are_numbered_and_say_what_is_done():
    transport, client, a, b = over(Played())
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
    transport, client, a, b = over(Played())
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


def test_whoever_sees_a_ticket_done_sees_its_error():
    """The error is there before the operation looks done, for another thread may look at any time."""
    _, client, a, _ = over(Played(lambda _, request: [wire.Failure(request.seq, "ServerError", "x")]))
    seen = []
    ask(client, a, Operation("x", (), client, lambda operation: seen.append(set(operation.open))))
    client.poll()
    assert seen == [{1}]


def test_a_request_that_cannot_be_encoded_leaves_nothing_behind():
    transport, client, a, _ = over(Played(acknowledge))
    operation = Operation("x", (), client)
    with pytest.raises(UnicodeEncodeError):
        client.ask(operation, Question(a, operation, wire.Leave, {"error": "\ud800"}))
    assert operation.wait() is None
    client.call(a, "y", wire.Barrier, **BARRIER)
    assert [(r.seq, r.sender.done) for _, r in transport.asked] == [(1, 1)]


# ---- endings


def asking() -> tuple[Played, Client, bytes, Operation]:
    """A client that has asked server 0 something, over a transport where nothing comes."""
    transport, client, a, _ = over(Played())
    operation = Operation("x", (), client)
    ask(client, a, operation)
    return transport, client, a, operation


def test_what_ends_the_job_ends_all_waits_and_the_first_reason_stays():
    transport, client, a, operation = asking()
    client.fail(NodeLost("server 1 is lost"))
    client.fail(NodeLost("something later"))
    for action in (operation.wait, client.check, lambda: client.call(a, "y", wire.Barrier, **BARRIER)):
        with pytest.raises(NodeLost, match="server 1 is lost"):
            action()
    client.tell(a, wire.Barrier, **BARRIER)
    assert len(transport.asked) == 2, "a farewell goes out all the same"


def test_an_answer_that_was_there_before_the_end_of_the_job_is_taken():
    transport, client, a, operation = asking()
    transport.arrive(a, wire.Failure(1, "NotFinite", "push 3 by this worker"))
    client.fail(NodeLost("worker 0 has failed"))
    with pytest.raises(NotFinite, match="push 3 by this worker"):
        operation.wait()


def test_after_closing_every_call_says_so():
    transport, client, a, operation = asking()
    client.close()
    assert transport.closed
    for action in (operation.wait, operation.done, lambda: client.call(a, "y", wire.Barrier, **BARRIER)):
        with pytest.raises(UsageError, match="this process has left the job"):
            action()


def test_a_request_that_no_peer_would_take_is_refused_at_the_call():
    transport, client, server, _ = over(Played(acknowledge))
    keys = [f"{number:01000}" for number in range(17_000)]
    with pytest.raises(UsageError, match="use fewer at once"):
        client.call(server, "telling", wire.Ready, store=0, keys=keys)
    assert not transport.asked
    client.call(server, "telling", wire.Ready, store=0, keys=keys[:100])


@pytest.mark.parametrize("times", [1, 2, 3])
def test_what_ends_the_making_of_new_links_is_raised_and_the_next_call_makes_them(times: int):
    """The handler of an alarm raises what looks like an error of the system's."""
    transport, client, a, _ = over(Played(acknowledge))
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


class Gate:
    """A transport that blocks in ``recv`` until a message or an interrupt comes, and tells what it is doing."""

    def __init__(self) -> None:
        self.now = 0.0
        self.changed = threading.Condition()
        self.inbox: deque[tuple[bytes, list[Any]]] = deque()
        self.rung = False
        self.waiting = threading.Event()
        self.sent: deque[tuple[bytes, wire.Request]] = deque()
        self.inside = 0

    def connect(self, endpoint: str, *, bulk: bool = False) -> bytes:
        return endpoint.encode()

    def send(self, peer: bytes, frames: Sequence[Any], priority: int | None = None) -> None:
        self._enter()
        self.sent.append((peer, wire.decode(frames)))
        self.inside -= 1

    def recv(self, timeout: float) -> tuple[bytes, list[Any]] | None:
        self._enter()
        try:
            with self.changed:
                if timeout > 0 and not self.inbox and not self.rung:
                    self.waiting.set()
                    self.changed.wait_for(lambda: self.inbox or self.rung, 20)  # far longer than was asked for
                    self.waiting.clear()
                self.rung = False if timeout > 0 else self.rung
                return self.inbox.popleft() if self.inbox else None
        finally:
            self.inside -= 1

    def arrive(self, peer: bytes, message: wire.Message) -> None:
        with self.changed:
            self.inbox.append((peer, wire.encode(message)))
            self.changed.notify()

    def interrupt(self) -> None:
        with self.changed:
            self.rung = True
            self.changed.notify()

    def _enter(self) -> None:
        assert not self.inside, "two threads are in the transport"
        self.inside += 1


class Waiting(threading.Thread):
    """Waits for an operation; ``outcome`` is what came of it."""

    def __init__(self, operation: Operation) -> None:
        super().__init__(daemon=True)
        self.operation, self.outcome = operation, None
        self.start()

    def run(self) -> None:
        try:
            self.outcome = self.operation.wait(1000.0)
        except KVStoreError as exc:
            self.outcome = exc

    def end(self) -> Any:
        self.join(10)
        assert not self.is_alive(), "it still waits"
        return self.outcome


def asked(client: Client, peer: bytes) -> Operation:
    operation = Operation("x", (), client)
    ask(client, peer, operation, operation.take)
    return operation


def test_a_sender_does_not_wait_for_one_who_waits():
    gate, client, a, b = over(Gate())
    waiting = Waiting(asked(client, a))
    for _ in range(5):
        assert gate.waiting.wait(10)
        before = len(gate.sent)
        asked(client, b)  # would take 20 s, were the other not interrupted
        assert len(gate.sent) == before + 1
    gate.arrive(a, wire.Ack(1))
    assert waiting.end() == wire.Ack(1)


def test_two_who_wait_both_get_theirs_in_either_order():
    for order in ((1, 2), (2, 1)):
        gate, client, a, b = over(Gate())
        both = {1: Waiting(asked(client, a)), 2: Waiting(asked(client, b))}
        for seq in order:
            assert gate.waiting.wait(10)
            gate.arrive({1: a, 2: b}[seq], wire.Ack(seq))
            assert both[seq].end() == wire.Ack(seq)


def test_what_one_thread_takes_in_wakes_the_other():
    gate, client, a, b = over(Gate())
    first = Waiting(asked(client, a))
    assert gate.waiting.wait(10)
    second = Waiting(asked(client, b))
    with gate.changed:  # both answers at once: whoever is at the transport takes both
        gate.inbox.extend([(b, wire.encode(wire.Ack(2))), (a, wire.encode(wire.Ack(1)))])
        gate.changed.notify()
    assert (first.end(), second.end()) == (wire.Ack(1), wire.Ack(2))


def test_a_failure_wakes_all_who_wait():
    gate, client, a, b = over(Gate())
    both = [Waiting(asked(client, peer)) for peer in (a, b)]
    assert gate.waiting.wait(10)
    client.fail(NodeLost("over"))
    assert [str(waiting.end()) for waiting in both] == ["over", "over"]


def test_closing_wakes_all_who_wait():
    gate = Gate()
    gate.close = lambda linger: None  # type: ignore[attr-defined]
    client, a, b = client_of(gate)
    both = [Waiting(asked(client, peer)) for peer in (a, b)]
    assert gate.waiting.wait(10)
    client.close()
    assert [type(waiting.end()) for waiting in both] == [UsageError, UsageError]


def test_polling_does_not_wait_for_one_who_waits():
    gate, client, a, b = over(Gate())
    other = asked(client, b)
    waiting = Waiting(asked(client, a))
    assert gate.waiting.wait(10)
    assert not other.done()
    gate.arrive(b, wire.Ack(1))
    gate.arrive(a, wire.Ack(2))
    assert waiting.end() == wire.Ack(2)
    assert other.done()


def test_a_wait_ends_at_its_deadline_and_asks_what_holds_it_up():
    def answers(peer: bytes, request: wire.Request) -> list[wire.Message]:
        if not isinstance(request, wire.Explain):
            return []
        assert request.about == {a: 1, b: 2}[peer]
        return [wire.Explanation(request.seq, "waits for worker 1")] if peer == a else []

    transport, client, a, b = over(Played(answers))
    operation = Operation("pull", ["w", "x"], client)
    for peer in (a, b, a):
        ask(client, peer, operation)
    with pytest.raises(DeadlineExceeded) as info:
        operation.wait(3.0)
    assert str(info.value) == (
        "pull of 'w', 'x' is not done after 3 s: server 0 waits for worker 1; server 1 does not answer"
    )
    assert info.value.silent == ("server 1",)
    assert isinstance(info.value, TimeoutError)
    assert sum(isinstance(request, wire.Explain) for _, request in transport.asked) == 2, "each peer is asked once"
    assert transport.now == 3.0 + client_module.EXPLAIN_S
    assert max(transport.waits) <= SLICE_S


def test_a_peer_that_knows_nothing_of_it_has_not_answered_yet():
    transport = Played(lambda _, r: [wire.Explanation(r.seq, "")] if isinstance(r, wire.Explain) else [])
    client, a, _ = client_of(transport)
    with pytest.raises(DeadlineExceeded, match="server 0 has not answered yet") as info:
        client.call(a, "x", wire.Barrier, 1.0, **BARRIER)
    assert info.value.silent == ()


def guided(
    located: Callable[[wire.Locate], Sequence[wire.Message]],
    explained: Callable[[wire.Explain], Sequence[wire.Message]] | None = None,
) -> tuple[Played, Client, bytes]:
    """A client that waits for worker 1 at a server, and a scheduler that answers questions where members are."""

    def answers(_peer: bytes, request: wire.Request) -> Sequence[wire.Message]:
        if isinstance(request, wire.Locate):
            return located(request)
        if not isinstance(request, wire.Explain):
            return []
        return explained(request) if explained else [wire.Explanation(request.seq, "waits for worker 1", [1])]

    transport, client, a, _ = over(Played(answers))
    client.guide = client.connect("the scheduler", "the scheduler")
    return transport, client, a


def test_an_error_says_where_the_missing_are():
    transport, client, a = guided(
        lambda request: [wire.Located(request.seq, request.ranks, ["is at train.py:41 in load"])]
    )
    with pytest.raises(DeadlineExceeded, match=r"waits for worker 1; worker 1 is at train\.py:41 in load$"):
        client.call(a, "x", wire.Barrier, 1.0, **BARRIER)
    assert transport.now == 1.0, "no more time has passed"
    (asked,) = (request for _, request in transport.asked if isinstance(request, wire.Locate))
    assert (asked.role, asked.ranks) == ("worker", [1])


def test_servers_that_say_nothing_are_looked_for_too():
    _, client, a = guided(
        lambda request: [wire.Located(request.seq, request.ranks, ["does not answer: no sign of life for 9 s"])],
        lambda _: [],
    )
    with pytest.raises(
        DeadlineExceeded, match=r"after 1 s: server 0 does not answer: no sign of life for 9 s$"
    ) as late:
        client.call(a, "x", wire.Barrier, 1.0, **BARRIER)
    assert late.value.silent == ("server 0",)


@pytest.mark.parametrize("refused", [False, True])
def test_an_error_says_less_where_nobody_knows_where_the_missing_are(refused: bool):
    transport, client, a = guided(
        lambda request: [wire.Failure(request.seq, "UsageError", "is not a member")] if refused else []
    )
    with pytest.raises(DeadlineExceeded, match=r"server 0 waits for worker 1$"):
        client.call(a, "x", wire.Barrier, 1.0, **BARRIER)
    assert transport.now == 1.0 + (0.0 if refused else client_module.LOCATE_S)


def test_an_answer_that_comes_while_the_missing_are_looked_for_is_not_too_late():
    transport, client, a = guided(lambda _: [])
    transport.answers = _then(transport, transport.answers, a)
    assert client.call(a, "x", wire.Barrier, 1.0, **BARRIER) == wire.Ack(1)
    assert transport.now == 1.0


def _then(transport: Played, answers: Answers, peer: bytes) -> Answers:
    """``answers``; and when it is asked where members are, the first request is answered."""

    def and_more(asked: bytes, request: wire.Request) -> Sequence[wire.Message | list[bytes]]:
        if isinstance(request, wire.Locate):
            transport.arrive(peer, wire.Ack(1))
        return answers(asked, request)

    return and_more


def test_a_scheduler_that_says_nothing_itself_is_not_asked_where_others_are():
    transport, client, _ = guided(lambda _: [], lambda _: [])
    assert client.guide is not None
    with pytest.raises(DeadlineExceeded, match="the scheduler does not answer"):
        client.call(client.guide, "x", wire.Barrier, 1.0, **BARRIER)
    assert not any(isinstance(request, wire.Locate) for _, request in transport.asked)


def test_an_answer_that_comes_while_it_is_asked_for_is_not_too_late():
    def answers(_peer: bytes, request: wire.Request) -> list[wire.Message]:
        return [wire.Ack(1), wire.Explanation(request.seq, "")] if isinstance(request, wire.Explain) else []

    client, a, _ = client_of(Played(answers))
    assert client.call(a, "x", wire.Barrier, 1.0, **BARRIER) == wire.Ack(1)


def test_without_a_timeout_the_clients_counts_and_waiting_again_is_allowed():
    transport, client, a, _ = over(Played(), timeout_s=7.0)
    operation = Operation("x", (), client)
    ask(client, a, operation)
    with pytest.raises(DeadlineExceeded, match="after 7 s"):
        operation.wait()
    transport.arrive(a, wire.Ack(1))
    assert operation.wait() is None


def test_a_ticket_may_have_a_deadline_of_its_own():
    _, client, a, _ = over(Played())
    operation = Operation("x", (), client, limits=WaitLimits(2.0, 2.0))
    ask(client, a, operation)
    with pytest.raises(DeadlineExceeded, match="after 2 s"):
        operation.wait()


def test_wait_all_shares_one_deadline_and_leaves_errors_to_the_tickets():
    transport, client, a, _ = over(Played(lambda _, r: [wire.Failure(r.seq, "ServerError", "x")] if r.seq == 1 else []))
    failed, late = Operation("x", (), client), Operation("y", (), client)
    ask(client, a, failed)
    client.wait_all([failed])
    ask(client, a, late)
    began = transport.now
    with pytest.raises(DeadlineExceeded, match="y is not done"):
        client.wait_all([failed, late], 4.0)
    assert transport.now - began == 4.0 + client_module.EXPLAIN_S


def test_one_that_was_given_up_ends_because_of_itself_and_of_nobody_else():
    client, a, _ = client_of(
        Played(lambda _, request: [wire.Failure(request.seq, "NodeLost", f"{client.node} {wire.GIVEN_UP}")])
    )
    client.links.process = "start 2 of worker 1"
    with pytest.raises(NodeLost, match="given up") as caught:
        client.call(a, "asking", wire.Census)
    assert caught.value.cause == "start 2 of worker 1"
