import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import WireError
from kvstore.rows.layout import part_bytes, read_rows, write_rows
from kvstore.table import CODECS, DTYPES

SHAPES = st.tuples(st.integers(0, 9), st.integers(1, 9))


def _through(rows, codec):
    count, width = rows.shape
    dtype = rows.dtype.name
    part = bytearray(part_bytes(count, width, dtype, codec))
    write_rows(rows, codec, memoryview(part))
    return read_rows(bytes(part), count, width, dtype, codec)


@given(SHAPES, st.sampled_from(DTYPES), st.sampled_from(CODECS), st.integers(0, 9), st.integers(-30, 30))
def test_rows_come_back_as_near_as_the_codec_is(shape, dtype, codec, seed, exponent):
    rows = (np.random.default_rng(seed).standard_normal(shape) * 2.0**exponent).astype(dtype)
    before = rows.copy()
    got = _through(rows, codec)
    assert got.shape == shape
    assert got.dtype == dtype
    assert part_bytes(*shape, dtype, codec) % 16 == 0
    assert np.array_equal(rows, before)
    greatest = np.abs(rows).max(axis=1, keepdims=True, initial=0)
    error = np.abs(got - np.clip(rows, -65504, 65504) if codec == "fp16" else got - rows)
    tolerance = {
        "none": 0,
        "fp16": np.abs(rows) * 2.0**-11 + 2.0**-25,
        "bf16": np.abs(rows) * 2.0**-8,
        "int8": greatest / 253 + 1e-37,
    }
    assert (error <= tolerance[codec]).all()


def test_halves_are_torchs():
    rows = np.random.default_rng(0).standard_normal((5, 7)).astype(np.float32)
    assert np.array_equal(_through(rows, "fp16"), torch.from_numpy(rows).half().float().numpy())
    assert np.array_equal(_through(rows, "bf16"), torch.from_numpy(rows).bfloat16().float().numpy())


def test_halves_clip_what_is_too_large_and_keep_what_is_infinite():
    rows = np.array([[1e9, -1e9, np.inf, -np.inf, np.nan, 1.0]], np.float32)
    assert np.array_equal(_through(rows, "fp16"), [[65504, -65504, np.inf, -np.inf, np.nan, 1]], equal_nan=True)


def test_int8_keeps_the_greatest_zeros_and_says_what_is_broken():
    rows = np.array([[127, -127, 1], [0, 0, 0], [1, np.inf, 2], [np.nan, 1, 2], [1e-44, 0, 0]], np.float32)
    got = _through(rows, "int8")
    assert got[0].tolist() == [127, -127, 1]
    assert got[1].tolist() == got[4].tolist() == [0, 0, 0]
    assert np.isnan(got[2:4]).all()


def test_rows_that_may_only_be_read_can_be_written():
    rows = np.ones((2, 3), np.float32)
    rows.flags.writeable = False
    for codec in CODECS:
        assert np.array_equal(_through(rows, codec), rows)


@pytest.mark.parametrize("codec", CODECS)
def test_a_part_of_another_length_is_refused(codec):
    part = bytes(part_bytes(3, 5, "float32", codec))
    for wrong in (part[:-1], part + b"\0", b""):
        with pytest.raises(WireError, match="3 rows of 5 float32"):
            read_rows(wrong, 3, 5, "float32", codec)
