"""What a worker knows of its keys: where they are, how often each has been pushed, which values have come."""

from __future__ import annotations

import numpy as np
import pytest
from placed import entries_for

from kvstore.client.entries import Entries, PushClocks, Segment
from kvstore.client.plans import parcels
from kvstore.spec import Key, Spec
from kvstore.table import Table, TableSpec

SPECS: dict[Key, Spec] = {
    "cut": Spec((4, 3), "float32"),
    "whole": Spec((5,), "float64"),
    "empty": Spec((0,), "float32"),
}


def known() -> Entries:
    return entries_for(SPECS, servers=2, bound=12)


def test_an_entry_has_the_spec_the_place_and_the_segments_of_its_key() -> None:
    entries = known()
    assert list(entries) == list(SPECS)
    assert [entries[key].spec for key in SPECS] == list(SPECS.values())
    assert [entries[key].place for key in SPECS] == [0, 1, 2]
    assert entries["cut"].segments == [Segment(0, 0, "cut", 0, 6), Segment(1, 1, "cut", 6, 12)]
    assert entries["cut"].cut
    assert entries["cut"].servers == 2
    assert not entries["whole"].cut


def test_bytes_are_counted_where_the_segments_are() -> None:
    assert sum(known().bytes_by_server(2)) == 12 * 4 + 5 * 8
    assert known().bytes_by_server(2)[0] >= 24
    assert Entries().bytes_by_server(3) == [0, 0, 0]
    assert known().nbytes == 12 * 4 + 5 * 8
    assert Entries().nbytes == 0
    assert entries_for({"t": TableSpec.of(Table((100, 4)))}, 2, 10).nbytes == 0, "rows travel otherwise"


def test_a_key_that_is_not_there() -> None:
    entries = known()
    assert "other" not in entries
    with pytest.raises(KeyError):
        entries["other"]


def test_keys_that_are_added_come_behind_and_only_once() -> None:
    entries, more = Entries(), entries_for({f"k{i}": Spec((i,), "float32") for i in range(40)}, 3, 10)
    entries.add(known())
    for _ in range(2):  # an exception may have ended the first time
        entries.add(more)
    assert len(entries) == 43
    assert entries.nbytes == known().nbytes + more.nbytes == sum(entries.bytes_by_server(3))
    assert entries.segments == known().segments + more.segments
    assert entries["k39"].place == 42
    assert [segment[1:] for segment in entries["k39"].segments] == [segment[1:] for segment in more["k39"].segments]
    assert entries["cut"].segments == known()["cut"].segments
    assert len(entries.specs) == len(set(entries.specs)), "each once"
    assert np.array_equal(entries.counts[:3], [2, 1, 1])


def test_the_kind_of_the_keys() -> None:
    assert Entries().kind is None
    assert known().kind is str
    assert entries_for({7: Spec((1,), "float32")}, 1, 10).kind is int


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
    assert made(0, 3).of(parcel.places) == [3, 0]
    assert made(0, 3).after(parcel.places) == [4, 1]


def test_the_round_that_the_earliest_piece_is_of_counts() -> None:
    clocks = made(1)
    one, two = parcels(SPLIT, ["w"], 100)
    clocks.advance(one.segments, one.entries, [7])
    assert clocks.pushed.tolist() == [1], "of the other nothing is known"
    clocks.advance(two.segments, two.entries, [3])
    assert clocks.pushed.tolist() == [3]
    clocks.advance(two.segments, two.entries, [9])
    assert clocks.pushed.tolist() == [7]


def test_after_a_join_a_worker_goes_on_behind_the_others_never_before_itself() -> None:
    clocks = made(4)
    clocks.resume(list(SPLIT.values()), {0: 9, 1: 6})
    assert clocks.pushed.tolist() == [6]
    clocks.resume(list(SPLIT.values()), {0: 2, 1: 2})
    assert clocks.pushed.tolist() == [6]
    clocks.resume(list(SPLIT.values()), {})
    assert clocks.pushed.tolist() == [6]
