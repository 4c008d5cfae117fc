"""Explanations in words."""

from __future__ import annotations

import pytest

from kvstore import wire
from kvstore.member.client import MOST_PLACES, MOST_RANGES, Explanations, grouped


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
