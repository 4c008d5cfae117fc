"""Ranges of memory that are read, or written, all at once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.values import collect, scatter


@st.composite
def ranges(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Memory, and where in it ranges lie that do not overlap, in any order: all aligned alike, or none."""
    unit = draw(st.sampled_from([1, 2, 4, 8, 16, 64]))
    same = draw(st.booleans())
    count = draw(st.integers(1, 20))
    lengths = (
        [draw(st.integers(0, 5)) * unit] * count if same else [draw(st.integers(0, 5)) * unit for _ in range(count)]
    )
    gaps = [draw(st.integers(0, 3)) * unit for _ in range(count)]
    starts = np.cumsum([gap + length for gap, length in zip(gaps, lengths, strict=True)]) - lengths
    order = draw(st.permutations(range(count)))
    memory = np.arange(int(starts[-1] + lengths[-1]) + 64, dtype=np.uint8)
    aligned = memory[-memory.ctypes.data % 64 :]
    return aligned, starts[order], np.array(lengths)[order]


@given(ranges())
def test_they_come_one_after_the_other(given_: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    memory, starts, lengths = given_
    out = bytearray(int(lengths.sum()))
    collect(memory.ctypes.data + starts, lengths, out)
    pairs = zip(starts.tolist(), lengths.tolist(), strict=True)
    assert out == b"".join(memory[start : start + length].tobytes() for start, length in pairs)


@given(ranges())
def test_nothing_else_is_written(given_: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    memory, starts, lengths = given_
    expected = memory.copy()
    data = bytes(range(255, -1, -1)) * (int(lengths.sum()) // 256 + 1)
    data = data[: int(lengths.sum())]
    at = 0
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        expected[start : start + length] = np.frombuffer(data[at : at + length], np.uint8)
        at += length
    scatter(data, memory.ctypes.data + starts, lengths)
    assert np.array_equal(memory, expected)


@pytest.mark.parametrize("bits", [0x7FF0000000000001, 0xFFF4000000000001, 0x7FA0000000000000])
def test_signalling_nans_stay_what_they_are(bits: int) -> None:
    numbers = np.array([bits] * 4, np.uint64)
    out = bytearray(32)
    collect(np.array([numbers.ctypes.data]), np.array([32]), out)
    assert out == numbers.tobytes()
    back = np.zeros(4, np.uint64)
    scatter(out, np.array([back.ctypes.data]), np.array([32]))
    assert np.array_equal(back, numbers)


def test_what_has_no_elements_may_lie_nowhere() -> None:
    number = np.array([7], np.uint8)
    out = bytearray(1)
    collect(np.array([0, number.ctypes.data, 0]), np.array([0, 1, 0]), out)
    assert out == b"\x07"
    collect(np.array([0]), np.array([0]), bytearray())
    scatter(b"", np.array([0]), np.array([0]))
