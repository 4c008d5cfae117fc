"""How a model is cut into chunks: every element once, none too large, the same on all workers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.common.chunks import ChunkRange, divide, read, wire_dtype, write
from workers.common.values import describe

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


values = st.dictionaries(
    st.text("abc.", min_size=1, max_size=4),
    st.builds(
        lambda shape, dtype: torch.empty(shape, dtype=dtype),
        st.lists(st.integers(0, 9), max_size=3),
        st.sampled_from(DTYPES),
    ),
    max_size=8,
)


def nbytes(values: dict[str, torch.Tensor], chunk: list[ChunkRange]) -> int:
    return sum((part.stop - part.start) * wire_dtype(values[part.name].dtype).itemsize for part in chunk)


@settings(max_examples=200)
@given(values, st.integers(8, 600))
def test_every_element_is_in_one_chunk_and_chunks_are_full(values: dict[str, torch.Tensor], chunk_bytes: int) -> None:
    chunks = divide(values, chunk_bytes)
    ends = dict.fromkeys(values, 0)
    for part in (part for chunk in chunks for part in chunk):
        assert ends[part.name] == part.start < part.stop, "parts of a value follow each other"
        assert part.whole == (part.stop - part.start == values[part.name].numel())
        ends[part.name] = part.stop
    assert ends == {name: value.numel() for name, value in values.items()}
    sizes = [nbytes(values, chunk) for chunk in chunks]
    assert all(0 < size <= chunk_bytes for size in sizes)
    assert all(size > chunk_bytes - 8 for size in sizes[:-1])
    keys = [part.key for chunk in chunks for part in chunk]
    assert len(set(keys)) == len(keys)


@settings(max_examples=50)
@given(values, st.integers(8, 600))
def test_chunks_depend_on_names_shapes_and_dtypes_alone(values: dict[str, torch.Tensor], chunk_bytes: int) -> None:
    others = {
        name: torch.ones_like(value).movedim(0, -1).contiguous().movedim(-1, 0)
        if value.ndim
        else torch.ones_like(value)
        for name, value in values.items()
    }
    assert divide(values, chunk_bytes) == divide(others, chunk_bytes)
    assert describe(values) == describe(others)


@given(values)
def test_without_a_size_there_is_one_chunk(values: dict[str, torch.Tensor]) -> None:
    chunks = divide(values, None)
    assert len(chunks) == any(value.numel() for value in values.values())
    assert all(part.whole for chunk in chunks for part in chunk)


def test_the_last_value_comes_first_and_large_ones_are_cut() -> None:
    values = {"w": torch.empty(5, 4), "b": torch.empty(6), "half": torch.empty(3, dtype=torch.float16)}
    keys = [[part.key for part in chunk] for chunk in divide(values, 40)]
    assert keys == [["half", "b", "w[0:1]"], ["w[1:11]"], ["w[11:20]"]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", ["contiguous", "transposed", "channels_last", "strided"])
def test_runs_are_read_and_written_where_they_belong(dtype: torch.dtype, form: str) -> None:
    value = torch.arange(120.0).view(2, 3, 4, 5).to(dtype)
    value = {
        "contiguous": lambda: value.clone(),
        "transposed": lambda: value.clone().transpose(1, 3),
        "channels_last": lambda: value.to(memory_format=torch.channels_last),
        "strided": lambda: torch.zeros(2, 3, 4, 10, dtype=dtype)[..., ::2].copy_(value),
    }[form]()
    strides, expected = value.stride(), value.reshape(-1).clone()
    (whole,) = divide({"w": value}, None)
    for part in (whole[0], ChunkRange("w", 7, 31, False)):
        elements = read(value, part)
        assert elements.is_contiguous()
        assert torch.equal(elements.to(dtype), expected[part.start : part.stop])
        expected[part.start : part.stop] = -elements.to(dtype)
        write(value, part, -elements.double())
        assert value.stride() == strides
        assert torch.equal(value.reshape(-1), expected)


def test_what_is_contiguous_is_not_copied() -> None:
    value = torch.zeros(4, 6)
    assert read(value, ChunkRange("w", 5, 9, False)).data_ptr() == value[0, 5].data_ptr()
