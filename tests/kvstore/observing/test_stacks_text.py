from __future__ import annotations

from kvstore import wire
from kvstore.observing.text import LocatedMember, located_members, stacks_lines


def stacks(rank: int, place: str = "train.py:3 in main", ours: str = "courier") -> wire.Stacks:
    return wire.Stacks(
        wire.Node("worker", rank, 1), 1, place, "", [["MainThread", ["a.py:1 in f", place]], [f"kvstore {ours}", []]]
    )


def test_answers_are_found_by_rank_and_who_has_not_answered_is_there_too() -> None:
    located = located_members("worker", {0: "is at a", 1: "does not answer"}, [stacks(0)])
    assert [(member.rank, member.stacks is not None) for member in located] == [(0, True), (1, False)]


def test_equal_stacks_are_shown_once() -> None:
    answers = [stacks(0), stacks(1), stacks(2, "train.py:9 in load"), stacks(3)]
    places = {one.node.rank: f"is at {one.place}" for one in answers} | {4: "does not answer"}
    assert [line.text for line in stacks_lines(located_members("worker", places, answers))] == [
        *(
            "",
            "workers 0, 1, 3: each is at train.py:3 in main",
            "  MainThread",
            "    a.py:1 in f",
            "    train.py:3 in main",
        ),
        *("", "worker 2 is at train.py:9 in load", "  MainThread", "    a.py:1 in f", "    train.py:9 in load"),
        *("", "worker 4 does not answer"),
    ]


def test_this_packages_threads_are_shown_if_that_is_wanted() -> None:
    located = [LocatedMember("worker", 0, "is at x", stacks(0))]
    assert "  kvstore courier" not in [line.text for line in stacks_lines(located)]
    assert "  kvstore courier" in [line.text for line in stacks_lines(located, all_threads=True)]
