"""How members are named in messages to people."""

from __future__ import annotations

import pytest

from kvstore import wire
from servers.names import MOST, have, name, workers


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "worker 3"),
        ({4, 1}, "worker 1, worker 4"),
        (range(MOST), ", ".join(f"worker {rank}" for rank in range(MOST))),
        (range(MOST + 3), ", ".join(f"worker {rank}" for rank in range(MOST)) + " and 3 more"),
    ],
)
def test_the_lowest_ranks_are_named_and_the_others_counted(ranks: list[int], text: str) -> None:
    assert name("worker", ranks) == text


def test_a_standby_is_named_by_its_server() -> None:
    assert name("standby", [1, 0]) == "standby of server 0, standby of server 1"
    assert str(wire.Node("standby", 1, 2)) == "the standby of server 1"


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "worker 3"),
        ([3, 4], "workers 3, 4"),
        ([4, 5, 6, 7], "workers 4 to 7"),
        ([0, 2, 3], "workers 0, 2, 3"),
        ([0, *range(2, MOST + 3)], "workers 0, 2, 3, 4, 5, 6, 7, 8 and 2 more"),
    ],
)
def test_workers_who_have_contributed_together_are_named_in_short(ranks: list[int], text: str) -> None:
    assert workers(ranks) == text


def test_the_verb_agrees() -> None:
    assert (have([0]), have([0, 1]), have(range(100))) == ("has", "have", "have")
