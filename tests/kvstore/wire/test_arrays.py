"""How arrays share frames: what join makes, tear takes apart, and nothing else passes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore import wire
from kvstore.errors import WireError
from kvstore.wire.arrays import ALIGN, LARGE, SHARED

near = st.sampled_from([0, 1, 15, 16, 17, 4096, LARGE - 1, LARGE, LARGE + 1, 3 * LARGE])
sizes = st.lists(near | st.integers(0, 40), max_size=12)
# Enough of the largest small arrays to fill a shared frame and begin the next.
brim = st.lists(st.sampled_from([LARGE - 1, LARGE - 16, 1, LARGE]), min_size=16, max_size=20)


def arrays(sizes: list[int]) -> list[memoryview]:
    return [memoryview(bytes([i % 251 + 1]) * size) for i, size in enumerate(sizes)]


@settings(max_examples=80)
@given(sizes | brim)
def test_what_is_joined_is_torn_apart_again(sizes: list[int]) -> None:
    parts = arrays(sizes)
    assert wire.unpack_arrays(wire.pack_arrays(parts), sizes) == parts


@settings(max_examples=80)
@given(sizes | brim)
def test_every_array_is_in_one_frame_and_small_ones_fill_no_more_than_allowed(sizes: list[int]) -> None:
    layout = wire.frame_groups(sizes)
    assert sorted(position for frame in layout for position in frame) == list(range(len(sizes)))
    for frame in layout:
        assert len(frame) == 1 or max(sizes[position] for position in frame) < LARGE
        assert len(frame) == 1 or sum(sizes[position] for position in frame) <= SHARED


@settings(max_examples=60)
@given(sizes.filter(bool), st.data())
def test_frames_of_another_length_are_refused(sizes: list[int], data: st.DataObject) -> None:
    frames = [bytes(frame) for frame in wire.pack_arrays(arrays(sizes))]
    at = data.draw(st.integers(0, len(frames) - 1))
    change = data.draw(st.sampled_from([-1, 1, 16]).filter(lambda n: len(frames[at]) + n >= 0))
    frames[at] = bytes(len(frames[at]) + change)
    with pytest.raises(WireError, match=r"expected a frame of \d+ bytes"):
        wire.unpack_arrays(frames, sizes)


@settings(max_examples=40)
@given(sizes)
def test_more_or_fewer_frames_are_refused(sizes: list[int]) -> None:
    frames = wire.pack_arrays(arrays(sizes))
    with pytest.raises(WireError, match=r"expected \d+ frames"):
        wire.unpack_arrays([*frames, b""], sizes)
    if frames:
        with pytest.raises(WireError, match=r"expected \d+ frames"):
            wire.unpack_arrays(frames[:-1], sizes)


def test_a_large_array_is_its_own_frame_and_not_copied() -> None:
    large, small = memoryview(bytearray(LARGE)), memoryview(bytearray(8))
    frames = wire.pack_arrays([small, large, small])
    assert [len(frame) for frame in frames] == [2 * ALIGN, LARGE]
    assert frames[1] is large


def test_torn_parts_are_views_of_the_frames() -> None:
    frames = wire.pack_arrays(arrays([4, 4]))
    parts = wire.unpack_arrays(frames, [4, 4])
    frames[0][ALIGN] = 99  # type: ignore[index]
    assert parts[1][0] == 99


def test_small_arrays_begin_at_aligned_places() -> None:
    assert wire.frame_groups([3, 5, 7]) == [[0, 1, 2]]
    frame = wire.pack_arrays(arrays([3, 5, 7]))[0]
    assert [frame[0], frame[ALIGN], frame[2 * ALIGN]] == [1, 2, 3]


def test_no_arrays_are_no_frames() -> None:
    assert wire.pack_arrays([]) == []
    assert wire.unpack_arrays([], []) == []
