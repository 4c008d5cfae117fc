"""Changes of arrays as bytes."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from kvstore.codecs.changes import (
    apply_changes,
    checksum,
    checksum_change,
    decode_changes,
    decode_ids,
    encode_changes,
    encode_ids,
)
from kvstore.errors import WireError

BITS = st.sampled_from(["u1", "u2", "u4", "u8"])


@st.composite
def changed_arrays(draw: st.DrawFn) -> tuple[Any, Any]:
    """Positions and all values of an array: scattered, in runs, or far apart."""
    size = draw(st.sampled_from([1, 7, 64, 300, 5000, 200_000]))
    if draw(st.booleans()):
        positions = draw(st.sets(st.integers(0, size - 1), max_size=50))
    else:
        start, step = draw(st.integers(0, size - 1)), draw(st.sampled_from([1, 2, 8, 16, 17, 255, 256, 257, 65536]))
        positions = set(range(start, size, step))
    dtype = np.dtype(draw(BITS))
    values = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 2**64, size, np.uint64).astype(dtype)
    return np.array(sorted(positions), np.int64), values


def joined(buffers: list[Any]) -> bytes:
    return b"".join(bytes(buffer) for buffer in buffers)


@given(changed_arrays(), st.integers(0, 40))
def test_what_has_changed_arrives_however_the_bytes_are_divided(given: tuple[Any, Any], cut: int) -> None:
    positions, values = given
    data = joined(encode_changes(positions, values))
    assert len(data) <= 8 + values.nbytes
    out = np.zeros_like(values)
    expected = out.copy()
    expected[positions] = values[positions]
    count = len(apply_changes([data[:cut], data[cut:]], out)[1])
    if count == len(values):  # all elements, because that is shorter
        expected = values
    assert out.tobytes() == expected.tobytes()
    assert count in (len(positions), len(values))


def test_no_change_takes_no_bytes_and_all_elements_take_their_own() -> None:
    values = np.arange(1000, dtype=np.uint16)
    assert encode_changes(np.empty(0, np.int64), values) == []
    assert len(joined(encode_changes(None, values))) == 8 + 2000
    assert decode_changes(encode_changes(None, values), values.dtype, 1000)[1].tolist() == list(range(1000))


@pytest.mark.parametrize(
    ("share", "most"), [(0.0001, 2.1), (0.001, 2.1), (0.01, 1.1), (0.03, 1.01), (0.1, 0.65), (0.3, 0.42), (0.9, 0.14)]
)
def test_a_position_takes_few_bytes(share: float, most: float) -> None:
    size = 1_000_000
    positions = np.flatnonzero(np.random.default_rng(1).random(size) < share)
    data = joined(encode_changes(positions, np.zeros(size, np.uint16)))
    assert len(data) - 2 * len(positions) <= 16 + most * len(positions)


@given(changed_arrays(), st.data())
def test_damaged_bytes_are_refused_or_are_changes_of_such_an_array(given: tuple[Any, Any], data: st.DataObject) -> None:
    positions, values = given
    damaged = bytearray(joined(encode_changes(positions, values)))
    for _ in range(data.draw(st.integers(1, 3))):
        if damaged:
            damaged[data.draw(st.integers(0, min(len(damaged), 40) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, 16))
    require_exact_or_refused(bytes(damaged[: len(damaged) - cut]), values)


@given(st.binary(max_size=60), st.integers(0, 255), st.integers(0, 9), BITS, st.integers(1, 100))
@example(b"\xff" * 16 + b"\1", 8, 1, "u1", 100)  # escapes alone
@example(b"\xff" * 7 + b"\0" + b"\1" * 4, 32, 1, "u4", 100)
@example(b"\x80" + b"\0" * 7 + b"\1", 1, 1, "u1", 7)  # a bit beyond the last element
def test_any_bytes_are_refused_or_are_changes(rest: bytes, form: int, count: int, bits: str, size: int) -> None:
    head = (count << 8 | form).to_bytes(8, "little")
    require_exact_or_refused(head + rest, np.zeros(size, bits))
    require_exact_or_refused(rest, np.zeros(size, bits))


def require_exact_or_refused(data: bytes, values: Any) -> None:
    """Changes are written as they were decoded, all of them in range and in order, or nothing is written."""
    out = np.full_like(values, 3)
    before = out.copy()
    try:
        count = len(apply_changes([data], out)[1])
    except WireError:
        assert out.tobytes() == before.tobytes()
        return
    positions, new = decode_changes([data], values.dtype, len(values))
    places = np.arange(len(values)) if positions is None else positions
    assert count == len(new) == len(places)
    assert (np.diff(places) > 0).all()
    before[places] = new
    assert out.tobytes() == before.tobytes()


def test_bytes_that_do_not_fit_are_refused_with_the_reason() -> None:
    values = np.arange(1000, dtype=np.uint16)
    data = joined(encode_changes(np.arange(0, 1000, 100), values))
    out = np.zeros(900, np.uint16)
    for bytes_, error in [
        (data, "not below 900"),
        (data[:5], "less than their head"),
        (data[:-1], "do not have 10 of 900"),
        (data[:1] + b"\0" + data[2:], "do not have 0 of 900"),
        (b"\7" + data[1:], "form 7"),
        (b"\10" + data[1:8] + b"\0" * 1200 + data[-20:], "1200 gaps of 8 bits in 900"),
        (joined(encode_changes(None, values)), "do not have 1000 of 900"),
    ]:
        with pytest.raises(WireError, match=error):
            apply_changes([bytes_], out)
    assert not out.any()


@given(arrays.arrays(np.uint8, st.integers(1, 300)), st.data())
def test_a_checksum_finds_each_wrong_element_and_depends_on_no_alignment(values: Any, data: st.DataObject) -> None:
    total = checksum(values)
    assert 0 <= total < 2**64
    room = np.zeros(len(values) + 1, np.uint8)
    room[1:] = values
    assert checksum(room[1:]) == total
    wrong = values.copy()
    place = data.draw(st.integers(0, len(values) - 1))
    wrong[place] ^= data.draw(st.integers(1, 255))
    assert checksum(wrong) != total


@given(changed_arrays(), st.booleans())
def test_a_checksum_is_known_from_what_has_changed_alone(given: tuple[Any, Any], short: bool) -> None:
    positions, after = given
    before = after.copy()
    before[positions] = after[::-1][positions]
    grown = checksum_change(positions.astype(np.uint32) if short else positions, before[positions], after[positions])
    assert (checksum(before) + grown) % 2**64 == checksum(after)
    out = before.copy()
    assert apply_changes(encode_changes(positions, after), out, checksum(before))[2] == checksum(after)
    assert apply_changes(encode_changes(positions, after), before)[2] == checksum(after)


def test_a_checksum_is_the_documented_sum() -> None:
    def odd(number: int) -> int:
        mixed = (number + 1) * 0x9E3779B97F4A7C15 % 2**64
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % 2**64
        return (mixed ^ mixed >> 31) | 1

    assert odd(0) == 0xE220A8397B1DCDAF | 1  # the first number of splitmix64 from 0
    values = np.random.default_rng(1).integers(0, 2**16, 40_001).astype(np.uint16)
    padded = values.tobytes() + bytes(-values.nbytes % 8)
    words = [int.from_bytes(padded[start : start + 8], "little") for start in range(0, len(padded), 8)]
    expected = sum(word * odd(k % 4096) * odd(2**32 + k // 4096) for k, word in enumerate(words))
    assert checksum(values) == expected % 2**64
    assert checksum(values[:0]) == 0
    swapped = np.concatenate([values[16384:32768], values[:16384], values[32768:]])  # whole rows
    assert checksum(swapped) != checksum(values)
    assert zlib.crc32(swapped) != zlib.crc32(values)


some_ids = st.integers(-(2**63), 2**63 - 1) | st.integers(-200, 200) | st.integers(2**63 - 99, 2**63 - 1)


close = st.tuples(some_ids, st.integers(0, 400)).map(lambda two: {*range(two[0], min(sum(two), 2**63 - 1))})


@given(st.sets(some_ids, max_size=200) | close)
def test_ids_arrive_in_at_most_eight_bytes_each(ids: set[int]) -> None:
    rising = np.array(sorted(ids), np.int64)
    encoded = encode_ids(rising)
    assert decode_ids(encoded, len(rising)).tolist() == rising.tolist()
    assert len(encoded) <= 16 * bool(ids) + 8 * len(ids)


def test_ids_that_are_close_take_few_bytes() -> None:
    ids = np.sort(np.random.default_rng(1).choice(10_000_000, 29_000, replace=False))
    assert len(encode_ids(ids)) < 2 * len(ids)
    assert len(encode_ids(np.arange(1 << 40, (1 << 40) + 4096))) < 600


@given(st.binary(max_size=64), st.sampled_from([1, 4, 8, 16, 32, 64, 7]), st.integers(-9, 1 << 41), st.integers(0, 70))
def test_any_bytes_are_refused_or_are_ids_that_rise(where: bytes, form: int, span: int, count: int) -> None:
    head = np.array([2**62, span << 8 | form], np.int64).tobytes()
    try:
        ids = decode_ids(np.frombuffer(head + where, np.uint8), count)
    except WireError:
        return
    assert len(ids) == count
    assert bool((ids[1:] > ids[:-1]).all())


@pytest.mark.parametrize("data", [b"", b"1", b"0" * 15])
def test_ids_without_a_head_are_refused(data: bytes) -> None:
    with pytest.raises(WireError, match="are not 3 ids"):
        decode_ids(np.frombuffer(data, np.uint8), 3)
