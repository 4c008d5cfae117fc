"""Stores that workers make in different orders are found out when they are made."""

from __future__ import annotations

import pytest

from kvstore import wire
from kvstore.errors import Mismatch
from servers.scheduler.stores import Makers


def made(rank: int, ordinal: int, place: str, what: str = "a 'dist_sync' store of kvstore.create()") -> wire.OpenStore:
    return wire.OpenStore(wire.Sender(wire.Node("worker", rank, 1), ordinal, 0), ordinal, what, place)


def test_workers_that_make_the_same_stores_in_the_same_order_are_not_disturbed() -> None:
    makers = Makers()
    for rank in (2, 0, 1):
        for ordinal, place in enumerate(["t.py:3", "t.py:9", "t.py:3", "t.py:9"], 1):
            makers.note(made(rank, ordinal, place))


def test_a_branch_for_each_worker_may_make_a_store() -> None:
    makers = Makers()
    for rank in range(3):
        makers.note(made(rank, 1, f"t.py:{10 + rank}"))
        makers.note(made(rank, 2, "t.py:20"))


@pytest.mark.parametrize("order", [[(0, 1), (0, 2), (1, 1)], [(1, 1), (0, 1), (0, 2)], [(0, 1), (1, 1), (0, 2)]])
def test_a_store_that_one_worker_makes_alone_is_named(order: list[tuple[int, int]]) -> None:
    """Worker 0 makes one in line 3, before the one that all make in line 4."""
    makers = Makers()
    places = {(0, 1): "t.py:3", (0, 2): "t.py:4", (1, 1): "t.py:4"}
    *first, last = order
    for which in first:
        makers.note(made(*which, places[which]))
    with pytest.raises(
        Mismatch, match=r"1st store of .*t\.py:\d.* 1st store of .*t\.py:\d.*in the same order"
    ) as caught:
        makers.note(made(*last, places[last]))
    assert "t.py:3" in str(caught.value)
    assert "t.py:4" in str(caught.value)


def test_another_type_or_maker_is_named_wherever_it_was_made() -> None:
    makers = Makers()
    makers.note(made(0, 1, "", "a 'dist_sync' store of kvstore.create()"))
    with pytest.raises(Mismatch, match=r"'dist_sync' store of Trainer.*'dist_sync' store of kvstore\.create\(\)"):
        makers.note(made(1, 1, "", "a 'dist_sync' store of Trainer"))


def test_a_worker_that_was_interrupted_may_make_its_store_again_elsewhere() -> None:
    makers = Makers()
    makers.note(made(0, 1, "t.py:3", "a 'dist_sync' store of Trainer"))
    makers.note(made(0, 1, "t.py:7", "a 'dist_sync' store of DistOpt"))
    makers.note(made(1, 1, "t.py:3", "a 'dist_sync' store of DistOpt"))
    makers.note(made(1, 1, "t.py:7", "a 'dist_sync' store of DistOpt"))
    for rank in range(2):
        makers.note(made(rank, 2, "t.py:3"))


def test_who_has_not_made_a_store_is_said_and_what_is_closed_is_forgotten() -> None:
    makers = Makers()
    for number in range(1, 40):
        makers.note(made(0, number, "t.py:3"))
        assert "worker 1 made no" in makers.unmade(number, [0, 1])
        makers.note(made(1, number, "t.py:3"))
        assert not makers.unmade(number, [0, 1])
        makers.forget(number)
        assert not makers.unmade(number, [0, 1])
