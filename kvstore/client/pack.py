"""The caller's arrays into memory that can be sent. Arrays made by ``empty`` are in such memory already."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import torch

from kvstore import wire
from kvstore.client.plans import Parcel, views_of
from kvstore.spec import HALVES, sum_dtype
from kvstore.transport.memory import SMALL, Memory, ScatteredFrame
from kvstore.values import Leaving, collect, from_buffer, to_buffer, without_grad

MOST_VIEWS = 1 << 10  # frames of a message; more of them are cheaper to copy than to send, and a message has a limit
PART = 4 << 10  # bytes; what has smaller parts on average is cheaper to copy than to send from where it lies


class Contents(NamedTuple):
    """What a message carries, and how it is encoded, or is to be; see ``Push``. ``loan``: see ``PushLent``."""

    buffers: list[wire.Buffer]
    codec: wire.CodecDescription = None
    lengths: Sequence[int] = ()
    segment_counts: Sequence[int] = ()
    encode: wire.CodecDescription = None
    in_float32: bool = False
    loan: int | None = None


# Returns what one message of a push carries: the values of a parcel. If the second argument is True, the buffers may be
# ``ScatteredFrame``, of arrays that stay as they are until the message has left.
Load: TypeAlias = Callable[[Parcel, bool], Contents]


class Packer:
    """Makes the payloads of one store's messages.

    Args:
        memory: where they are built.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._made: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # numpy arrays by address

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        size = math.prod(shape)
        if not size:
            return torch.empty(shape, dtype=dtype, device="cpu")
        buffer = self._memory.allocate(size * dtype.itemsize)
        tensor = torch.frombuffer(buffer, dtype=dtype)
        self._made[tensor.data_ptr()] = buffer.obj
        return tensor.view(shape)

    def plain(self, values: Leaving) -> Load:
        """Return what a push carries of values that go as they are. They are read when a message is made."""

        def pack(parcel: Parcel, gather: bool) -> Contents:
            return Contents(self.pack(parcel, values, gather), in_float32=is_sum(parcel, values.tensors))

        return pack

    def pack(self, parcel: Parcel, values: Leaving, gather: bool = False) -> list[wire.Buffer]:
        """Return what ``parcel`` carries of ``values``, as a copy: later changes of the arrays are not seen.

        No copy is made if all of its arrays are from ``empty``, or when ``gather`` is set and the ranges are large.
        """
        if not parcel.nbytes:
            return []
        arrays = values.arrived(parcel.positions)
        if is_sum(parcel, arrays.tensors):
            buffer = self._memory.allocate(parcel.sum_bytes)
            parts = views_of(parcel, arrays.tensors)
            without_grad(torch.cat, parts, out=from_buffer(buffer, sum_dtype(parcel.dtype)))
            return [buffer]
        if parcel.many and (addresses := arrays.at(parcel.positions)) is not None:
            buffer = self._buffer(parcel)
            collect(addresses + parcel.offsets, parcel.lengths, buffer)
            return [buffer]
        parts = views_of(parcel, arrays.tensors)
        if self._made:
            views = self._views(parts)
            if views is not None:
                return views
        if gather and parcel.nbytes >= PART * len(parts):
            return [cast("wire.Buffer", ScatteredFrame(map(to_buffer, parts)))]  # at the other end it is one
        buffer = self._buffer(parcel)
        if len(parts) == 1 and parcel.nbytes < SMALL:
            from_buffer(buffer, parcel.dtype).copy_(parts[0].detach())
        else:
            without_grad(torch.cat, parts, out=from_buffer(buffer, parcel.dtype))
        return [buffer]

    def _buffer(self, parcel: Parcel) -> memoryview:
        small = parcel.nbytes < SMALL
        return memoryview(bytearray(parcel.nbytes)) if small else self._memory.allocate(parcel.nbytes)

    def _views(self, parts: Sequence[torch.Tensor]) -> list[wire.Buffer] | None:
        """Return ``parts`` in place, adjacent ones merged. None: some are not from ``empty``, or they are too many."""
        ranges: list[tuple[int, int, int]] = []  # the address of the memory, start and stop in it
        for part in parts:
            base = part.untyped_storage().data_ptr()
            if base not in self._made:
                return None
            start = part.data_ptr() - base
            stop = start + part.numel() * part.itemsize
            if ranges and ranges[-1][0] == base and ranges[-1][2] == start:
                start = ranges.pop()[1]
            ranges.append((base, start, stop))
        if len(ranges) > MOST_VIEWS:
            return None
        return [self._made[base][start:stop].data for base, start, stop in ranges]


def is_sum(parcel: Parcel, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether some of a parcel's arrays are sums over devices, which are not rounded to its half precision yet.

    They go as they are: the servers round what they make of them.
    """
    return parcel.dtype in HALVES and any(
        tensors[position].dtype == torch.float32 for position in parcel.positions.tolist()
    )
