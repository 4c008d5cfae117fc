"""How values are cut into the chunks in which they travel, and what of a value travels. Pure.

Where a chunk ends depends on names, shapes and dtypes alone, so all workers cut alike. Averages are made element by
element, so a cut changes no result.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch


class ChunkRange(NamedTuple):
    """Elements ``start`` to ``stop`` of the value ``name``, in the order of its indices; ``whole`` if these are all."""

    name: str
    start: int
    stop: int
    whole: bool

    @property
    def key(self) -> str:
        """Its key in the store."""
        return self.name if self.whole else f"{self.name}[{self.start}:{self.stop}]"


def wire_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return what values of ``dtype`` travel as: themselves, but for float16, whose sums could overflow."""
    return torch.float32 if dtype == torch.float16 else dtype


def divide(values: Mapping[str, torch.Tensor], chunk_bytes: int | None) -> list[list[ChunkRange]]:
    """Return the parts of each chunk: together every element once, the last value's first.

    Args:
        values: by name; empty ones are in no chunk.
        chunk_bytes: of a chunk on the wire, at least one element's. All but the last are as full as elements allow; a
            value that does not fit goes on in the next. None makes one chunk of all.
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
    """Return the elements of ``part`` as they travel: flat, contiguous, where possible over the memory of ``value``."""
    return value.detach().reshape(-1)[part.start : part.stop].to(wire_dtype(value.dtype)).contiguous()


def write(value: torch.Tensor, part: ChunkRange, elements: torch.Tensor) -> None:
    """Write ``elements``, of any floating dtype and device, into those of ``part``; they are rounded once."""
    flat = value.detach().reshape(-1)
    flat[part.start : part.stop].copy_(elements)
    if not value.is_contiguous():  # then that was a copy
        value.detach().copy_(flat.view(value.shape))
