from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from servers.store.rounds import Rounds


@st.composite
def arrivals(draw: st.DrawFn) -> tuple[int, int, list[tuple[int, int]]]:
    """Workers, rounds, and all their contributions in any order, some of them twice or more."""
    workers, rounds = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    once = [(rank, clock) for rank in range(workers) for clock in range(1, rounds + 1)]
    return workers, rounds, draw(st.permutations(once + draw(st.lists(st.sampled_from(once), max_size=6))))


@given(arrivals())
def test_any_interleaving_completes_every_round_once_in_order_and_by_rank(case):
    workers, count, order = case
    rounds: Rounds[tuple[int, int]] = Rounds(range(workers))
    completed, seen = [], set()
    for rank, clock in order:
        assert rounds.contribute(rank, clock, (rank, clock)) is ((rank, clock) not in seen)
        seen.add((rank, clock))
        while (items := rounds.complete()) is not None:
            completed.append(items)
            assert rounds.version == len(completed)
    assert completed == [[(rank, clock) for rank in range(workers)] for clock in range(1, count + 1)]
    assert rounds.missing(count) == {}


@given(arrivals(), st.data())
def test_missing_is_the_first_round_that_lacks_each_worker(case, data):
    workers, count, order = case
    rounds: Rounds[None] = Rounds(range(workers))
    seen = set()
    for rank, clock in order[: data.draw(st.integers(0, len(order)))]:
        rounds.contribute(rank, clock, None)
        seen.add((rank, clock))
        while rounds.complete() is not None:
            pass
    wanted = data.draw(st.integers(0, count + 2))
    expected = {}
    for rank in range(workers):
        lacking = [clock for clock in range(1, wanted + 1) if (rank, clock) not in seen]
        if lacking:
            expected[rank] = lacking[0]
    assert rounds.missing(wanted) == expected


def test_a_duplicate_does_not_replace_what_came_first():
    rounds: Rounds[str] = Rounds([0, 1])
    assert rounds.contribute(0, 1, "first")
    assert not rounds.contribute(0, 1, "second")
    rounds.contribute(1, 1, "other")
    assert rounds.complete() == ["first", "other"]
    assert not rounds.contribute(0, 1, "late")
    assert rounds.complete() is None


def test_a_round_does_not_overtake_the_one_before_it():
    rounds: Rounds[int] = Rounds([0, 1])
    for rank in (0, 1):
        rounds.contribute(rank, 2, rank)
    assert rounds.complete() is None
    for rank in (1, 0):
        rounds.contribute(rank, 1, 10 + rank)
    assert rounds.complete() == [10, 11]
    assert rounds.complete() == [0, 1]


def test_a_stranger_contributes_nothing():
    rounds: Rounds[int] = Rounds([0])
    assert not rounds.contribute(1, 1, 1)
    assert rounds.complete() is None


def test_what_is_missing_for_a_distant_round_is_known_at_once():
    rounds: Rounds[int] = Rounds([0, 1])
    rounds.contribute(0, 1, 0)
    assert rounds.missing(2**61) == {0: 2, 1: 1}


def test_a_copy_does_without_whom_the_original_does_without() -> None:
    rounds: Rounds[int] = Rounds(range(3), quorum=3)
    rounds.leave([2])
    copied = rounds.copy()
    for rank in (0, 1):
        assert copied.contribute(rank, 1, rank)
    assert copied.missing(1) == {}
    assert copied.complete() == [0, 1]
