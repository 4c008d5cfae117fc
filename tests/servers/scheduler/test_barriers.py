from __future__ import annotations

from asking import sender

from kvstore import wire
from servers.scheduler.stores import Barriers


def arrive(barriers: Barriers, rank: int, number: int = 1, seq: int = 1) -> set[int]:
    request = wire.Barrier(sender(rank, seq), store=0, number=number)
    released = barriers.arrive(b"peer %d" % rank, request)
    assert all(peer == b"peer %d" % request.node.rank for peer, request in released)
    return {request.node.rank for _, request in released}


def test_the_last_to_come_lets_all_go():
    barriers = Barriers(range(3))
    assert [arrive(barriers, rank) for rank in (2, 0, 1)] == [set(), set(), {0, 1, 2}]
    assert [arrive(barriers, rank, 2) for rank in (0, 1, 2)] == [set(), set(), {0, 1, 2}]


def test_coming_twice_is_coming_once_and_the_second_request_is_answered():
    barriers = Barriers(range(2))
    arrive(barriers, 0, seq=1)
    assert arrive(barriers, 0, seq=5) == set()
    released = barriers.arrive(b"", wire.Barrier(sender(1), store=0, number=1))
    assert {(request.node.rank, request.seq) for _, request in released} == {(0, 5), (1, 1)}


def test_numbers_do_not_mix():
    barriers = Barriers(range(2))
    arrive(barriers, 0, 1)
    assert arrive(barriers, 1, 2) == set()
    assert arrive(barriers, 1, 1) == {0, 1}


def ranks(waiters: list[tuple[bytes, wire.Barrier]]) -> list[int]:
    return [request.node.rank for _, request in waiters]


def test_those_who_have_not_come_are_missing_whoever_came_before():
    barriers = Barriers(range(4))
    arrive(barriers, 0, 1)
    arrive(barriers, 2, 1)
    assert barriers.missing(1, {0, 1, 2}) == {1}
    assert barriers.missing(2, {0, 1}) == {0, 1}, "nobody has come to that one"
    assert barriers.without(2) == []
    assert barriers.without(1) == [1]


def test_who_waited_at_a_barrier_that_failed_has_come_to_it():
    barriers = Barriers(range(3))
    arrive(barriers, 0)
    assert ranks(barriers.fail(1)) == [0]
    assert barriers.fail(1) == [], "an answer is given once"
    assert arrive(barriers, 2) == set()
    assert barriers.missing(1, {0, 1, 2}) == {1}
    assert ranks(barriers.fail(1)) == [2]
    assert not barriers.waits(0)


def test_who_is_sent_away_has_to_come_again_but_not_who_has_left():
    barriers = Barriers(range(4))
    for rank in (0, 1, 2):
        arrive(barriers, rank)
    assert ranks(barriers.send_away(1, left={0})) == [1, 2]
    assert barriers.missing(1, {0, 1, 2, 3}) == {1, 2, 3}
    assert [arrive(barriers, rank) for rank in (3, 1, 2)] == [set(), set(), {0, 1, 2, 3}]


def test_who_waits_is_known_with_whom_it_waits_for():
    barriers = Barriers(range(3))
    arrive(barriers, 1, seq=7)
    assert barriers.waits(1)
    assert not barriers.waits(0)
    assert barriers.awaited(1, 7) == {0, 2}
    assert barriers.awaited(1, 8) == barriers.awaited(0, 7) == set()
