"""Values cut into chunks of bounded size, which are sent one by one. Pure.

The cuts depend only on names, shapes and dtypes, so all workers cut alike. Averages are made element by element, so
cuts do not change results.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from workers.common.tensors import overwrite


class ChunkRange(NamedTuple):
    """Elements ``start`` to ``stop`` of the value ``name``, in index order; ``whole`` if these are all elements."""

    name: str
    start: int
    stop: int
    whole: bool

    @property
    def key(self) -> str:
        return self.name if self.whole else f"{self.name}[{self.start}:{self.stop}]"


def wire_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of ``dtype`` are sent: float32 for float16, whose sums could overflow."""
    return torch.float32 if dtype == torch.float16 else dtype


def divide(values: Mapping[str, torch.Tensor], chunk_bytes: int | None) -> list[list[ChunkRange]]:
    """Return the ranges of each chunk. Together they have every element once, the last value's first.

    All chunks but the last are as full as elements allow. A value that does not fit continues in the next chunk. With
    None for ``chunk_bytes``, one chunk has everything.
    """
    chunks: list[list[ChunkRange]] = [[]]
    most = sum(tensor.numel() * 8 for tensor in values.values()) if chunk_bytes is None else chunk_bytes
    room = most
    for name, tensor in reversed(list(values.items())):
        itemsize = wire_dtype(tensor.dtype).itemsize
        start, size = 0, tensor.numel()
        while start < size:
            stop = min(size, start + room // itemsize)
            if stop == start:
                chunks.append([])
                room = most
                continue
            chunks[-1].append(ChunkRange(name, start, stop, stop - start == size))
            room -= (stop - start) * itemsize
            start = stop
    return [chunk for chunk in chunks if chunk]


def read(value: torch.Tensor, part: ChunkRange) -> torch.Tensor:
    """The elements of ``part`` as they are sent: flat, contiguous, over the memory of ``value`` if possible."""
    return value.detach().reshape(-1)[part.start : part.stop].to(wire_dtype(value.dtype)).contiguous()


def write(value: torch.Tensor, part: ChunkRange, elements: torch.Tensor) -> None:
    """Write ``elements``, of any floating dtype and device, to the range ``part``. They are rounded once."""
    flat = value.detach().contiguous().view(-1)
    flat[part.start : part.stop].copy_(elements)
    if not value.is_contiguous():  # then flat is a copy
        overwrite(value, flat.view(value.shape))
