"""How often a worker has pushed each of its keys, and which values have come."""

from __future__ import annotations

from placed import entries_for

from kvstore.client.entries import PushClocks
from kvstore.client.plans import parcels
from kvstore.spec import Spec

SPLIT = entries_for({"w": Spec((4,), "float32")}, 2, 1)


def made(*pushed: int) -> PushClocks:
    clocks = PushClocks()
    clocks.grow(len(pushed))
    clocks.pushed[:] = pushed
    return clocks


def test_new_keys_have_not_been_pushed() -> None:
    clocks = made(3)
    clocks.grow(2)
    assert clocks.pushed.tolist() == [3, 0]
    assert clocks.last.tolist() == [0, 0]
    clocks.grow(1)
    assert clocks.pushed.tolist() == [3, 0], "room is not given back"


def test_a_push_counts_for_its_own_keys_however_often_it_is_noted() -> None:
    clocks = made(3, 5, 0)
    places = clocks.pushed[:0].copy()
    places.resize(2)
    places[:] = [0, 2]
    after = clocks.pushed[places] + 1
    for _ in range(2):
        clocks.note(places, after, 7)
        assert clocks.pushed.tolist() == [4, 5, 1]
        assert clocks.last.tolist() == [7, 0, 7]


def test_clocks_are_those_of_the_keys() -> None:
    entries = entries_for({"a": Spec((2,), "float32"), "b": Spec((3,), "float32")}, 1, 100)
    (parcel,) = parcels(entries, ["b", "a"], 100)
    assert made(0, 3).of(parcel) == [3, 0]
    assert made(0, 3).after(parcel) == [4, 1]


def test_the_round_that_the_earliest_piece_is_of_counts() -> None:
    clocks = made(1)
    one, two = parcels(SPLIT, ["w"], 100)
    clocks.advance(one, [7])
    assert clocks.pushed.tolist() == [1], "of the other nothing is known"
    clocks.advance(two, [3])
    assert clocks.pushed.tolist() == [3]
    clocks.advance(two, [9])
    assert clocks.pushed.tolist() == [7]


def test_after_a_join_a_worker_goes_on_behind_the_others_never_before_itself() -> None:
    clocks = made(4)
    clocks.resume(list(SPLIT.values()), {0: 9, 1: 6})
    assert clocks.pushed.tolist() == [6]
    clocks.resume(list(SPLIT.values()), {0: 2, 1: 2})
    assert clocks.pushed.tolist() == [6]
    clocks.resume(list(SPLIT.values()), {})
    assert clocks.pushed.tolist() == [6]
