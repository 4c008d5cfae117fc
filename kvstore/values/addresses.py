"""Many small ranges of memory, given by their addresses: read or written in one step of numpy's.

A call for each of thousands of ranges takes ten times as long as copying their bytes. numpy's indexing moves elements
of 1 to 16 bytes wherever they are. The array that is indexed spans all memory from the first range to the last; only
the ranges themselves are read or written.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from kvstore import wire

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
