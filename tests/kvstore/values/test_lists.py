"""Lists of arrays that are checked and moved all at once: what comes of it is what comes of them one by one."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvstore.spec import Spec
from kvstore.values import (
    Arrays,
    Layout,
    Leaving,
    as_tensors,
    collect,
    crossed,
    from_host,
    kinds_of,
    outputs_of,
    scatter,
    to_buffer,
    values_of,
)

SPECS = [Spec((2,), "float32"), Spec((3, 2), "float32"), Spec((), "int64"), Spec((0, 4), "float16"), Spec((5,), "int8")]
ONES = [Spec((1,), "float32"), Spec((1, 3), "int64")]  # numpy calls any stride of the first dimension contiguous
LARGE = Spec((40_000,), "float64")


def layout_of(specs: Sequence[Spec]) -> Layout:
    distinct = list(dict.fromkeys(specs))
    return Layout(np.array([distinct.index(spec) for spec in specs]), distinct)


def numbers(spec: Spec, seed: int) -> np.ndarray[Any, Any]:
    """Any bits: also NaNs, with whatever is in them."""
    return np.frombuffer(np.random.default_rng(seed).bytes(spec.nbytes), spec.dtype).reshape(spec.shape)


class Interchanged:
    """Something that has DLPack, and nothing else."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __dlpack__(self, **options: Any) -> Any:
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.tensor.__dlpack_device__()


class Lent:
    """An array that has DLPack, and nothing else; of version 0 if ``old``."""

    def __init__(self, array: np.ndarray[Any, Any], old: bool = False) -> None:
        self.array = array
        self.old = old

    def __dlpack__(self, **options: Any) -> Any:
        if self.old and options:
            raise TypeError("no options here")
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


class Named(np.ndarray[Any, Any]):
    """A subclass that numpy's own functions treat otherwise."""

    def __array_function__(self, *_: Any) -> Any:
        raise AssertionError("not to be asked")


def plain(array: np.ndarray[Any, Any]) -> Any:
    return array.copy()


def read_only(array: np.ndarray[Any, Any]) -> Any:
    made = array.copy()
    made.flags.writeable = False
    return made


def strided(array: np.ndarray[Any, Any]) -> Any:
    return np.stack([array, array], axis=-1)[..., 1]


def backwards(array: np.ndarray[Any, Any]) -> Any:
    return array[::-1].copy()[::-1] if array.ndim else array.copy()


def swapped(array: np.ndarray[Any, Any]) -> Any:
    return array.astype(array.dtype.newbyteorder())


def tensor(array: np.ndarray[Any, Any]) -> Any:
    return torch.from_numpy(array.copy())


def strided_tensor(array: np.ndarray[Any, Any]) -> Any:
    return torch.from_numpy(np.stack([array, array], axis=-1))[..., 1]


def parameter(array: np.ndarray[Any, Any]) -> Any:
    made = tensor(array)
    return torch.nn.Parameter(made, requires_grad=made.is_floating_point())


def interchanged(array: np.ndarray[Any, Any]) -> Any:
    return Interchanged(tensor(array))


def lent(array: np.ndarray[Any, Any]) -> Any:
    return Lent(array.copy())


def lent_read_only(array: np.ndarray[Any, Any]) -> Any:
    return Lent(read_only(array))


def lent_of_old(array: np.ndarray[Any, Any]) -> Any:
    return Lent(array.copy(), old=True)


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
    outs = [Lent(np.zeros(2, np.float32)) for _ in range(20)]
    found = outputs_of(outs, layout)
    assert found is not None
    kept = outs[7].array
    outs[7].array = np.zeros(2, np.float32)
    addresses = found.at(np.array([7]))
    assert addresses is not None
    scatter(np.array([1, 2], np.float32).data.cast("B"), addresses, np.array([8]))
    assert kept.tolist() == [1, 2]


def test_what_is_on_a_device_is_not_read_before_the_device_has_written_it() -> None:
    asked: list[dict[str, Any]] = []

    class OnDevice(Lent):
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
