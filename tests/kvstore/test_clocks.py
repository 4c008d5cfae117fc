"""How often a worker has pushed each of its keys, and which values have come."""

from __future__ import annotations

from kvstore.dist.clocks import Clocks
from kvstore.dist.parcels import Entry, Piece, parcels
from kvstore.spec import Spec

SPLIT = Entry(Spec((4,), "float32"), [Piece(0, 0, "w", 0, 2), Piece(1, 1, "w", 2, 4)], 0)


def made(*pushed: int) -> Clocks:
    clocks = Clocks()
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
    entries = {
        "a": Entry(Spec((2,), "float32"), [Piece(0, 0, "a", 0, 2)], 0),
        "b": Entry(Spec((3,), "float32"), [Piece(1, 0, "b", 0, 3)], 1),
    }
    (parcel,) = parcels(entries, ["b", "a"], 100)
    assert made(0, 3).of(parcel) == [3, 0]


def test_the_round_that_the_earliest_piece_is_of_counts() -> None:
    clocks = made(1)
    one, two = parcels({"w": SPLIT}, ["w"], 100)
    clocks.advance(one, [7])
    assert clocks.pushed.tolist() == [1], "of the other nothing is known"
    clocks.advance(two, [3])
    assert clocks.pushed.tolist() == [3]
    clocks.advance(two, [9])
    assert clocks.pushed.tolist() == [7]


def test_after_a_join_a_worker_goes_on_behind_the_others_never_before_itself() -> None:
    clocks = made(4)
    clocks.resume([SPLIT], {0: 9, 1: 6})
    assert clocks.pushed.tolist() == [6]
    clocks.resume([SPLIT], {0: 2, 1: 2})
    assert clocks.pushed.tolist() == [6]
    clocks.resume([SPLIT], {})
    assert clocks.pushed.tolist() == [6]
