"""numpy, torch, cupy and DLPack arrays as torch tensors over the same memory, and tensors as bytes."""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
import torch.utils.dlpack
from torch.autograd.graph import increment_version

from kvstore import wire
from kvstore.errors import UsageError, choices
from kvstore.spec import ITEMSIZE, Spec

_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEMSIZE}
_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in _DTYPES.items()}
_NUMPY = frozenset(np.dtype(name) for name in ITEMSIZE if name != "bfloat16")  # their names cost 2 us each
DLPACK_CPU = 1  # of DLPack's types of devices, the host's memory

# All views in one call of C++, which torch has for its own use; a version without it takes the slower way.
unflatten: Any = getattr(getattr(torch._C, "_nn", None), "unflatten_dense_tensors", None)


def spec_of(tensor: torch.Tensor) -> Spec:
    return Spec(tuple(tensor.shape), _NAMES[tensor.dtype])


def as_dtype(dtype: Any) -> torch.dtype:
    """Return ``dtype``, as torch or numpy has it or by name, as torch's; None is float32.

    Raises:
        UsageError: it is not a dtype, or not one that can be stored.
    """
    if dtype is None:
        return torch.float32
    if isinstance(dtype, torch.dtype):
        name = _NAMES.get(dtype, str(dtype))
    else:
        try:
            name = np.dtype(dtype).name
        except TypeError:
            name = str(dtype)
    if name not in _DTYPES:
        raise UsageError(f"dtype {name} cannot be stored; choose from {choices(ITEMSIZE)}")
    return _DTYPES[name]


def as_tensor(value: Any) -> torch.Tensor:
    """Return ``value`` as a tensor to read from: over the same memory, or over a copy where torch cannot.

    Raises:
        UsageError: it is something else, or of a dtype that cannot be stored.
    """
    if isinstance(value, torch.Tensor):
        return _checked(value.detach()).resolve_neg()
    if isinstance(value, np.ndarray | np.generic):
        return _from_numpy(readable(np.asarray(value)))
    if hasattr(value, "__dlpack__"):
        return _checked(_from_dlpack(value))
    raise UsageError(
        f"a value is a numpy array, a torch tensor, a cupy array or has DLPack; this is {type(value).__name__}"
    )


def readable(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return ``array`` if torch can have its memory, to read from; else a copy, in the machine's byte order."""
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return array if array.flags.writeable and has_plain_strides(array) else array.copy()


def as_output(out: Any) -> torch.Tensor:
    """Return ``out`` as a tensor to write to, over the same memory.

    Raises:
        UsageError: it is no array, or one that cannot be written through (read-only, negative strides, byte-swapped,
            elements that share memory).
    """
    if isinstance(out, np.ndarray):
        if not out.flags.writeable:
            raise UsageError("out is a read-only numpy array")
        if not out.dtype.isnative:
            raise UsageError(
                f"an array of foreign byte order ({out.dtype.str}) cannot be written to; pass out as an array of "
                f"{out.dtype.name}, and copy from it"
            )
        if not has_plain_strides(out):
            raise UsageError("out has unusual strides; pass a plain array and copy from it")
        return _written(_from_numpy(out))
    if isinstance(out, torch.Tensor):
        return _written(_checked(out.detach()))
    if hasattr(out, "__dlpack__"):
        _require_writable(out)
        return _written(as_tensor(out))
    raise UsageError(
        f"out must be an array to write to, not {type(out).__name__}: the value of an array is all of it, and is "
        "written into an array of its shape"
    )


def as_tensors(value: Any) -> list[torch.Tensor]:
    """Return ``value``, an array or a list of them (one per device), as tensors to read from.

    Raises:
        UsageError: the list is empty, or its arrays differ in shape or dtype.
    """
    if not isinstance(value, list | tuple):
        return [as_tensor(value)]
    if not value:
        raise UsageError("the list of values is empty: pass one array per device")
    tensors = [as_tensor(item) for item in value]
    first = spec_of(tensors[0])
    for tensor in tensors[1:]:
        if spec_of(tensor) != first:
            raise UsageError(f"the values of one key differ: {first} and {spec_of(tensor)}")
    return tensors


def to_buffer(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, without a copy."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else memoryview(b"")


def from_buffer(buffer: wire.Buffer, dtype: str) -> torch.Tensor:
    """Return a flat tensor over the memory of ``buffer``, whose length must be a multiple of the item size."""
    if not len(buffer):
        return torch.empty(0, dtype=_DTYPES[dtype], device="cpu")
    return torch.frombuffer(buffer, dtype=_DTYPES[dtype])


def split_like(
    flat: torch.Tensor, sizes: Sequence[int], shaped: list[torch.Tensor] | None = None
) -> Sequence[torch.Tensor]:
    """Return consecutive parts of ``flat``, as views.

    Args:
        shaped: tensors that have the parts' shapes; None for flat parts, which cost a fifth as much.
    """
    parts: Sequence[torch.Tensor]
    if shaped is None:
        parts = torch.split_with_sizes(flat, sizes)
    elif 0 in sizes or unflatten is None:
        parts = [part.view(like.shape) for part, like in zip(torch.split_with_sizes(flat, sizes), shaped, strict=True)]
    else:
        parts = unflatten(flat, shaped)
    return parts


def _from_numpy(array: np.ndarray[Any, Any]) -> torch.Tensor:
    if array.dtype in _NUMPY:
        return torch.from_numpy(array)
    if array.dtype.name == "bfloat16":  # ml_dtypes; torch knows it by another name
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    raise UsageError(f"dtype {array.dtype} cannot be stored; choose from {choices(ITEMSIZE)}")


def has_plain_strides(array: np.ndarray[Any, Any]) -> bool:
    """Whether torch can represent the strides of ``array``; the strides of a record's field need not be whole items."""
    return array.flags.aligned and all(stride >= 0 and stride % array.itemsize == 0 for stride in array.strides)


def _from_dlpack(value: Any) -> torch.Tensor:
    try:
        tensor: torch.Tensor = torch.utils.dlpack.from_dlpack(value)
    except Exception as exc:  # any exception of the exporter's, or torch's
        raise _no_import(value, exc) from exc
    return tensor


def _require_writable(out: Any) -> None:
    """Raise if an array that has DLPack and lies in the host's memory is read-only; torch would write into it."""
    try:
        if out.__dlpack_device__()[0] == DLPACK_CPU:
            out.__dlpack__()  # without a version it cannot say that it is read-only: it has to refuse
    except BufferError as error:
        as_tensor(out)  # raises if it cannot be read either
        raise UsageError(f"out is a read-only {type(out).__name__}: {error}") from error
    except Exception as error:  # any exception of the exporter's
        raise _no_import(out, error) from error


def _no_import(value: Any, error: Exception) -> UsageError:
    return UsageError(f"torch cannot import this {type(value).__name__} by DLPack: {error}")


def _written(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_contiguous() or not tensor.numel():
        return tensor
    reach = 0  # the largest distance between elements in the dimensions before
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                raise UsageError(
                    "out has elements that share memory (it was expanded, or unfolded); pass a plain array"
                )
            reach += stride * (size - 1)
    return tensor


def made_of_others(tensor: torch.Tensor) -> str:
    """Return what to pass in place of a tensor whose elements lie in other tensors; empty for any other tensor."""
    kind = type(tensor)
    if tensor.is_nested:
        return "a nested tensor: pass its tensors one by one (tensor.unbind())"
    if kind is torch.Tensor or not hasattr(kind, "__tensor_flatten__"):
        return ""
    if hasattr(kind, "full_tensor"):
        return f"a {kind.__name__}: pass its part in this process (tensor.to_local()), or all of it (full_tensor())"
    return f"a {kind.__name__}, which is made of other tensors: pass a plain torch.Tensor"


def _checked(tensor: torch.Tensor) -> torch.Tensor:
    if other := made_of_others(tensor):
        raise UsageError(f"a store takes tensors with memory of their own, and this is {other}")
    if tensor.dtype not in _NAMES:
        raise UsageError(f"dtype {tensor.dtype} cannot be stored; choose from {choices(ITEMSIZE)}")
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        raise UsageError(
            f"a {tensor.layout} tensor on {tensor.device} cannot be stored; pass a dense tensor on a CPU or CUDA device"
        )
    return tensor


LARGE = 1 << 18  # bytes; from here on the C library's copy, which may go past the caches, is faster than torch's

_memmove = ctypes.CDLL(None).memmove
_memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_memmove.restype = ctypes.c_void_p


def copy_each(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each of ``sources`` into its target; all are flat and contiguous, and pairs have one size and dtype."""
    small: list[torch.Tensor] = []
    those: list[torch.Tensor] = []
    for target, source in zip(targets, sources, strict=True):
        nbytes = target.numel() * target.itemsize
        if nbytes < LARGE:
            small.append(target)
            those.append(source)
        else:
            _memmove(target.data_ptr(), source.data_ptr(), nbytes)
            increment_version(target)
    if small:
        torch._foreach_copy_(small, those)


def spread(flat: torch.Tensor, sizes: Sequence[int], targets: list[torch.Tensor]) -> None:
    """Copy ``flat`` into ``targets``, one after the other: flat and contiguous, of its dtype and these ``sizes``."""
    if max(sizes, default=0) * flat.itemsize >= LARGE:
        copy_each(targets, flat.split_with_sizes(sizes))
    elif len(targets) == 1:
        targets[0].copy_(flat)
    else:
        torch.split_with_sizes_copy(flat, sizes, out=targets)  # a third less than to split and to copy


def all_finite(values: torch.Tensor, dtype: torch.dtype | None = None) -> bool:
    """Return whether no element is NaN or infinite in ``dtype``; by default their own, or float32 if they have half."""
    if dtype is None:
        dtype = torch.float64 if values.dtype == torch.float64 else torch.float32
    # A sum is NaN or infinite if an element is, and thirty times as fast as a look at each. It may overflow, too.
    if math.isfinite(values.sum(dtype=dtype).item()):
        return True
    return bool(torch.isfinite(values.to(dtype)).all())


T = TypeVar("T")


def without_grad(action: Callable[..., T], *args: Any, **options: Any) -> T:
    """Return what ``action`` returns, which nothing records for autograd.

    A signal's handler may raise at the end of ``torch.no_grad()``. This restores the caller's mode even then.
    """
    recording = torch.is_grad_enabled()
    try:
        torch.set_grad_enabled(False)
        result = action(*args, **options)
        torch.set_grad_enabled(recording)
    except BaseException:
        torch.set_grad_enabled(recording)
        raise
    return result


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


# Many small ranges of memory, given by their addresses: read or written in one step of numpy's.
#
# A call for each of thousands of ranges takes ten times as long as copying their bytes. numpy's indexing moves
# elements of 1 to 16 bytes wherever they are. The array that is indexed spans all memory from the first range to the
# last; only the ranges themselves are read or written.
Column: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.int64]]"

_UNITS = {size: np.dtype(name) for size, name in ((1, "u1"), (2, "u2"), (4, "u4"), (8, "u8"), (16, "c16"))}


def collect(addresses: Column, lengths: Column, out: wire.Buffer) -> None:
    """Copy ``lengths[i]`` bytes at ``addresses[i]``, for all i in order, into ``out``, which has just that room."""
    if len(out):
        memory, index = _indexed(addresses, lengths)
        np.take(memory, index, out=np.frombuffer(out, memory.dtype), mode="clip")  # others would copy once more


def scatter(data: wire.Buffer, addresses: Column, lengths: Column) -> None:
    """Copy ``data`` to where ``collect`` with the same arguments would take it from."""
    if len(data):
        memory, index = _indexed(addresses, lengths)
        memory[index] = np.frombuffer(data, memory.dtype)


def _indexed(addresses: Column, lengths: Column) -> tuple[np.ndarray[Any, Any], Column]:
    """Return an array over all memory that the ranges span, and the indices of their elements."""
    sound = lengths > 0
    if not sound.all():  # an empty array may have any address
        addresses, lengths = addresses[sound], lengths[sound]
    bits = int(np.bitwise_or.reduce(addresses) | np.bitwise_or.reduce(lengths)) | max(_UNITS)
    unit = bits & -bits  # the largest power of two that divides them all
    first = int(addresses.min())
    starts, counts = (addresses - first) // unit, lengths // unit
    most = int(counts.max())
    if (counts == most).all():
        index = (starts[:, None] + np.arange(most)).ravel() if most > 1 else starts
    else:
        before = np.cumsum(counts) - counts
        index = np.repeat(starts - before, counts) + np.arange(int(counts.sum()))
    return np.asarray(_Memory(first, int((starts + counts).max()), _UNITS[unit])), index


class _Memory:
    """Memory from an address on, to numpy: so many units of a dtype."""

    def __init__(self, address: int, units: int, dtype: np.dtype[Any]) -> None:
        self.__array_interface__ = {"data": (address, False), "shape": (units,), "typestr": dtype.str, "version": 3}
