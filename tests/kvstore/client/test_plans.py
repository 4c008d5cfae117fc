"""Keys, where they are and how often they were pushed; plans of lists of them: every element in one message."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from placed import entries_for

from kvstore.client.entries import Entries, PushClocks, Segment
from kvstore.client.plans import PARTS, ArrayRange, Pieces, Plans, RowPlan, parcels, views_of
from kvstore.errors import KeyNotInitialized, Mismatch
from kvstore.spec import Key, Spec
from kvstore.table import Table, TableSpec

SPECS: dict[Key, Spec] = {"w": Spec((4, 3), "float32"), "n": Spec((5,), "int64"), "cut": Spec((100,), "float32")}


def plans(specs: dict[Key, Spec] = SPECS, message_bytes: int = 1 << 20) -> Plans:
    made = Plans(Pieces(message_bytes))
    made.entries.add(entries_for(specs, servers=2, bound=50))
    return made


def test_a_list_that_comes_again_has_the_same_plan() -> None:
    made = plans()
    plan = made.known(["w", "n"])
    assert plan is not None
    assert made.known(("w", "n")) is plan
    assert made.arrays(iter(["w", "n"])) is plan
    assert made.known(["n", "w"]) is not plan
    assert made.known("w") is made.arrays(["w"])


@pytest.mark.parametrize("key", [["w", "w"], ["w", "other"], "other", [], [["w"]], None, 1.0])
def test_lists_that_are_not_on_the_fast_path(key: Any) -> None:
    assert plans().known(key) is None


@pytest.mark.parametrize("key", [True, 1.0])
def test_keys_that_only_equal_a_key_are_not_it(key: Any) -> None:
    made = plans({1: Spec((1,), "float32")})
    assert made.known(1) is not None
    assert made.known(key) is None
    assert made.known([key]) is None


def test_a_key_that_was_not_initialized() -> None:
    with pytest.raises(KeyNotInitialized, match="'other' has no value on this worker; call init first"):
        plans().arrays(["w", "other"])


def test_a_plan_knows_the_arrays_of_its_keys() -> None:
    plan = plans().arrays(["n", "w"])
    assert plan.specs == [SPECS["n"], SPECS["w"]]
    assert plan.places.tolist() == [1, 0]
    assert not plan.floats
    assert plans().arrays(["w", "cut"]).floats


def test_arrays_that_do_not_fit_are_left_to_the_slow_path() -> None:
    plan = plans().arrays(["w", "n"])
    fitting = [torch.zeros(4, 3), torch.zeros(5, dtype=torch.int64)]
    assert plan.values(fitting) is not None
    assert plan.outputs(fitting) is not None
    for arrays in (fitting[:1], [torch.zeros(3, 4), fitting[1]], [torch.zeros(4, 3), torch.zeros(5)], fitting[0]):
        assert plan.values(arrays) is None
        assert plan.outputs(arrays) is None


def test_messages_have_more_bytes_from_when_they_are_folded() -> None:
    made = plans(message_bytes=64)
    before = made.arrays(["cut", "w"])
    assert len(before.parcels) > 2
    made.fold(100, small=20)
    after = made.arrays(["cut", "w"])
    assert after is not before
    assert len(after.parcels) == 2
    assert {parcel.small for parcel in after.parcels} == {20}


def test_views_are_of_the_ranges_in_a_parcel() -> None:
    plan = plans().arrays(["cut", "w"])
    tensors = [torch.arange(100.0), torch.arange(12.0).view(4, 3)]
    views = {parcel.server: views_of(parcel, tensors) for parcel in plan.parcels}
    assert views[0][0].tolist() == list(range(50))
    assert views[1][0].tolist() == list(range(50, 100))
    (whole,) = views[0][1:] or views[1][1:]
    assert whole.tolist() == list(range(12))
    whole[0] = -1
    assert tensors[1][0, 0] == -1


def test_in_a_small_store_messages_are_small_and_as_many_of_them_on_the_way() -> None:
    made = Plans(Pieces(400, 40, 2))
    small: dict[Key, Spec] = {number: Spec((10,), "float32") for number in range(20)}
    made.entries.add(entries_for(small, servers=2, bound=50))
    plan = made.arrays([0, 1, 2, 3])
    assert [parcel.nbytes for parcel in plan.parcels] == [40, 40, 40, 40]
    assert plan.weight == 10
    made.entries.add(entries_for({"large": Spec((100 * 2 * PARTS,), "float32")}, servers=2, bound=10**9))
    plan = made.arrays([4, 5, 6, 7])
    assert [parcel.nbytes for parcel in plan.parcels] == [80, 80]
    assert plan.weight == 1


specs = st.dictionaries(
    st.integers(0, 20),
    st.builds(Spec, st.lists(st.integers(0, 9), max_size=3).map(tuple), st.sampled_from(["float32", "float16"])),
    max_size=8,
)


@settings(max_examples=60)
@given(specs, st.integers(1, 4), st.integers(1, 40), st.integers(1, 100), st.integers(1, 300))
def test_every_element_is_in_one_message(
    specs: dict[Key, Spec], servers: int, bound: int, longest: int, most: int
) -> None:
    entries = entries_for(specs, servers, bound, longest)
    keys = list(specs)
    if not keys:
        return
    seen: dict[Key, list[tuple[int, int]]] = {key: [] for key in keys}
    for parcel in parcels(entries, keys, most):
        assert parcel.nbytes <= most or sum(segment.stop > segment.start for segment in parcel.segments) == 1
        assert parcel.ids == [segment.id for segment in parcel.segments]
        assert len(parcel.entries) == len(parcel.segments)
        assert {segment.server for segment in parcel.segments} == {parcel.server}
        assert {entries[segment.key].spec.dtype for segment in parcel.segments} == {parcel.dtype}
        assert parcel.size == sum(segment.stop - segment.start for segment in parcel.segments)
        assert parcel.nbytes == parcel.size * entries[parcel.segments[0].key].spec.itemsize
        for position, start, stop, whole in parcel.ranges:
            assert whole == (stop - start == specs[keys[position]].size)
            seen[keys[position]].append((start, stop))
    for key, ranges in seen.items():
        at = 0
        for start, stop in sorted(ranges):
            assert start == at
            at = stop
        assert at == specs[key].size


def test_segments_of_an_array_that_follow_each_other_are_one_range_and_servers_take_turns() -> None:
    entries = entries_for({"big": Spec((64,), "float32"), "small": Spec((4,), "float32")}, 2, 64, 16)
    assert len(entries["big"].segments) == 16
    (one, two) = parcels(entries, ["big", "small"], 2**20)
    assert (one.server, two.server) == (0, 1)
    assert one.ranges[0] == ArrayRange(0, 0, 32, False)
    assert two.ranges == [ArrayRange(0, 32, 64, False)]
    assert one.ranges[1] == ArrayRange(1, 0, 4, True)
    many = parcels(entries, ["big", "small"], 32)
    assert [parcel.server for parcel in many[:8]] == [0, 1] * 4


@settings(max_examples=60)
@given(specs, st.integers(1, 4), st.integers(1, 40), st.integers(1, 100), st.integers(1, 300), st.integers(0, 30))
def test_small_arrays_come_first_and_share_payloads(
    specs: dict[Key, Spec], servers: int, bound: int, longest: int, most: int, small: int
) -> None:
    entries = entries_for(specs, servers, bound, longest)
    keys = list(specs)
    if not keys:
        return
    as_they_are = parcels(entries, keys, most)
    made = parcels(entries, keys, most, small)
    assert [sorted(parcel.ids) for parcel in made] == [sorted(parcel.ids) for parcel in as_they_are]
    for parcel in made:
        assert parcel.sizes == [segment.stop - segment.start for segment in parcel.segments]
        shared = [parcel.is_small(entry) for entry in parcel.entries]
        assert shared == sorted(shared, reverse=True)
        assert sum(source.segments for source in parcel.sources) == len(parcel.segments)
        assert sum(source.stop - source.start for source in parcel.sources) == parcel.size
        if any(shared):
            assert parcel.sources[0].segments == sum(shared)
        at = 0
        for source in parcel.sources:
            segments = parcel.segments[at : at + source.segments]
            assert list(dict.fromkeys(segment.key for segment in segments)) == list(source.keys)
            if len(source.keys) == 1:
                assert (segments[0].start, segments[-1].stop) == (source.start, source.stop)
            at += source.segments


def test_without_small_arrays_every_stretch_has_a_payload() -> None:
    entries = entries_for({"a": Spec((2,), "float32"), "b": Spec((64,), "float32")}, 1, 100, 64)
    (parcel,) = parcels(entries, ["a", "b"], 2**20)
    assert [(source.keys, source.segments) for source in parcel.sources] == [(("a",), 1), (("b",), 4)]


@pytest.mark.parametrize(
    ("nbytes", "piece"),
    [(0, 160), (4 * PARTS * 160, 160), (4 * PARTS * 200, 200), (4 * PARTS * 640, 640), (10**9, 640)],
)
def test_each_server_has_so_many_pieces_of_a_small_store(nbytes: int, piece: int) -> None:
    assert Pieces(640, 160, 4).of(nbytes) == piece


@pytest.mark.parametrize("pieces", [Pieces(640), Pieces(640, 0, 4), Pieces(640, 1000, 4)])
@pytest.mark.parametrize("nbytes", [0, 10**9])
def test_without_a_least_size_all_stores_are_alike(pieces: Pieces, nbytes: int) -> None:
    assert pieces.of(nbytes) == 640


TABLES: dict[Key, Spec] = {
    "a": Spec((100,), "float32"),
    "t": TableSpec.of(Table(shape=(9, 4))),
    "g": TableSpec.of(Table(dim=4, codec="fp16")),
    "u": TableSpec.of(Table(shape=(9, 4), init="normal")),
    "long": TableSpec.of(Table(shape=(2**31 + 1, 4))),
    "odd": TableSpec.of(Table(shape=(9, 3))),
}


def test_each_server_has_a_segment_of_each_table():
    entries = entries_for(TABLES, servers=3, bound=10)
    plan = RowPlan(entries, ["g", "t"])
    assert [parcel.server for parcel in plan.parcels] == [0, 1, 2]
    for parcel in plan.parcels:
        assert [segment.key for segment in parcel.segments] == ["g", "t"]
        assert {segment.server for segment in parcel.segments} == {parcel.server}
        assert parcel.ids == [segment.id for segment in parcel.segments]
    assert plan.places.tolist() == [entries["g"].place, entries["t"].place]
    assert plan.codecs == ["fp16", "none"]


@pytest.mark.parametrize(("keys", "wide"), [(["t", "u"], False), (["t", "g"], True), (["long"], True)])
def test_ids_are_as_wide_as_the_widest_table_needs(keys: list[str], wide: bool):
    assert RowPlan(entries_for(TABLES, 2, 10), keys).wide == wide


@pytest.mark.parametrize(("keys", "nbytes"), [(["t", "u"], 16), (["t", "g"], None), (["odd"], None), (["g"], None)])
def test_only_rows_that_are_alike_are_moved_as_items(keys: list[str], nbytes: int | None):
    item = RowPlan(entries_for(TABLES, 2, 10), keys).item
    assert (None if item is None else item.itemsize) == nbytes


def test_plans_are_of_tables_that_are_known():
    made = plans(TABLES)
    assert made.tables(["t", "g"]) is made.tables(["t", "g"])
    assert made.table("g").grows
    with pytest.raises(Mismatch, match=r"'a' is float32\[100\], an array.*kv\.Table"):
        made.tables(["t", "a"])
    with pytest.raises(KeyNotInitialized, match="'x'"):
        made.table("x")


KNOWN: dict[Key, Spec] = {
    "cut": Spec((4, 3), "float32"),
    "whole": Spec((5,), "float64"),
    "empty": Spec((0,), "float32"),
}


def known() -> Entries:
    return entries_for(KNOWN, servers=2, bound=12)


def test_an_entry_has_the_spec_the_place_and_the_segments_of_its_key() -> None:
    entries = known()
    assert list(entries) == list(KNOWN)
    assert [entries[key].spec for key in KNOWN] == list(KNOWN.values())
    assert [entries[key].place for key in KNOWN] == [0, 1, 2]
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
    places = np.array([0, 2])
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
