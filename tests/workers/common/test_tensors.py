"""What users give becomes a tensor, where it can over the same memory; tensors of every kind, and their parts."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from odd_tensors import odd_tensors
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

import kvstore as kv
from kvstore import UsageError
from workers import DistributedOptimizer, Trainer
from workers.common.chunks import ChunkRange, divide, read, wire_dtype, write
from workers.common.sparse_gradients import as_gradient, as_rows, is_sparse, no_rows, table_key
from workers.common.tensors import (
    PLAIN,
    fingerprint,
    has_parts,
    is_dense,
    overwrite,
    put_together,
    take_apart,
    to_tensor,
)
from workers.common.values import describe


def test_a_tensor_is_itself_and_an_array_shares_its_memory() -> None:
    tensor, array = torch.ones(2), np.ones(2)
    assert to_tensor(tensor) is tensor
    to_tensor(array)[0] = 5
    assert array.tolist() == [5, 1]


def test_numbers_and_lists_become_tensors() -> None:
    assert to_tensor([1.0, 2.0]).tolist() == [1, 2]
    assert to_tensor(3).item() == 3


def test_arrays_that_torch_cannot_read_are_copied() -> None:
    backwards, foreign = np.arange(4.0)[::-1], np.arange(4.0).astype(">f8")
    assert to_tensor(backwards).tolist() == [3, 2, 1, 0]
    assert to_tensor(foreign).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("name", odd_tensors(0))
def test_a_tensor_of_any_kind_comes_back_from_its_parts(name: str) -> None:
    tensor = odd_tensors(1)[name]
    form, parts = take_apart(tensor)
    assert {part.dtype for part in parts.values()} <= PLAIN
    assert all(is_dense(part) for part in parts.values())
    again = put_together(json.loads(json.dumps(form)), parts)
    assert (again.dtype, again.layout, again.shape) == (tensor.dtype, tensor.layout, tensor.shape)
    assert fingerprint(again) == fingerprint(tensor) != fingerprint(odd_tensors(0)[name])


@pytest.mark.parametrize("name", odd_tensors(0))
def test_a_tensor_of_any_kind_can_be_overwritten_where_it_lies(name: str) -> None:
    mine, value = odd_tensors(0)[name], odd_tensors(1)[name]
    overwrite(mine, put_together(*take_apart(value)))
    assert fingerprint(mine) == fingerprint(value)
    if mine.layout == torch.strided:
        assert mine.stride() == value.stride()


def test_equal_fingerprints_mean_equal_bits() -> None:
    zero = torch.zeros(3)
    assert fingerprint(zero) == fingerprint(torch.zeros(3).clone())
    others = [-zero, zero[:2], zero.view(3, 1), zero.double(), zero.to(torch.float8_e5m2), zero.to_sparse()]
    assert len({fingerprint(other) for other in [zero, *others]}) == 7
    nan = torch.tensor([float("nan"), float("-inf")])
    assert fingerprint(nan) == fingerprint(nan.clone())


def test_what_has_no_values_is_refused() -> None:
    with pytest.raises(UsageError, match=r"only dense, sparse and quantized .* not one without memory \(meta\)"):
        take_apart(torch.zeros(2, device="meta"))


def test_parts_that_do_not_fit_are_an_error_not_a_crash() -> None:
    form, parts = take_apart(torch.eye(3).to_sparse())
    with pytest.raises(ValueError, match="damaged"):
        put_together({**form, "shape": [1, 1]}, parts)
    with pytest.raises(ValueError, match="damaged"):
        put_together({"kind": "bytes", "dtype": "load", "shape": [1]}, {"bytes": torch.zeros(1, dtype=torch.uint8)})


# ---- Tensors whose elements lie in other tensors: refused before anything is sent, with what to pass in their place


@pytest.fixture(scope="module")
def made_of_others() -> Iterator[dict[str, tuple[torch.Tensor, str]]]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    parts = [torch.ones(2, 2), torch.ones(3, 2)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, that nested tensors may change
        nested = torch.nested.nested_tensor(parts)
    yield {
        "nested": (nested, r"a nested tensor: .* \(tensor\.unbind\(\)\)"),
        "jagged": (torch.nested.nested_tensor(parts, layout=torch.jagged), "a nested tensor: "),
        "DTensor": (
            distribute_tensor(torch.ones(4, 2), init_device_mesh("cpu", (1,)), [Shard(0)]),
            r"a DTensor: .* \(tensor\.to_local\(\)\), or all of it \(full_tensor\(\)\)",
        ),
        "subclass": (TwoTensor(torch.ones(4, 2), torch.ones(4, 2)), "a TwoTensor, which is made of other tensors"),
    }
    distributed.destroy_process_group()


def pushed(value: torch.Tensor) -> None:
    store = kv.create("local")
    store.init("w", torch.ones(4, 2))
    store.push("w", value)


CALLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "init": lambda value: kv.create("local").init("w", value),
    "push": pushed,
    "a list of 20": lambda value: kv.create("local").init(list(range(20)), [torch.ones(2)] * 19 + [value]),
    "Trainer": lambda value: Trainer({"a": nn.Parameter(torch.ones(1)), "w": nn.Parameter(value)}, kvstore="local"),
    "DistributedOptimizer": lambda value: DistributedOptimizer(
        torch.optim.SGD([nn.Parameter(value)], 0.1), kvstore="local"
    ),
    "parts": take_apart,
}


@pytest.mark.parametrize("kind", ["nested", "jagged", "DTensor", "subclass"])
@pytest.mark.parametrize("call", CALLS)
def test_a_tensor_that_is_made_of_others_is_refused(
    made_of_others: dict[str, tuple[torch.Tensor, str]], kind: str, call: str
) -> None:
    value, said = made_of_others[kind]
    with pytest.raises(kv.UsageError, match=said):
        CALLS[call](value)
    assert not is_dense(value)
    assert not has_parts(value)


def test_rows_of_gradients_and_back() -> None:
    weight = torch.zeros(5, 2, requires_grad=True)
    grad = torch.sparse_coo_tensor([[4, 1]], [[1.0, 2], [3, 4]], (5, 2), check_invariants=True)
    rows = as_rows(grad)
    assert (rows.ids.tolist(), rows.shape) == ([4, 1], (5, 2))
    back = as_gradient(as_rows(grad.coalesce()), weight)
    assert torch.equal(back.to_dense(), grad.to_dense())
    assert back.is_coalesced()
    assert as_rows(torch.eye(2)).ids.tolist() == [0, 1]
    assert not is_sparse(weight)
    weight.grad = no_rows(weight)
    assert is_sparse(weight)
    assert not weight.grad.to_dense().any()


def test_keys_of_tables_are_of_their_parameters_kind() -> None:
    assert (table_key("a.weight"), table_key(0), table_key(3)) == ("a.weight/rows", -1, -4)


# ---- How a model is cut into chunks: every element once, none too large, the same on all workers

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
