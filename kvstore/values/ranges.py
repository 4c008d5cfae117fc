"""One payload in several buffers: ranges that together hold its elements, cut and summed where they lie."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from kvstore import wire
from kvstore.errors import WireError
from kvstore.spec import ITEMSIZE
from kvstore.values.any_arrays import from_buffer

_HALVES = (torch.float16, torch.bfloat16)


def sum_in_order(
    tensors: Sequence[torch.Tensor], *, out: torch.Tensor | None = None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return the sum of ``tensors``, added from first to last, on the device of the first; none of them changes.

    Half-precision values are summed in float32, and rounded at most once.

    Args:
        tensors: one or more of one shape and dtype. Among those of half precision there may be float32 ones, which are
            sums themselves.
        out: where to put the sum, of the dtype that the sum is to have. By default the sum is a new tensor; a single
            tensor is returned as it is if it has the dtype.
        dtype: of the sum, without ``out``; by default that of the first.
    """
    first, *rest = tensors
    dtype = out.dtype if out is not None else dtype or first.dtype
    if not rest:
        return first.to(dtype) if out is None else out.copy_(first)
    device = first.device
    wide = summed_in(dtype)
    room = out if dtype == wide else None
    if first.dtype == wide and rest[0].dtype == wide:
        total = torch.add(first, _on(rest[0], device), out=room)  # one pass less than to copy the first
        rest = rest[1:]
    else:  # torch.add would add two halves in half precision, whatever the dtype of its out
        total = first.to(wide, copy=True) if room is None else room.copy_(first)
    for tensor in rest:
        total.add_(_on(tensor, device))
    if out is None:
        return total.to(dtype)
    return out if total is out else out.copy_(total)


def reduce_to(tensors: Sequence[torch.Tensor], device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return the sum of ``tensors``, which may be on several devices, on ``device``; see ``sum_in_order``."""
    return sum_in_order([tensor.to(device, non_blocking=device.type == "cuda") for tensor in tensors], dtype=dtype)


def summed_in(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of ``dtype`` are summed; see ``kvstore.spec.sum_dtype``."""
    return torch.float32 if dtype in _HALVES else dtype


def _on(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor if tensor.device == device else tensor.to(device, non_blocking=True)


class PayloadRange(Protocol):
    """Elements ``start`` to ``stop`` of a payload, plain or encoded."""

    @property
    def start(self) -> int: ...

    @property
    def stop(self) -> int: ...

    @property
    def values(self) -> torch.Tensor:
        """The elements, flat: views of the payload, or new if they are encoded."""
        ...

    def cut(self, start: int, stop: int) -> PayloadRange:
        """Return the elements that are also between ``start`` and ``stop``, counted from ``start``."""
        ...

    def write(self, out: torch.Tensor, add: bool) -> None:
        """Write the elements into ``out``, or add them to what is there."""
        ...


class TensorRange(NamedTuple):
    """Elements of a payload from ``start`` on: a flat tensor over one of its buffers."""

    start: int
    values: torch.Tensor

    @property
    def stop(self) -> int:
        return self.start + self.values.numel()

    def cut(self, start: int, stop: int) -> TensorRange:
        return TensorRange(max(self.start, start) - start, self.values[max(0, start - self.start) : stop - self.start])

    def write(self, out: torch.Tensor, add: bool) -> None:
        if add:
            out.add_(self.values)
        else:
            out.copy_(self.values)


def ranges_of(buffers: Sequence[wire.Buffer], dtype: str, size: int) -> list[TensorRange]:
    """Return the ``size`` elements that ``buffers`` hold together.

    Raises:
        WireError: they hold more or fewer, or one ends within an element.
    """
    itemsize, ranges, start = ITEMSIZE[dtype], [], 0
    if size and len(buffers) == 1 and memoryview(buffers[0]).nbytes == size * itemsize:  # the usual case
        return [TensorRange(0, from_buffer(buffers[0], dtype))]
    for buffer in buffers:
        length, rest = divmod(memoryview(buffer).nbytes, itemsize)
        if rest:
            raise WireError(f"a buffer that ends within an element of {dtype}")
        if length:
            ranges.append(TensorRange(start, from_buffer(buffer, dtype)))
            start += length
    if start != size:
        raise WireError(f"a payload of {start} elements where {size} belong")
    return ranges


def cut(payload: Sequence[PayloadRange], start: int, stop: int) -> list[PayloadRange]:
    """Return elements ``start`` to ``stop`` of ``payload``, counted from 0 again."""
    if len(payload) == 1 and start == 0 and stop == payload[0].stop:
        return [payload[0]]
    ranges: list[PayloadRange] = []
    for each in payload[bisect_right(payload, start, key=_stop) :]:
        if each.start >= stop:
            break
        ranges.append(each.cut(start, stop))
    return ranges


def sum_ranges(payloads: Sequence[Sequence[PayloadRange]], out: torch.Tensor) -> None:
    """Write the sum of ``payloads``, added from first to last, into ``out``, which they all have the size of."""
    if max(map(len, payloads)) == 1 and out.numel():  # the usual case: each is in one piece
        _sum([each for (each,) in payloads], out)
        return
    starts = [each.start for each in payloads[0]]
    if all([each.start for each in payload] == starts for payload in payloads[1:]):
        for same in zip(*payloads, strict=True):
            _sum(same, out[same[0].start : same[0].stop])
        return
    edges = sorted({each.start for payload in payloads for each in payload} | {out.numel()})
    for start, stop in itertools.pairwise(edges):
        sum_in_order([cut(payload, start, stop)[0].values for payload in payloads], out=out[start:stop])


def _sum(ranges: Sequence[PayloadRange], out: torch.Tensor) -> None:
    if set(map(type, ranges)) == _TENSORS:
        sum_in_order([each.values for each in ranges], out=out)  # in one pass less
        return
    for number, each in enumerate(ranges):
        each.write(out, number > 0)


_TENSORS = {TensorRange}


def _stop(each: PayloadRange) -> int:
    return each.stop
