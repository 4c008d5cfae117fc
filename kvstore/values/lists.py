"""The fast path for lists of thousands of arrays: whether all are of common types, and where their elements lie.

C functions in ``map`` ask for the properties of each array. No lists of new objects are made: the garbage collector
would visit thousands of them again and again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from ctypes import addressof, c_char
from operator import attrgetter, eq, methodcaller
from typing import Any, TypeAlias, TypeVar, overload

import numpy as np
import torch
from torch.autograd.graph import increment_version

from kvstore.errors import UsageError
from kvstore.spec import ITEMSIZE, Spec
from kvstore.values.any_arrays import DLPACK_CPU, Column, as_dtype, as_output, as_tensor, collect, has_plain_strides

FEW = 16  # arrays; so many may as well be moved one by one
PART = 4 << 10  # bytes; arrays that have more, on average, are moved one by one as fast as memory is

_TENSORS = {torch.Tensor, torch.nn.Parameter}
_LISTS = {list, tuple}
_DTYPE, _SHAPE = attrgetter("dtype"), attrgetter("shape")
_ON_CPU, _PLAIN, _NBYTES = attrgetter("is_cpu"), attrgetter("flags.carray"), attrgetter("nbytes")
_DEVICE = methodcaller("__dlpack_device__")
_MEMORY = (c_char * 0).from_buffer  # of an array that is contiguous and not read-only; others raise

T = TypeVar("T")


def many_small(count: int, nbytes: int) -> bool:
    """Whether ``count`` arrays, of ``nbytes`` together, are faster to copy in one step than one by one."""
    return count > FEW and nbytes < PART * count


class Layout:
    """The shapes and dtypes that a list of arrays must have, and how copies lie back to back: largest items first.

    Attributes:
        numpy: dtypes as numpy has them; None if it lacks one.
        loose: whether an array has a dimension of one or none: to numpy any stride is contiguous there.
        offsets: where in a copy of all each of them begins; it is aligned there.
    """

    def __init__(self, kinds: Column, specs: Sequence[Spec]) -> None:
        numbers = kinds.tolist()
        self.shapes = list(map([spec.shape for spec in specs].__getitem__, numbers))
        self.dtypes = list(map([as_dtype(spec.dtype) for spec in specs].__getitem__, numbers))
        names = [spec.dtype for spec in specs]
        self.numpy = None if "bfloat16" in names else list(map(list(map(np.dtype, names)).__getitem__, numbers))
        self.loose = any(size <= 1 for spec in specs for size in spec.shape)
        self.lengths = np.array([spec.nbytes for spec in specs], np.int64)[kinds]
        self.nbytes = int(self.lengths.sum())
        self.many = many_small(len(numbers), self.nbytes)
        ordered = sorted(set(names), key=lambda name: (-ITEMSIZE[name], name))
        ranks = np.array([ordered.index(name) for name in names])[kinds]
        self.by_dtype = {name: np.flatnonzero(ranks == rank) for rank, name in enumerate(ordered)}
        self.order = np.concatenate(list(self.by_dtype.values()))
        self.offsets = np.empty_like(self.lengths)
        self.offsets[self.order] = np.cumsum(self.lengths[self.order]) - self.lengths[self.order]


class Arrays:
    """A list of contiguous arrays in this machine's memory.

    Attributes:
        own: whether they are copies that only this list refers to.
        given: whether the tensors are the caller's own.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        addresses: Column | None,
        *,
        own: bool = False,
        given: bool = False,
        made: bool = False,
    ) -> None:
        self.tensors = tensors
        self.own = own
        self.given = given
        self._addresses = addresses
        self._made = made  # whether tensors are made anew whenever one is asked for, over memory that stays

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor], given: bool = False) -> Arrays:
        """Return contiguous tensors on the CPU as a list of arrays.

        Raises:
            RuntimeError: one has no plain memory.
        """
        if len(tensors) > FEW:
            return cls(tuple(tensors), _addresses(tensors), given=given)
        for tensor in tensors:
            tensor.data_ptr()  # raises where there is no plain memory
        return cls(tuple(tensors), None, given=given)

    def at(self, positions: Column) -> Column | None:
        """Return the addresses of the arrays at ``positions``.

        None: the list is short, or one of them has other memory than when it was listed.
        """
        if self._addresses is None:
            return None
        addresses = self._addresses[positions]
        if self._made:
            return addresses
        now = _addresses([self.tensors[position] for position in positions.tolist()])
        return addresses if np.array_equal(addresses, now) else None

    def again(self, layout: Layout) -> Arrays | None:
        """Return the list as it is now, to write to; None if it does not fit any more."""
        return outputs_of(self.tensors, layout)

    def written(self, positions: Column) -> None:
        """Tell autograd that the arrays at ``positions`` are written to, not by torch."""
        if not self._made:
            increment_version([self.tensors[position] for position in positions.tolist()])

    def copied(self, layout: Layout) -> Arrays:
        flat = np.empty(layout.nbytes, np.uint8)
        addresses = _addresses(self.tensors) if self._addresses is None else self._addresses
        collect(addresses[layout.order], layout.lengths[layout.order], flat.data)
        return _parts(flat, layout)


class NumpyOutputs(Arrays):
    """numpy arrays to write into.

    Where they lie is asked for when they are written: until then the caller may have given one other memory
    (``resize``), which holding on to the array does not prevent.
    """

    def __init__(self, arrays: Sequence[np.ndarray[Any, Any]], layout: Layout) -> None:
        super().__init__(_Lazy(lambda position: torch.from_numpy(arrays[position]), len(arrays)), None, made=True)
        self._arrays = arrays
        self._lengths = layout.lengths

    def at(self, positions: Column) -> Column | None:
        """Return the addresses of the arrays at ``positions``; None if one cannot be written any more."""
        arrays = [self._arrays[position] for position in positions.tolist()]
        try:
            addresses = np.fromiter(map(addressof, map(_MEMORY, arrays)), np.int64, len(arrays))
        except (TypeError, ValueError, BufferError):
            return None
        fit = list(map(_NBYTES, arrays)) == self._lengths[positions].tolist()
        return addresses if fit else None

    def again(self, layout: Layout) -> Arrays | None:
        return self if _writable(self._arrays, layout) else None


def tensors_of(values: Arrays | Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    return values.tensors if isinstance(values, Arrays) else values


def values_of(arrays: Sequence[Any], layout: Layout) -> Arrays | None:
    """Return ``arrays`` to read from, if all have the common types and fit ``layout``; many small ones are copied.

    None: not on the fast path; validate fully.
    """
    arrays, kinds = _unwrapped(arrays)
    if layout.many:
        listed = tuple(map(np.asarray, arrays)) if _all_numpy(kinds) else _imported(arrays, kinds)
        if listed is not None and (copies := _joined(listed, layout)) is not None:
            return copies
    fitting = _fitting(arrays, kinds, as_tensor, layout)
    return fitting.copied(layout) if fitting is not None and layout.many else fitting


def outputs_of(arrays: Sequence[Any], layout: Layout) -> Arrays | None:
    arrays, kinds = _unwrapped(arrays)
    if layout.many:
        listed = tuple(arrays) if _all_numpy(kinds) else _imported(arrays, kinds)
        if listed is not None and _writable(listed, layout):
            return NumpyOutputs(listed, layout)
    return _fitting(arrays, kinds, as_output, layout)


def kinds_of(arrays: Sequence[Any]) -> tuple[Column, list[Spec]] | None:
    """Return for each array the index of its spec, and the specs, if all are torch tensors or all are numpy arrays.

    None: not on the fast path; validate fully.
    """
    kinds = set(map(type, arrays))
    shape = torch.Tensor.size if kinds <= _TENSORS else _SHAPE if kinds == {np.ndarray} else None
    if shape is None:
        return None
    numbers: _Numbers = _Numbers()
    try:
        column = np.fromiter(
            map(numbers.__getitem__, zip(map(_DTYPE, arrays), map(shape, arrays), strict=True)), np.int64, len(arrays)
        )
        return column, [Spec(tuple(size), str(dtype).removeprefix("torch.")) for dtype, size in numbers]
    except (UsageError, RuntimeError):  # a nested tensor has no sizes
        return None


def _fitting(
    arrays: Sequence[Any], kinds: set[type], convert: Callable[[Any], torch.Tensor], layout: Layout
) -> Arrays | None:
    given = kinds <= _TENSORS
    if not given:
        if any(issubclass(kind, list | tuple) for kind in kinds):  # several devices
            return None
        try:
            arrays = [array if type(array) in _TENSORS else convert(array) for array in arrays]
        except UsageError:
            return None
        if not _TENSORS.issuperset(map(type, arrays)):
            return None
    tensors: Sequence[torch.Tensor] = arrays
    try:
        sizes = map(torch.Tensor.size, tensors)
        if list(map(_DTYPE, tensors)) != layout.dtypes or not all(map(eq, sizes, layout.shapes)):
            return None
        if not all(map(_ON_CPU, tensors)) or any(map(torch.Tensor.is_neg, tensors)):
            return None
        listed = Arrays.of(tensors, given)
        return listed if all(map(torch.Tensor.is_contiguous, tensors)) else None
    except RuntimeError:  # a layout without plain memory
        return None


def _unwrapped(arrays: Sequence[Any]) -> tuple[Sequence[Any], set[type]]:
    """Return the arrays, taken out of lists if each is alone in one (of one device), and their types."""
    kinds = set(map(type, arrays))
    if kinds <= _LISTS and set(map(len, arrays)) == {1}:
        arrays = [array for (array,) in arrays]
        kinds = set(map(type, arrays))
    return arrays, kinds


def _all_numpy(kinds: set[type]) -> bool:
    return all(issubclass(kind, np.ndarray) for kind in kinds)


def _imported(arrays: Sequence[Any], kinds: set[type]) -> Sequence[np.ndarray[Any, Any]] | None:
    """Return numpy arrays over the memory of arrays that have DLPack; None if one is another, or not on the host.

    They hold on to that memory, so their addresses stay.
    """
    if any(issubclass(kind, np.ndarray | torch.Tensor) or not hasattr(kind, "__dlpack__") for kind in kinds):
        return None
    try:
        # numpy refuses memory of GPUs, but takes what is managed by CUDA, which a GPU may still be writing to.
        cuda = any(hasattr(kind, "__cuda_array_interface__") for kind in kinds)
        if cuda and {device for device, _ in map(_DEVICE, arrays)} != {DLPACK_CPU}:
            return None
        return tuple(map(np.from_dlpack, arrays))
    except Exception:  # any exception of an exporter's, or numpy's, which lacks bfloat16
        return None


def _joined(arrays: Sequence[np.ndarray[Any, Any]], layout: Layout) -> Arrays | None:
    """Return copies of numpy arrays, whatever their strides; None if one is of another shape or dtype."""
    if layout.numpy is None or not all(map(eq, map(_SHAPE, arrays), layout.shapes)):
        return None
    flat = np.empty(layout.nbytes, np.uint8)
    stop = 0
    for name, positions in layout.by_dtype.items():
        of_dtype = arrays if len(layout.by_dtype) == 1 else [arrays[position] for position in positions.tolist()]
        start, stop = stop, stop + int(layout.lengths[positions].sum())
        try:
            np.concatenate(of_dtype, axis=None, out=flat[start:stop].view(name), casting="equiv")
        except TypeError:
            return None
    return _parts(flat, layout)


def _writable(arrays: Sequence[np.ndarray[Any, Any]], layout: Layout) -> bool:
    """Whether numpy arrays fit, and are contiguous, aligned, and not read-only."""
    return (
        list(map(_DTYPE, arrays)) == layout.numpy
        and all(map(eq, map(_SHAPE, arrays), layout.shapes))
        and all(map(_PLAIN, arrays))
        and (not layout.loose or all(map(has_plain_strides, arrays)))
    )


def _parts(flat: np.ndarray[tuple[int], np.dtype[np.uint8]], layout: Layout) -> Arrays:
    """Return arrays that lie in ``flat``."""

    def part(position: int) -> torch.Tensor:
        start = int(layout.offsets[position])
        data = whole[start : start + int(layout.lengths[position])]
        return data.view(layout.dtypes[position]).view(layout.shapes[position])

    whole = torch.from_numpy(flat)
    return Arrays(_Lazy(part, len(layout.shapes)), whole.data_ptr() + layout.offsets, own=True, made=True)


def _addresses(tensors: Iterable[torch.Tensor]) -> Column:
    return np.fromiter(map(torch.Tensor.data_ptr, tensors), np.int64)


class _Numbers(dict[Any, int]):
    """Numbers keys in the order in which they are first looked up."""

    def __missing__(self, key: Any) -> int:
        self[key] = number = len(self)
        return number


class _Lazy(Sequence[T]):
    """A sequence whose items are made when they are asked for."""

    def __init__(self, make: Callable[[int], T], size: int) -> None:
        self._make, self._size = make, size

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, place: int) -> T: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[T]: ...
    def __getitem__(self, place: int | slice) -> T | Sequence[T]:
        if isinstance(place, slice):
            return [self._make(each) for each in range(self._size)[place]]
        return self._make(range(self._size)[place])


Lengths: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.int64]]"

_Ranges: TypeAlias = "tuple[Lengths, Lengths]"


def crossed(
    values: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor],
    owners: Sequence[int] | None = None,
    lengths: Lengths | None = None,
) -> bool:
    """Return whether an output overlaps another output, or another key's input.

    Args:
        outs: the outputs. An output may be exactly its own key's input.
        owners: for each of ``outs`` the position of its value; by default they have the same positions.
        lengths: bytes of each value, and of each of ``outs`` too, if these are contiguous and have the same positions.
    """
    starts, stops = _ranges(outs, lengths)
    order = np.argsort(starts, kind="stable")
    starts, stops = starts[order], stops[order]
    if bool((starts[1:] < stops[:-1]).any()):
        return True
    if values is outs:
        return False
    begins, ends = _ranges(values, lengths)
    first, last = np.searchsorted(stops, begins, "right"), np.searchsorted(starts, ends, "left")
    touched = np.flatnonzero(last > first)
    if bool((last[touched] - first[touched] > 1).any()):
        return True
    outputs = first[touched]  # the one output that overlaps each touched value
    own = order if owners is None else np.asarray(owners)[order]
    return bool((own[outputs] != touched).any() or (starts[outputs] != begins[touched]).any())


def _ranges(tensors: Sequence[torch.Tensor], lengths: Lengths | None) -> _Ranges:
    """Return the address of the first byte of each tensor, and the address after its last."""
    starts = np.fromiter(map(torch.Tensor.data_ptr, tensors), np.int64, len(tensors))
    if lengths is None:
        lengths = np.array([_length(tensor) for tensor in tensors], np.int64)
    return starts, starts + lengths


def _length(tensor: torch.Tensor) -> int:
    if tensor.is_contiguous() or not tensor.numel():
        return tensor.numel() * tensor.itemsize
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.itemsize * (1 + sum((size - 1) * step for size, step in steps))


class Leaving:
    """Arrays on their way to the host: copies from CUDA devices go on while the first arrays are being sent.

    Args:
        values: contiguous tensors; on the CPU they are what they are.
    """

    def __init__(self, values: Arrays | Sequence[torch.Tensor]) -> None:
        self._events: dict[int, torch.cuda.Event] = {}
        self._arrays = values if isinstance(values, Arrays) else Arrays.of(self._begin(values))

    def _begin(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors on the host; copies of those on devices are under way."""
        on_host = list(tensors)
        streams: dict[torch.device, torch.cuda.Stream] = {}
        for position, tensor in enumerate(tensors):
            if not tensor.is_cuda:
                continue
            stream = streams.get(tensor.device)
            if stream is None:
                stream = streams[tensor.device] = torch.cuda.Stream(tensor.device)  # type: ignore[no-untyped-call]
                stream.wait_stream(torch.cuda.current_stream(tensor.device))
            with torch.cuda.stream(stream):
                on_host[position] = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
                on_host[position].copy_(tensor, non_blocking=True)
                tensor.record_stream(stream)
                self._events[position] = stream.record_event()
        return on_host

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """All arrays, of which some may not be complete."""
        return self._arrays.tensors

    def arrived(self, positions: Column) -> Arrays:
        """Return all arrays, of which those at ``positions`` are complete."""
        if self._events:
            for position in positions.tolist():
                event = self._events.get(position)
                if event is not None:
                    event.synchronize()
                    self._events.pop(position, None)  # not before: an exception may have ended the wait
        return self._arrays


def from_host(flat: torch.Tensor, outs: Sequence[torch.Tensor]) -> set[torch.cuda.Stream]:
    """Write ``flat``, a host tensor, into each of ``outs``, which have its size and dtype and any device or strides.

    Returns:
        The CUDA streams on which copies are still under way.
    """
    pinned: torch.Tensor | None = None
    for out in outs:
        if out.is_cuda:
            pinned = flat.pin_memory() if pinned is None else pinned
            out.copy_(pinned.view(out.shape), non_blocking=True)
        else:
            out.copy_(flat.view(out.shape))
    return {torch.cuda.current_stream(out.device) for out in outs if out.is_cuda}
