"""What messages a list of keys takes: every element once, one dtype and one server each, none longer than asked."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from placed import entries_for

from kvstore.client.plans import ArrayRange, parcels
from kvstore.spec import Key, Spec

specs = st.dictionaries(
    st.integers(0, 20),
    st.builds(Spec, st.lists(st.integers(0, 9), max_size=3).map(tuple), st.sampled_from(["float32", "float16"])),
    max_size=8,
)


@settings(max_examples=100)
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


@settings(max_examples=100)
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
