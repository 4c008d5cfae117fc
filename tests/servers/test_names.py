"""How members are named in messages to people."""

from __future__ import annotations

import pytest

from servers.names import MOST, have, name


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


def test_the_verb_agrees() -> None:
    assert (have([0]), have([0, 1]), have(range(100))) == ("has", "have", "have")
