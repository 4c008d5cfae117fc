"""A client's waits that end at their deadlines: what is asked then, and what the error says."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from played import BARRIER, Answers, Played, ask, client_of

from kvstore import wire
from kvstore.errors import DeadlineExceeded
from kvstore.member import client as client_module
from kvstore.member.client import SLICE_S, Client
from kvstore.ticket import Operation, WaitLimits


def test_a_wait_ends_at_its_deadline_and_asks_what_holds_it_up():
    def answers(peer: bytes, request: wire.Request) -> list[wire.Message]:
        if not isinstance(request, wire.Explain):
            return []
        assert request.about == {a: 1, b: 2}[peer]
        return [wire.Explanation(request.seq, "waits for worker 1")] if peer == a else []

    transport = Played(answers)
    client, a, b = client_of(transport)
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

    transport = Played(answers)
    client, a, _ = client_of(transport)
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
    transport = Played()
    client, a, _ = client_of(transport, timeout_s=7.0)
    operation = Operation("x", (), client)
    ask(client, a, operation)
    with pytest.raises(DeadlineExceeded, match="after 7 s"):
        operation.wait()
    transport.arrive(a, wire.Ack(1))
    assert operation.wait() is None


def test_a_ticket_may_have_a_deadline_of_its_own():
    transport = Played()
    client, a, _ = client_of(transport)
    operation = Operation("x", (), client, limits=WaitLimits(2.0, 2.0))
    ask(client, a, operation)
    with pytest.raises(DeadlineExceeded, match="after 2 s"):
        operation.wait()


def test_wait_all_shares_one_deadline_and_leaves_errors_to_the_tickets():
    transport = Played(lambda _, r: [wire.Failure(r.seq, "ServerError", "x")] if r.seq == 1 else [])
    client, a, _ = client_of(transport)
    failed, late = Operation("x", (), client), Operation("y", (), client)
    ask(client, a, failed)
    client.wait_all([failed])
    ask(client, a, late)
    began = transport.now
    with pytest.raises(DeadlineExceeded, match="y is not done"):
        client.wait_all([failed, late], 4.0)
    assert transport.now - began == 4.0 + client_module.EXPLAIN_S
