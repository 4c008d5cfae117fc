"""Lists of arrays that are checked and moved all at once, and payloads in several buffers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from foreign import Foreign, lent, parameter, plain, read_only, strided, strided_tensor, swapped, tensor
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import WireError
from kvstore.spec import Spec
from kvstore.values import (
    Arrays,
    Layout,
    Leaving,
    TensorRange,
    as_tensors,
    collect,
    crossed,
    cut,
    from_host,
    kinds_of,
    outputs_of,
    ranges_of,
    reduce_to,
    scatter,
    sum_in_order,
    sum_ranges,
    to_buffer,
    values_of,
)

# ---- lists of arrays that are checked and moved all at once: what comes of it is what comes of them one by one


SPECS = [Spec((2,), "float32"), Spec((3, 2), "float32"), Spec((), "int64"), Spec((0, 4), "float16"), Spec((5,), "int8")]
ONES = [Spec((1,), "float32"), Spec((1, 3), "int64")]  # numpy calls any stride of the first dimension contiguous
LARGE = Spec((40_000,), "float64")


def layout_of(specs: Sequence[Spec]) -> Layout:
    distinct = list(dict.fromkeys(specs))
    return Layout(np.array([distinct.index(spec) for spec in specs]), distinct)


def numbers(spec: Spec, seed: int) -> np.ndarray[Any, Any]:
    """Any bits: also NaNs, with whatever is in them."""
    return np.frombuffer(np.random.default_rng(seed).bytes(spec.nbytes), spec.dtype).reshape(spec.shape)


class Interchanged(Foreign):
    """Another class of that kind."""


class Named(np.ndarray[Any, Any]):
    """A subclass that numpy's own functions treat otherwise."""

    def __array_function__(self, *_: Any) -> Any:
        raise AssertionError("not to be asked")


def backwards(array: np.ndarray[Any, Any]) -> Any:
    return array[::-1].copy()[::-1] if array.ndim else array.copy()


def interchanged(array: np.ndarray[Any, Any]) -> Any:
    return Interchanged(tensor(array))


def lent_read_only(array: np.ndarray[Any, Any]) -> Any:
    return Foreign(read_only(array))


def lent_of_old(array: np.ndarray[Any, Any]) -> Any:
    return Foreign(array.copy(), old=True)


def named(array: np.ndarray[Any, Any]) -> Any:
    return array.copy().view(Named)


def alone(array: np.ndarray[Any, Any]) -> Any:
    return [array.copy()]


GAPS = [strided, backwards, strided_tensor]  # unless they have one element
NUMPY = [plain, read_only, strided, backwards, named]
LENT = [lent, lent_of_old, interchanged]
if np.lib.NumpyVersion(np.__version__) >= "2.1.0" and torch.__version__ >= torch.torch_version.TorchVersion("2.9"):
    LENT.append(lent_read_only)  # others lend no such array
WAYS = [*NUMPY, *LENT, swapped, tensor, parameter, strided_tensor]
lists = st.one_of(
    st.lists(st.tuples(st.sampled_from([*SPECS, *ONES]), st.sampled_from(ways)), min_size=1, max_size=40)
    for ways in (WAYS, [plain], [tensor, parameter], NUMPY, [*NUMPY, swapped], LENT, [lent], [plain, tensor], [alone])
)


def gaps(listed: Sequence[tuple[Spec, Any]]) -> bool:
    return any(way in GAPS and spec.size > 1 for spec, way in listed)


def refused(spec: Spec, way: Any) -> bool:
    """Whether ``as_output`` refuses it, whatever its strides are."""
    if way is swapped:
        return spec.itemsize > 1
    return way in (read_only, lent_read_only) or (way is backwards and spec.shape[:1] == (1,))


def bits(tensors: Sequence[torch.Tensor]) -> list[bytes]:
    return [bytes(to_buffer(tensor.detach().contiguous())) for tensor in tensors]


def by_address(arrays: Arrays, layout: Layout) -> list[bytes] | None:
    addresses = arrays.at(np.arange(len(layout.lengths)))
    if addresses is None:
        return None
    out = bytearray(layout.nbytes)
    collect(addresses, layout.lengths, out)
    stops = np.cumsum(layout.lengths).tolist()
    return [bytes(out[stop - length : stop]) for stop, length in zip(stops, layout.lengths.tolist(), strict=True)]


@given(lists, st.booleans(), st.integers(0, 2**32))
def test_values_are_what_they_are_one_by_one(listed: list[tuple[Spec, Any]], large: bool, seed: int) -> None:
    if large:  # then they are not copied
        listed = [*listed, (LARGE, alone if listed[0][1] is alone else tensor)]
    arrays = [way(numbers(spec, seed + place)) for place, (spec, way) in enumerate(listed)]
    layout = layout_of([spec for spec, _ in listed])
    found = values_of(arrays, layout)
    if found is None:
        assert gaps(listed)
        return
    expected = bits([as_tensors(array)[0] for array in arrays])
    assert bits(found.tensors) == expected
    assert by_address(found, layout) == (expected if len(listed) > 16 or found.own else None)
    assert found.own is layout.many


@given(lists, st.integers(0, 2**32))
def test_outputs_are_written_where_they_are_or_not_at_all(listed: list[tuple[Spec, Any]], seed: int) -> None:
    outs = [way(numbers(spec, seed)) for spec, way in listed]
    layout = layout_of([spec for spec, _ in listed])
    found = outputs_of(outs, layout)
    assert (found is None) == (gaps(listed) or any(refused(spec, way) for spec, way in listed))
    if found is None:
        return
    addresses = found.at(np.arange(len(outs)))
    assert (addresses is None) == (len(outs) <= 16)
    if addresses is not None:
        data = [numbers(spec, seed + 1).tobytes() for spec, _ in listed]
        found.written(np.arange(len(outs)))
        scatter(b"".join(data), addresses, layout.lengths)
        assert [bytes(as_bytes(out)) for out in outs] == data


def as_bytes(out: Any) -> memoryview:
    (data,) = as_tensors(out)
    return to_buffer(data.contiguous())


@pytest.mark.parametrize("make", [plain, tensor], ids=["numpy", "torch"])
@pytest.mark.parametrize("count", [3, 30])
@pytest.mark.parametrize("wrong", [Spec((2, 1), "float32"), Spec((2,), "float16"), Spec((3,), "float32")], ids=str)
def test_an_array_that_does_not_fit_is_for_who_looks_at_each(make: Any, count: int, wrong: Spec) -> None:
    layout = layout_of([Spec((2,), "float32")] * count)
    arrays = [make(np.zeros(2, np.float32)) for _ in range(count)]
    assert values_of(arrays, layout) is not None
    assert outputs_of(arrays, layout) is not None
    arrays[count // 2] = make(np.zeros(wrong.shape, wrong.dtype))
    assert values_of(arrays, layout) is None
    assert outputs_of(arrays, layout) is None


@pytest.mark.parametrize("count", [3, 30])
@pytest.mark.parametrize(
    "odd",
    [
        lambda: torch.zeros(2, device="meta"),
        lambda: torch.eye(2).to_sparse()[0],
        lambda: torch.zeros(1).expand(2),
        lambda: [torch.zeros(2)],
        lambda: (torch.zeros(2), torch.zeros(2)),
        lambda: 3.0,
        lambda: None,
    ],
    ids=["meta", "sparse", "expanded", "list", "tuple", "number", "none"],
)
def test_what_has_no_memory_of_its_own_is_for_who_looks_at_each(count: int, odd: Any) -> None:
    layout = layout_of([Spec((2,), "float32")] * count)
    for arrays in ([torch.zeros(2)] * count, [np.zeros(2, np.float32)] * count):
        arrays[-1] = odd()
        assert values_of(arrays, layout) is None
        assert outputs_of(arrays, layout) is None


@pytest.mark.parametrize("count", [3, 30])
def test_strides_that_torch_cannot_have_are_for_who_looks_at_each(count: int) -> None:
    outs = [np.zeros(1, np.float32)[::-1] for _ in range(count)]
    assert all(out.flags.carray for out in outs)
    assert outputs_of(outs, layout_of([Spec((1,), "float32")] * count)) is None


@pytest.mark.parametrize("count", [3, 30])
def test_what_torch_negates_when_it_is_read_is_negated(count: int) -> None:
    layout = layout_of([Spec((1,), "float32")] * count)
    views = [torch.complex(torch.zeros(1), torch.full((1,), -float(number))).conj().imag for number in range(count)]
    assert all(view.is_neg() and view.is_contiguous() for view in views)
    assert values_of(views, layout) is None
    assert [value.item() for view in views for value in as_tensors(view)] == list(range(count))
    assert not any(value.is_neg() for view in views for value in as_tensors(view))
    assert outputs_of(views, layout) is None


def test_a_tensor_that_has_moved_is_not_written_by_its_address() -> None:
    layout = layout_of([Spec((2,), "float32")] * 20)
    outs = [torch.zeros(2) for _ in range(20)]
    found = outputs_of(outs, layout)
    assert found is not None
    outs[7].data = torch.zeros(1)
    assert found.at(np.array([6, 7])) is None
    assert found.at(np.array([5, 6])) is not None


def test_a_numpy_array_that_has_moved_is_written_where_it_is_then_or_not_at_all() -> None:
    layout = layout_of([Spec((2,), "float32")] * 20)
    outs = [np.zeros(2, np.float32) for _ in range(20)]
    found = outputs_of(outs, layout)
    assert found is not None
    outs[7].resize(100_000, refcheck=False)
    assert found.at(np.array([6, 7])) is None
    assert found.again(layout) is None
    assert found.at(np.array([5, 6])) is not None
    outs[7].resize(2, refcheck=False)
    addresses = found.at(np.array([7]))
    assert addresses is not None
    scatter(np.array([1, 2], np.float32).data.cast("B"), addresses, np.array([8]))
    assert outs[7].tolist() == [1, 2]
    outs[7].flags.writeable = False
    assert found.at(np.array([7])) is None
    assert found.again(layout) is None


def test_what_was_lent_by_others_is_kept_until_it_is_written() -> None:
    layout = layout_of([Spec((2,), "float32")] * 20)
    outs = [Foreign(np.zeros(2, np.float32)) for _ in range(20)]
    found = outputs_of(outs, layout)
    assert found is not None
    kept = outs[7].tensor
    outs[7].tensor = np.zeros(2, np.float32)
    addresses = found.at(np.array([7]))
    assert addresses is not None
    scatter(np.array([1, 2], np.float32).data.cast("B"), addresses, np.array([8]))
    assert kept.tolist() == [1, 2]


def test_what_is_on_a_device_is_not_read_before_the_device_has_written_it() -> None:
    asked: list[dict[str, Any]] = []

    class OnDevice(Foreign):
        __cuda_array_interface__ = None  # as cupy's arrays, and others that may be CUDA's

        def __dlpack__(self, **options: Any) -> Any:
            asked.append(options)
            return super().__dlpack__()

        def __dlpack_device__(self) -> Any:
            return (2, 0)  # CUDA's first

    arrays = [OnDevice(np.zeros(2, np.float32)) for _ in range(20)]
    for take in (values_of, outputs_of):
        with suppress(Exception):  # where torch has no CUDA it cannot ask for a stream
            take(arrays, layout_of([Spec((2,), "float32")] * 20))
    assert all("stream" in options for options in asked)


def test_versions_grow_with_what_is_written() -> None:
    outs = [torch.zeros(2) for _ in range(20)]
    found = outputs_of(outs, layout_of([Spec((2,), "float32")] * 20))
    assert found is not None
    found.written(np.array([3]))
    assert [out._version for out in outs] == [number == 3 for number in range(20)]


@given(st.lists(st.sampled_from(SPECS), min_size=1, max_size=30), st.sampled_from([plain, tensor]))
def test_kinds_are_numbered_as_they_come(specs: list[Spec], make: Any) -> None:
    found = kinds_of([make(np.zeros(spec.shape, spec.dtype)) for spec in specs])
    assert found is not None
    kinds, distinct = found
    assert distinct == list(dict.fromkeys(specs))
    assert [distinct[kind] for kind in kinds.tolist()] == specs


@pytest.mark.parametrize(
    "arrays",
    [
        [np.zeros(1), torch.zeros(1)],
        [np.zeros(1, np.complex64)],
        [torch.zeros(1, dtype=torch.complex64)],
        [np.zeros(1, ">f4")],
        [np.zeros(1), [np.zeros(1)]],
    ],
    ids=["mixed", "complex", "complex of torch", "foreign", "list"],
)
def test_other_kinds_are_for_who_looks_at_each(arrays: list[Any]) -> None:
    assert kinds_of(arrays) is None


@given(st.lists(st.sampled_from([*SPECS, LARGE]), min_size=1, max_size=30))
def test_copies_lie_one_after_the_other_and_are_aligned(specs: list[Spec]) -> None:
    layout = layout_of(specs)
    spans = sorted(zip(layout.offsets.tolist(), layout.lengths.tolist(), strict=True))
    at = 0
    for start, length in spans:
        assert start == at
        at += length
    assert at == layout.nbytes
    assert all(start % spec.itemsize == 0 for start, spec in zip(layout.offsets.tolist(), specs, strict=True))


SPANS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 6)), min_size=1, max_size=6)


def cells(tensor: torch.Tensor) -> set[int]:
    return set(range(tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * 4, 4))


@given(SPANS, st.data())
def test_it_is_what_it_says(spans: list[tuple[int, int]], data: st.DataObject):
    memory = torch.zeros(40)
    values = [memory[start : start + size] for start, size in spans]
    moves = data.draw(st.lists(st.integers(0, 34), min_size=len(spans), max_size=len(spans)))
    stay = data.draw(st.booleans())
    outs = values if stay else [memory[at : at + size] for at, (_, size) in zip(moves, spans, strict=True)]
    both = any(cells(one) & cells(two) for i, one in enumerate(outs) for two in outs[:i])
    others = any(
        cells(value) & cells(out) and not (i == j and value.data_ptr() == out.data_ptr())
        for i, value in enumerate(values)
        for j, out in enumerate(outs)
    )
    lengths = data.draw(st.sampled_from([None, np.array([4 * size for _, size in spans])]))
    if both or others:
        assert crossed(values, outs, lengths=lengths)
    elif all(size for _, size in spans):  # the place of nothing may count as one
        assert not crossed(values, outs, lengths=lengths)


def test_outs_belong_to_the_values_that_they_are_said_to():
    one, two, copy = torch.zeros(3, 4).unbind()
    assert not crossed([one, two], [one, copy, two], [0, 0, 1])
    assert crossed([one, two], [one, copy, two], [1, 0, 1])


@pytest.mark.parametrize("step", [2, 3])
def test_arrays_with_strides_take_all_that_is_in_between(step: int):
    memory = torch.zeros(12)
    assert crossed([memory[:2]], [memory[1::step]])
    assert not crossed([memory[:1]], [memory[1::step]])


def test_arrays_on_the_host_leave_as_they_are() -> None:
    tensors = [torch.ones(3), torch.zeros(2)]
    arrays = Leaving(tensors).arrived(np.array([0, 1]))
    assert [array.data_ptr() for array in arrays.tensors] == [tensor.data_ptr() for tensor in tensors]


def test_lists_of_arrays_are_not_listed_again() -> None:
    arrays = Arrays.of([torch.ones(3)])
    assert Leaving(arrays).arrived(np.array([0])) is arrays


def test_values_are_written_into_every_output_whatever_its_strides() -> None:
    flat = torch.arange(6.0)
    outs = [torch.empty(2, 3), torch.empty(3, 2).t(), torch.empty(6)]
    assert from_host(flat, outs) == set(), "nothing is under way without a GPU"
    assert outs[0].tolist() == outs[1].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert outs[2].tolist() == flat.tolist()


@pytest.mark.gpu
def test_arrays_of_a_gpu_have_arrived_when_they_are_asked_for() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    tensors = [torch.full((1 << 20,), 3.0, device="cuda"), torch.ones(2)]
    leaving = Leaving(tensors)
    tensors[0].fill_(-1)  # the copy was begun before
    (far, near) = leaving.arrived(np.array([0, 1])).tensors
    assert not far.is_cuda
    assert (far == 3).all()
    assert near is tensors[1]


# ---- payloads in several buffers: cut and summed as if they were one


edges = st.lists(st.integers(0, 30), max_size=6)


def payload(size: int, at: list[int], seed: int = 0) -> tuple[torch.Tensor, list[TensorRange]]:
    whole = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    bounds = sorted({0, size, *(edge for edge in at if edge < size)})
    buffers = [to_buffer(whole[start:stop].clone()) for start, stop in itertools.pairwise(bounds)]
    return whole, ranges_of(buffers, "float32", size)


def joined(ranges: list[TensorRange], size: int) -> torch.Tensor:
    out = torch.full((size,), torch.nan)
    for each in ranges:
        out[each.start : each.stop] = each.values
    return out


@settings(max_examples=100)
@given(st.integers(0, 30), edges, st.integers(0, 30), st.integers(0, 30))
def test_a_cut_is_a_slice(size: int, at: list[int], one: int, other: int) -> None:
    start, stop = sorted((min(one, size), min(other, size)))
    whole, ranges = payload(size, at)
    assert torch.equal(joined(cut(ranges, start, stop), stop - start), whole[start:stop])


@settings(max_examples=100)
@given(st.integers(0, 30), st.lists(edges, min_size=1, max_size=4))
def test_the_sum_does_not_depend_on_how_payloads_are_divided(size: int, divisions: list[list[int]]) -> None:
    payloads = [payload(size, at, seed) for seed, at in enumerate(divisions)]
    out = torch.empty(size)
    sum_ranges([ranges for _, ranges in payloads], out)
    expected = payloads[0][0].clone()
    for whole, _ in payloads[1:]:
        expected += whole
    assert torch.equal(out, expected)
    assert all(torch.equal(joined(ranges, size), whole) for whole, ranges in payloads), "contributions do not change"


@pytest.mark.parametrize("lengths", [[8], [8, 12, 4], [16, 8], []])
def test_payloads_of_another_size_are_refused(lengths: list[int]) -> None:
    with pytest.raises(WireError, match="elements where 5 belong"):
        ranges_of([bytearray(length) for length in lengths], "float32", 5)


def test_a_buffer_that_ends_within_an_element_is_refused() -> None:
    with pytest.raises(WireError, match="within an element of float32"):
        ranges_of([bytearray(10), bytearray(10)], "float32", 5)


CPU = torch.device("cpu")


def test_the_order_is_the_order_given() -> None:
    big, one = torch.tensor([2.0**24]), torch.tensor([1.0])
    assert sum_in_order([big, one, one]).item() == 2.0**24
    assert sum_in_order([one, one, big]).item() == 2.0**24 + 2


def test_the_sum_is_that_of_a_loop_to_the_bit() -> None:
    parts = [torch.randn(1001, generator=torch.Generator().manual_seed(i)) for i in range(5)]
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    assert torch.equal(sum_in_order(parts), total)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_summed_in_float32_and_rounded_once(dtype: torch.dtype) -> None:
    parts = [torch.full((4,), value, dtype=dtype) for value in (256.0, *[0.5] * 8)]
    plain = parts[0].clone()
    for part in parts[1:]:
        plain += part
    total = sum_in_order(parts)
    assert total.dtype == dtype
    assert torch.equal(total, torch.full((4,), 260.0, dtype=dtype))
    if dtype == torch.bfloat16:
        assert not torch.equal(plain, total)  # which is what this is about


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.int64, torch.float64])
def test_other_dtypes_stay(dtype: torch.dtype) -> None:
    total = sum_in_order([torch.tensor([1, 2], dtype=dtype)] * 3)
    assert total.dtype == dtype
    assert total.tolist() == [3, 6]


def test_the_inputs_stay_as_they_were() -> None:
    for dtype in (torch.float32, torch.float16):
        parts = [torch.ones(3, dtype=dtype) for _ in range(3)]
        total = sum_in_order(parts)
        assert all(part.tolist() == [1, 1, 1] for part in parts)
        assert all(total.data_ptr() != part.data_ptr() for part in parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_sum_goes_where_it_is_wanted_and_changes_nothing_else(count: int, dtype: torch.dtype) -> None:
    parts = [torch.ones(3, dtype=dtype) for _ in range(count)]
    out = torch.full((3,), 9, dtype=dtype)
    assert sum_in_order(parts, out=out) is out
    assert out.tolist() == [count] * 3
    assert all(part.tolist() == [1] * 3 for part in parts)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wide", [(), (0,), (1,), (0, 1, 2)])
def test_a_sum_of_half_precision_can_stay_in_float32(dtype: torch.dtype, wide: tuple[int, ...]) -> None:
    parts = [torch.full((2,), number, dtype=dtype) for number in (40_000.0, 40_000.0, 2.0**-7)]
    parts = [part.float() if place in wide else part for place, part in enumerate(parts)]
    expected = 2 * parts[0].float() + 2.0**-7
    for total in (sum_in_order(parts, dtype=torch.float32), sum_in_order(parts, out=torch.empty(2))):
        assert total.dtype == torch.float32
        assert torch.equal(total, expected)
    assert torch.equal(sum_in_order(parts, out=torch.empty(2, dtype=dtype)), expected.to(dtype))
    assert [part[0].item() for part in parts] == [parts[0][0].item()] * 2 + [2.0**-7]


def test_a_single_value_is_returned_as_it_is() -> None:
    one = torch.ones(3)
    assert sum_in_order([one]) is one
    assert reduce_to([one], CPU) is one


def test_strided_and_empty_values() -> None:
    assert sum_in_order([torch.ones(2, 3).t(), torch.ones(3, 2)]).tolist() == [[2, 2]] * 3
    assert reduce_to([torch.zeros(0), torch.zeros(0)], CPU).shape == (0,)
