"""Arrays in and out: whatever the caller has is read, or written, over its own memory, or refused in plain words."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from foreign import Foreign
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import UsageError
from kvstore.spec import ITEMSIZE, Spec
from kvstore.values import (
    Leaving,
    all_finite,
    as_output,
    as_tensor,
    as_tensors,
    collect,
    from_buffer,
    from_host,
    scatter,
    spec_of,
    split_like,
    spread,
    to_buffer,
    without_grad,
)
from kvstore.values.any_arrays import LARGE, copy_each

NUMPY = [name for name in ITEMSIZE if name != "bfloat16"]
ALL = sorted(ITEMSIZE)


class Broken(Foreign):
    def __dlpack__(self, **kwargs: Any) -> Any:
        raise BufferError("it is lent already")


def record_field() -> np.ndarray[Any, Any]:
    """An array whose stride is no multiple of its items."""
    return np.array([(1, 0), (2, 0), (3, 0)], dtype=[("a", "f4"), ("b", "u1")])["a"]


# ---- in


@pytest.mark.parametrize("name", NUMPY)
def test_numpy_arrays_are_read_in_place(name: str) -> None:
    array = np.arange(6, dtype=name).reshape(2, 3)
    tensor = as_tensor(array)
    assert spec_of(tensor) == Spec((2, 3), name)
    array[1, 2] = 9
    assert tensor[1, 2] == 9


@pytest.mark.parametrize("name", ALL)
def test_tensors_are_read_in_place(name: str) -> None:
    value = torch.arange(6).to(getattr(torch, name)).view(2, 3)
    assert as_tensor(value).data_ptr() == value.data_ptr()
    assert spec_of(as_tensor(value)) == Spec((2, 3), name)


@pytest.mark.parametrize("name", ALL)
def test_dlpack_is_read_in_place(name: str) -> None:
    value = torch.arange(6).to(getattr(torch, name))
    assert as_tensor(Foreign(value)).data_ptr() == value.data_ptr()


def test_a_parameter_is_read_without_its_history() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    assert not as_tensor(weight).requires_grad
    assert not as_tensor(weight * 2).requires_grad


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12.0).reshape(3, 4)[:, ::2],
        np.arange(12.0).reshape(3, 4).T,
        np.arange(6.0)[::-1],
        np.arange(12.0).reshape(3, 4)[::-1, ::-2],
        np.arange(6, dtype=">f8"),
        np.arange(6, dtype=">i4")[::-1],
        np.broadcast_to(np.float32(3), (2, 2)),
        np.float32(3),
        np.array(3.0),
        np.zeros((0, 3)),
        np.zeros((2, 0))[::-1],
        record_field(),
        np.frombuffer(b"\0" + np.arange(3.0).tobytes(), dtype="f8", offset=1),
    ],
    ids=lambda array: f"{array.dtype.str}{array.strides}",
)
def test_unusual_numpy_arrays_have_their_values(array: Any) -> None:
    tensor = as_tensor(array)
    assert tuple(tensor.shape) == np.shape(array)
    np.testing.assert_array_equal(tensor.numpy(), array)


def test_a_read_only_array_is_copied_so_that_nobody_writes_to_it() -> None:
    array = np.arange(3.0)
    array.flags.writeable = False
    tensor = as_tensor(array)
    tensor.zero_()
    np.testing.assert_array_equal(array, [0, 1, 2])


@pytest.mark.parametrize(
    "value",
    [
        np.zeros(2, complex),
        np.zeros(2, object),
        np.zeros(2, bool),
        np.zeros(2, "uint32"),
        np.array(["a"]),
        np.zeros(2, "datetime64[s]"),
        np.zeros(2, [("a", "f4")]),
        torch.zeros(2, dtype=torch.complex64),
        torch.zeros(2, dtype=torch.bool),
        Foreign(torch.zeros(2, dtype=torch.complex64)),
    ],
    ids=lambda value: f"{type(value).__name__} {getattr(value, 'dtype', '')}",
)
def test_a_dtype_that_cannot_be_stored(value: Any) -> None:
    for take in (as_tensor, as_output):
        with pytest.raises(UsageError, match=r"cannot be stored; choose from .*float32"):
            take(value)


@pytest.mark.parametrize("value", [torch.eye(2).to_sparse(), torch.zeros(2, device="meta")], ids=["sparse", "meta"])
def test_a_tensor_without_plain_memory(value: torch.Tensor) -> None:
    for take in (as_tensor, as_output):
        with pytest.raises(UsageError, match="cannot be stored; pass a dense tensor"):
            take(value)


@pytest.mark.parametrize("value", [None, 1, 1.5, "w", b"1234", {"a": 1}, object(), memoryview(b"12")])
def test_what_is_no_array(value: Any) -> None:
    with pytest.raises(UsageError, match=type(value).__name__):
        as_tensor(value)
    with pytest.raises(UsageError, match=type(value).__name__):
        as_output(value)


def test_an_array_that_will_not_be_lent() -> None:
    for take in (as_tensor, as_output):
        with pytest.raises(UsageError, match="cannot import this Broken by DLPack: it is lent already"):
            take(Broken(torch.zeros(2)))


def test_an_output_of_another_library_that_is_read_only() -> None:
    array = np.zeros(2, np.float32)
    out = Foreign(array)
    as_output(out).fill_(1)
    assert array.tolist() == [1, 1]
    array.flags.writeable = False
    with pytest.raises(UsageError, match="Foreign"):  # "out is a read-only Foreign", where that can be said
        as_output(out)


def test_a_list_has_one_value_per_device() -> None:
    assert [t.tolist() for t in as_tensors([np.ones(2), torch.zeros(2, dtype=torch.float64)])] == [[1, 1], [0, 0]]
    assert len(as_tensors(np.ones(2))) == 1
    assert len(as_tensors((np.ones(2),))) == 1


@pytest.mark.parametrize("other", [np.ones(3), np.ones((2, 1)), np.ones(2, "f4"), torch.ones(2)])
def test_the_values_of_one_key_are_alike(other: Any) -> None:
    with pytest.raises(UsageError, match="the values of one key differ"):
        as_tensors([np.ones(2), other])


def test_an_empty_list_of_values() -> None:
    with pytest.raises(UsageError, match="the list of values is empty"):
        as_tensors([])


# ---- out


@pytest.mark.parametrize(
    "out",
    [
        np.zeros((2, 3)),
        np.zeros((3, 2)).T,
        np.zeros((2, 6))[:, ::2],
        torch.zeros(2, 3),
        torch.zeros(3, 2).t(),
        torch.nn.Parameter(torch.zeros(2, 3)),
        Foreign(torch.zeros(2, 3)),
    ],
    ids=lambda out: type(out).__name__,
)
def test_outputs_are_written_through(out: Any) -> None:
    target = as_output(out)
    target.copy_(torch.arange(6.0).view(2, 3))
    seen = out.tensor if isinstance(out, Foreign) else out.detach() if isinstance(out, torch.Tensor) else out
    np.testing.assert_array_equal(np.asarray(seen), [[0, 1, 2], [3, 4, 5]])


def read_only() -> np.ndarray[Any, Any]:
    array = np.zeros(3)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("out", "text"),
    [
        (read_only(), "read-only"),
        (np.zeros(3)[::-1], "unusual strides"),
        (np.zeros(3, ">f8"), r"foreign byte order \(>f8\) cannot be written to; pass out as an array of float64"),
        (record_field(), "unusual strides"),
        (np.float64(3), "not float64"),
        (torch.zeros(1).expand(4), "share memory"),
        (np.lib.stride_tricks.as_strided(np.zeros(1), (4,), (0,)), "share memory"),
        (torch.zeros(5).unfold(0, 3, 1), "share memory"),
        (torch.zeros(9).as_strided((2, 3), (2, 1)), "share memory"),
    ],
)
def test_outputs_that_cannot_be_written_through(out: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        as_output(out)


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3)), max_size=4), st.randoms(use_true_random=False))
def test_any_part_of_a_plain_array_is_an_output(dims: list[tuple[int, int]], random: Random) -> None:
    whole = torch.zeros([size * step for size, step in dims])
    part = whole[tuple(slice(None, None, step) for _, step in dims)]
    part = part.permute(random.sample(range(len(dims)), len(dims)))
    as_output(part).fill_(1)
    assert whole.sum().item() == part.numel()


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9)), max_size=4))
def test_no_output_has_two_elements_in_one_place(dims: list[tuple[int, int]]) -> None:
    sizes, strides = [size for size, _ in dims], [stride for _, stride in dims]
    try:
        out = as_output(torch.zeros(200).as_strided(sizes, strides))
    except UsageError:
        return
    out.copy_(torch.arange(out.numel()).view(sizes))
    assert out.flatten().tolist() == list(range(out.numel()))


def test_an_output_of_one_element_may_have_any_stride() -> None:
    as_output(torch.zeros(1).expand(1)).fill_(4)
    assert as_output(torch.zeros(0).expand(3, 0)).shape == (3, 0)


# ---- bytes


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3)])
def test_bytes_and_back(name: str, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(int(np.prod(shape))).to(getattr(torch, name)).view(shape)
    buffer = to_buffer(tensor)
    assert buffer.nbytes == spec_of(tensor).nbytes
    back = from_buffer(bytearray(buffer), name)
    assert torch.equal(back, tensor.view(-1))


def test_bytes_are_not_copied() -> None:
    tensor = torch.zeros(4)
    from_buffer(to_buffer(tensor), "float32")[2] = 7
    assert tensor.tolist() == [0, 0, 7, 0]


def test_what_is_on_the_host_leaves_from_where_it_is() -> None:
    values = [torch.arange(6.0), torch.tensor(3.0)]
    arrived = Leaving(values).arrived(np.array([0, 1])).tensors
    assert all(one is other for one, other in zip(arrived, values, strict=True))


def test_from_host_writes_every_output_whatever_its_strides() -> None:
    outs = [torch.zeros(2, 3), torch.zeros(3, 2).t()]
    from_host(torch.arange(6.0), outs)
    assert all(out.tolist() == [[0, 1, 2], [3, 4, 5]] for out in outs)


@pytest.mark.parametrize("shapes", [[(2, 3), (4,), ()], [(2, 0), (3,)]])
@pytest.mark.parametrize("fast", [True, False])
def test_parts_of_a_flat_tensor_have_shapes_and_share_its_memory(
    shapes: list[tuple[int, ...]], fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not fast:  # a version of torch without its own function for this
        monkeypatch.setattr("kvstore.values.any_arrays.unflatten", None)
    shaped = [torch.empty(shape) for shape in shapes]
    sizes = [tensor.numel() for tensor in shaped]
    flat = torch.arange(float(sum(sizes)))
    parts = split_like(flat, sizes, shaped)
    assert [tuple(part.shape) for part in parts] == shapes
    assert torch.equal(torch.cat([part.reshape(-1) for part in parts]), flat)
    flat.fill_(-1)
    assert all((part == -1).all() for part in parts)
    assert [part.dim() for part in split_like(flat, sizes)] == [1] * len(sizes)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_element_is_enough(dtype: torch.dtype, bad: float) -> None:
    values = torch.ones(1000, dtype=dtype)
    assert all_finite(values)
    values[517] = bad
    assert not all_finite(values)


def test_infinities_that_cancel_are_found() -> None:
    assert not all_finite(torch.tensor([math.inf, -math.inf]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_values_whose_sum_overflows_are_finite(dtype: torch.dtype) -> None:
    assert all_finite(torch.full((4,), torch.finfo(dtype).max, dtype=dtype))


def test_values_may_be_too_large_for_another_dtype() -> None:
    values = torch.tensor([1e5, 1.0])
    assert all_finite(values)
    assert not all_finite(values, torch.float16)
    assert not all_finite(torch.tensor([1e300], dtype=torch.float64), torch.float32)


def test_nothing_is_finite() -> None:
    assert all_finite(torch.empty(0))


def test_nothing_is_recorded() -> None:
    leaf = torch.ones(3, requires_grad=True)
    doubled = without_grad(torch.mul, leaf, 2)
    assert doubled.tolist() == [2, 2, 2]
    assert not doubled.requires_grad


@pytest.mark.parametrize("recording", [True, False])
def test_the_mode_is_as_it_was(recording: bool) -> None:
    with torch.set_grad_enabled(recording):
        assert without_grad(torch.is_grad_enabled) is False
        assert torch.is_grad_enabled() is recording


@pytest.mark.parametrize("recording", [True, False])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_the_mode_is_as_it_was_after_an_exception(recording: bool, error: type[BaseException]) -> None:
    def fail() -> None:
        raise error

    with torch.set_grad_enabled(recording):
        with pytest.raises(error):
            without_grad(fail)
        assert torch.is_grad_enabled() is recording


def test_arguments_by_name_are_passed_on() -> None:
    out = torch.empty(4)
    without_grad(torch.cat, [torch.zeros(2), torch.ones(2)], out=out)
    assert out.tolist() == [0, 0, 1, 1]


SIZES = {
    "small": [3, 128, 1, 0, 64],
    "large and small": [7, LARGE // 4, 5, LARGE // 2],
    "just below": [LARGE // 4 - 1],
    "none": [],
    "of nothing": [0, 0],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.bool], ids=str)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_each_part_goes_into_its_own_target(sizes: list[int], dtype: torch.dtype):
    flat = torch.arange(sum(sizes)).remainder(251).to(dtype)
    memory = torch.zeros(sum(sizes) + len(sizes), dtype=dtype)  # an element between any two, which stays as it is
    targets = [part[:-1] for part in memory.split_with_sizes([size + 1 for size in sizes])]
    spread(flat, sizes, targets)
    assert torch.equal(torch.cat([*targets, flat[:0]]), flat)
    assert not any(part[-1] for part in memory.split_with_sizes([size + 1 for size in sizes]))


@pytest.mark.parametrize("sizes", [SIZES["small"], SIZES["large and small"]], ids=["small", "large"])
def test_autograd_learns_that_a_target_has_changed(sizes: list[int]):
    targets = [torch.zeros(size, requires_grad=True) for size in sizes]
    before = [target._version for target in targets]
    with torch.no_grad():
        spread(torch.ones(sum(sizes)), sizes, [target.view(-1) for target in targets])
    assert all(target._version > version for target, version in zip(targets, before, strict=True) if target.numel())


def test_copies_of_any_size():
    sources = [torch.full((size,), float(size)) for size in (1, 100, LARGE // 4, LARGE)]
    targets = [torch.zeros_like(source) for source in sources]
    copy_each(targets, sources)
    assert all(map(torch.equal, targets, sources))


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
