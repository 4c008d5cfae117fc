from __future__ import annotations

from kvstore.wire import Barrier
from servers.scheduler.barriers import Barriers


def arrive(barriers: Barriers, rank: int, number: int = 1, seq: int = 1) -> set[int]:
    request = Barrier("worker", rank, 1, seq, 0, store=0, number=number)
    released = barriers.arrive(b"peer %d" % rank, request)
    assert all(peer == b"peer %d" % request.rank for peer, request in released)
    return {request.rank for _, request in released}


def test_the_last_to_come_lets_all_go():
    barriers = Barriers(range(3))
    assert [arrive(barriers, rank) for rank in (2, 0, 1)] == [set(), set(), {0, 1, 2}]
    assert [arrive(barriers, rank, 2) for rank in (0, 1, 2)] == [set(), set(), {0, 1, 2}]


def test_coming_twice_is_coming_once_and_the_second_request_is_answered():
    barriers = Barriers(range(2))
    arrive(barriers, 0, seq=1)
    assert arrive(barriers, 0, seq=5) == set()
    released = barriers.arrive(b"", Barrier("worker", 1, 1, 1, 0, store=0, number=1))
    assert {(request.rank, request.seq) for _, request in released} == {(0, 5), (1, 1)}


def test_numbers_do_not_mix():
    barriers = Barriers(range(2))
    arrive(barriers, 0, 1)
    assert arrive(barriers, 1, 2) == set()
    assert arrive(barriers, 1, 1) == {0, 1}


def test_those_who_wait_for_the_departed_are_let_go():
    barriers = Barriers(range(3))
    arrive(barriers, 0, 1)
    arrive(barriers, 2, 1)
    arrive(barriers, 2, 2)
    assert barriers.abandon({2}) == []
    hopeless = barriers.abandon({0, 2})
    assert [(request.rank, request.number, missing) for _, request, missing in hopeless] == [(2, 2, {0})]
    assert barriers.abandon({0, 2}) == []
    assert arrive(barriers, 1, 1) == {0, 1, 2}


def test_explain_names_who_has_not_come():
    barriers = Barriers(range(3))
    arrive(barriers, 1, seq=7)
    assert barriers.explain(1, 7) == "waits at the barrier for worker 0, worker 2"
    assert barriers.explain(1, 8) == barriers.explain(0, 7) == ""
