"""What is asked when a call is late, in which order, and how long for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvstore import wire
from kvstore.member import client as client_module
from kvstore.member.client import MOST_PLACES, MOST_RANGES, Explanations, find_out, grouped
from kvstore.member.outstanding import Question
from kvstore.ticket import Operation

GUIDE = b"the scheduler"
Answer = Callable[[bytes, Any], Any]


class PlayedAsker:
    """Asks nobody: ``answer`` has what comes back, None for nothing."""

    def __init__(self, answer: Answer, guide: bytes | None = GUIDE) -> None:
        self.guide = guide
        self.node = wire.Node("worker", 0, 1)
        self.asked: list[tuple[bytes, Any]] = []
        self.waited: list[float] = []
        self.given_up: list[str] = []
        self._answer = answer

    def ask(self, operation: Operation, *questions: Question) -> None:
        for question in questions:
            message = question.message(wire.Sender(self.node, len(self.asked) + 1, 0))
            self.asked.append((question.peer, message))
            operation.open.add(len(self.asked))
            reply = self._answer(question.peer, message)
            if reply is not None:
                question.take(reply)
                operation.open.discard(len(self.asked))

    def wait_until(self, condition: Callable[[], bool], timeout: float) -> bool:
        if not condition():
            self.waited.append(timeout)
        return condition()

    def give_up(self, operation: Operation) -> None:
        self.given_up.append(operation.what)


def late() -> Operation:
    operation = Operation("push", ["w"])
    operation.open.add(7)
    return operation


def answers(_peer: bytes, message: Any) -> Any:
    if isinstance(message, wire.Explain):
        return wire.Explanation(message.seq, f"waits for {message.about}", [message.about])
    return wire.Located(message.seq, message.ranks, ["is at train.py:41 in load"] * len(message.ranks))


def test_every_peer_is_asked_what_and_then_the_scheduler_where() -> None:
    client = PlayedAsker(answers)
    found = find_out(client, late(), {b"server 0": 1, b"server 1": 2})
    assert found.known == ("server 0 waits for 1; server 1 waits for 2; workers 1-2 are at train.py:41 in load")
    me = client.node
    assert client.asked == [
        (b"server 0", wire.Explain(wire.Sender(me, 1, 0), 1)),
        (b"server 1", wire.Explain(wire.Sender(me, 2, 0), 2)),
        (GUIDE, wire.Locate(wire.Sender(me, 3, 0), "worker", [1, 2])),
    ]
    assert client.waited == []


def test_each_question_has_its_time() -> None:
    client = PlayedAsker(lambda _, message: None)
    found = find_out(client, late(), {b"server 0": 1})
    assert (found.known, found.silent) == ("server 0 does not answer", ("server 0",))
    assert client.waited == [client_module.EXPLAIN_S, client_module.LOCATE_S]
    assert [message.role for _, message in client.asked[1:]] == ["server"]
    assert client.given_up == ["question where others are"]


def test_where_there_is_no_scheduler_to_ask_or_it_is_silent_nobody_is_looked_for() -> None:
    for guide, peer in ((None, b"server 0"), (GUIDE, GUIDE)):
        client = PlayedAsker(lambda _, message: None, guide)
        find_out(client, late(), {peer: 1})
        assert len(client.asked) == 1


def test_a_call_that_is_answered_meanwhile_waits_for_no_places() -> None:
    def answered(peer: bytes, message: Any) -> Any:
        operation.open.clear()
        return answers(peer, message) if isinstance(message, wire.Explain) else None

    operation, client = late(), PlayedAsker(answered)
    assert find_out(client, operation, {b"server 0": 1}).known == "server 0 waits for 1"
    assert client.waited == []


def test_each_peer_is_named_once_with_what_it_said() -> None:
    explanations = Explanations([b"server 1", b"server 0", b"server 1", b"the scheduler"])
    explanations.take(b"server 0", wire.Explanation(1, "waits for worker 2"))
    explanations.take(b"the scheduler", wire.Explanation(2, ""))
    assert explanations.known == (
        "server 1 does not answer; server 0 waits for worker 2; the scheduler has not answered yet"
    )
    assert explanations.silent == ("server 1",)


def test_places_come_after_the_reasons() -> None:
    explanations = Explanations([b"server 0"])
    explanations.take(b"server 0", wire.Explanation(1, "waits for worker 2", [2]))
    explanations.take_places("worker", wire.Located(2, [2], ["is at train.py:41 in load"]))
    assert explanations.known == "server 0 waits for worker 2; worker 2 is at train.py:41 in load"


def test_a_peer_that_says_nothing_is_said_to_once() -> None:
    explanations = Explanations([b"server 0", b"server 1"])
    explanations.take_places(
        "server", wire.Located(2, [0, 1], ["does not answer: no sign of life", "is at a.py:1 in f"])
    )
    assert explanations.known == (
        "server 1 does not answer; server 0 does not answer: no sign of life; server 1 is at a.py:1 in f"
    )
    assert explanations.silent == ("server 0", "server 1")


def test_who_is_waited_for_are_the_missing_workers_and_the_peers_that_say_nothing() -> None:
    explanations = Explanations([b"server 0", b"server 1", b"server 12", b"aggregator 3", b"the scheduler"])
    explanations.take(b"server 0", wire.Explanation(1, "waits", [1, 4]))
    explanations.take(b"server 1", wire.Explanation(2, "waits", [0, 4]))
    everybody = {"worker": [0, 1, 4], "server": [12], "aggregator": [3]}
    assert explanations.awaited(wire.Node("worker", 1, 1)) == {**everybody, "worker": [0, 4]}, "not the one who asks"
    assert explanations.awaited(wire.Node("aggregator", 1, 1)) == everybody
    assert Explanations([b"the scheduler"]).awaited(wire.Node("worker", 0, 1)) == {}


@pytest.mark.parametrize(
    ("places", "sentence"),
    [
        ({1: "is at a.py:1 in f"}, "worker 1 is at a.py:1 in f"),
        (dict.fromkeys(range(1, 8), "is at a.py:1 in f"), "workers 1-7 are at a.py:1 in f"),
        (dict.fromkeys((1, 2, 3, 5, 8, 9), "has left the job"), "workers 1-3, 5, 8-9 have left the job"),
        (dict.fromkeys((0, 1), "does not answer: x"), "workers 0-1 do not answer: x"),
        (
            dict.fromkeys(range(0, 2 * MOST_RANGES + 6, 2), "waits for it"),
            "workers 0, 2, 4, 6, 8, 10, 12, 14 and 3 more waits for it",
        ),
    ],
)
def test_members_at_one_place_are_named_together(places, sentence) -> None:
    assert grouped("worker", [*places], [*places.values()]) == [sentence]


def test_sixty_four_members_at_as_many_places_make_a_short_message() -> None:
    said = grouped("worker", [*range(64)], [f"is at train.py:{rank} in f" for rank in range(64)])
    assert said[0] == "worker 0 is at train.py:0 in f"
    assert said[MOST_PLACES:] == ["60 more workers are elsewhere"]
