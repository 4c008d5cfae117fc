"""What a worker says of calls that may wait in vain, and what it does when that is proven."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence

import pytest
from played import BARRIER, Played, ask, client_of

from kvstore import wire
from kvstore.errors import DeadlineExceeded
from kvstore.member.client import Client
from kvstore.member.mutual_waits import LOOK_S, BlockedTime, Findings
from kvstore.ticket import Operation

LONG_S = 100.0


def waiting(
    explained: Callable[[bytes, wire.Explain], Sequence[wire.Message]],
    calm: Callable[[Collection[int]], bool] = lambda _: True,
) -> tuple[Client, bytes, bytes, Played, list[tuple[float, int, Findings]]]:
    """A client, its servers, its transport, and what it has said so far, with when."""
    said: list[tuple[float, int, Findings]] = []

    def answers(peer: bytes, request: wire.Request) -> Sequence[wire.Message]:
        return explained(peer, request) if isinstance(request, wire.Explain) else []

    transport = Played(answers)
    transport.now = 1000.0
    client, a, b = client_of(transport, LONG_S, LONG_S)
    client.mutual.say = lambda prompt, found: said.append((transport.now, prompt, found))
    client.mutual.only_these_act = calm
    return client, a, b, transport, said


def of_workers(_peer: bytes, request: wire.Explain) -> list[wire.Message]:
    """Each request waits for the worker of its number."""
    return [wire.Explanation(request.seq, f"waits for worker {request.about}", [request.about])]


def test_a_worker_says_what_it_waits_for_after_five_seconds_and_rarely_again():
    client, a, b, _, said = waiting(of_workers)
    operation = Operation("pushpull", ["w"], client)
    ask(client, a, operation)
    ask(client, b, operation)
    with pytest.raises(DeadlineExceeded, match="after 100 s"):
        operation.wait()
    *looks, last = said
    assert [now - 1000.0 for now, _, _ in looks] == [LOOK_S, 2 * LOOK_S, 4 * LOOK_S, 8 * LOOK_S, 16 * LOOK_S]
    assert {prompt for _, prompt, _ in looks} == {0}
    found = looks[0][2]
    assert (found.missing, len(found.waits)) == ([1, 2], 1)
    assert found.text.startswith("pushpull of 'w' at ")
    assert found.text.endswith(": server 0 waits for worker 1; server 1 waits for worker 2")
    assert last[2] == Findings(), "it waits no more"


def test_pushes_that_nobody_waits_for_must_have_arrived_and_are_not_needed():
    client, a, b, _, said = waiting(of_workers)
    ask(client, b, Operation("push", ["x"], client))
    with pytest.raises(DeadlineExceeded):
        client.call(a, "barrier", wire.Barrier, None, **BARRIER)
    assert said[0][2].missing == [2]


@pytest.mark.parametrize(
    "explained",
    [
        lambda _, request: [wire.Explanation(request.seq, "", [])],
        lambda _, request: [wire.Explanation(request.seq, "is writing checkpoint 3", [])],
        lambda peer, request: of_workers(peer, request) if request.about == 1 else [],
    ],
    ids=["not known", "waits for no worker", "one is not explained"],
)
def test_a_worker_says_nothing_of_what_it_is_not_sure_of(
    explained: Callable[[bytes, wire.Explain], Sequence[wire.Message]],
):
    client, a, b, _, said = waiting(explained)
    operation = Operation("pushpull", ["w"], client)
    ask(client, a, operation)
    ask(client, b, operation)
    with pytest.raises(DeadlineExceeded):
        operation.wait()
    assert said == []


def test_a_worker_says_nothing_where_another_thread_may_go_on():
    client, a, _, _, said = waiting(of_workers, lambda _: False)
    with pytest.raises(DeadlineExceeded):
        client.call(a, "barrier", wire.Barrier, None, **BARRIER)
    assert said == []


def test_a_call_with_a_timeout_of_its_own_ends_by_itself():
    client, a, _, transport, said = waiting(of_workers)
    with pytest.raises(DeadlineExceeded, match="after 30 s"):
        client.call(a, "barrier", wire.Barrier, 30.0, **BARRIER)
    assert said == []
    assert transport.now == 1030.0


def test_a_worker_that_is_prompted_says_it_again_at_once_with_the_number():
    def explained(peer: bytes, request: wire.Explain) -> list[wire.Message]:
        if not said:
            client.prompt(7)
        return of_workers(peer, request)

    client, a, _, _, said = waiting(explained)
    with pytest.raises(DeadlineExceeded):
        client.call(a, "barrier", wire.Barrier, None, **BARRIER)
    assert [(now - 1000.0, prompt) for now, prompt, _ in said[:2]] == [(LOOK_S, 0), (LOOK_S, 7)]
    assert said[0][2] == said[1][2]


def test_a_wait_that_is_proven_to_be_in_vain_ends_with_the_reason():
    client, a, _, transport, _ = waiting(of_workers)
    say = client.mutual.say
    assert say is not None

    def proven(prompt: int, found: Findings) -> None:
        client.condemn([0], "another wait")
        client.condemn(list(found.waits), "workers 0, 1 wait for each other")
        say(prompt, found)

    client.mutual.say = proven
    with pytest.raises(DeadlineExceeded, match=r"^barrier never ends: workers 0, 1 wait for each other$"):
        client.call(a, "barrier", wire.Barrier, None, **BARRIER)
    assert transport.now == 1000.0 + LOOK_S
    client.mutual.say = say
    transport.answers = lambda peer, request: [] if isinstance(request, wire.Explain) else [wire.Ack(request.seq)]
    assert client.call(a, "barrier", wire.Barrier, None, **BARRIER) is not None, "the next one is another wait"


def wait(blocked: BlockedTime, began: float, ended: float) -> None:
    waits = blocked.here()
    waits.over_s += ended - began


def test_waits_add_up_and_one_that_goes_on_counts():
    blocked = BlockedTime()
    assert blocked.total(5.0) == 0.0
    wait(blocked, 10.0, 13.0)
    assert blocked.total(20.0) == 3.0
    blocked.here().since = 21.0
    assert blocked.total(25.0) == 7.0


def test_each_thread_waits_for_itself():
    blocked = BlockedTime()
    blocked.here().since = 1.0
    other = threading.Thread(target=wait, args=(blocked, 2.0, 5.0))
    other.start()
    other.join()
    assert blocked.total(6.0) == 5.0 + 3.0
    blocked.here().since = 0.0
    assert blocked.total(9.0) == 3.0


def test_a_wait_that_begins_while_it_is_counted_is_not_counted_below_zero() -> None:
    blocked = BlockedTime()
    blocked.here().since = 7.5
    assert blocked.total(7.0) == 0.0
