from __future__ import annotations

import itertools
import random

import pytest

from servers.scheduler.stores import Joins


def test_a_worker_is_inside_until_all_have_called_as_often():
    joins = Joins(range(3))
    assert [joins.arrive(1, 1), joins.arrive(0, 1)] == [True, True]
    assert joins.inside == {0, 1}
    assert not joins.arrive(2, 1), "the last is not, and lets the others out"
    assert joins.inside == set()
    assert joins.arrive(2, 2)


def test_the_same_call_again_is_one_call():
    joins = Joins(range(2))
    joins.arrive(0, 1)
    joins.arrive(1, 1)
    assert not joins.arrive(0, 1)


def test_who_has_left_is_neither_waited_for_nor_inside():
    joins = Joins(range(3))
    joins.arrive(0, 1)
    joins.arrive(1, 1)
    joins.depart(1)
    assert joins.inside == {0}
    joins.depart(2)
    assert joins.inside == set()
    joins.depart(2)
    assert not joins.arrive(2, 1)
    assert not joins.arrive(0, 2), "nobody else is there"
    joins.depart(0)
    assert joins.inside == set()


def test_who_had_left_before_is_not_waited_for():
    joins = Joins(range(3), gone={2})
    joins.arrive(0, 1)
    assert not joins.arrive(1, 1)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_the_order_it_is_who_has_called_oftener_than_another(seed: int):
    draws, joins, calls = random.Random(seed), Joins(range(4)), dict.fromkeys(range(4), 0)
    for _ in range(40):
        rank = draws.randrange(4)
        if draws.random() < 0.05:
            joins.depart(rank)
            calls.pop(rank, None)
        elif rank in calls:
            calls[rank] += draws.randrange(3)
            joins.arrive(rank, calls[rank])
        assert joins.inside == {one for one, other in itertools.permutations(calls, 2) if calls[one] > calls[other]}
