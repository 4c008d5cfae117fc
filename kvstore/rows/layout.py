"""Rows as bytes on the wire, for each codec of tables. Pure.

    none        the elements, in the machine's byte order
    fp16, bf16  the elements in two bytes each
    int8        a float32 scale for each row, padded to 16 bytes; then a signed byte for each element

Each part is padded to 16 bytes, so that the parts of several tables lie back to back in one buffer. A finite element
beyond the largest of fp16 or bf16 is clipped to it. With ``int8`` an element is the nearest multiple of the scale,
which is the greatest magnitude in its row divided by 127. A row with an infinite or NaN element comes out as NaN.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kvstore import wire
from kvstore.errors import WireError
from kvstore.rows.halves import array_dtype, narrowed, tensor_of, widened
from kvstore.rows.slabs import Array
from kvstore.spec import ITEMSIZE, sum_dtype
from kvstore.wire.coding import Buffer, padded

ALIGNED = 16
_HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def aligned(nbytes: int) -> int:
    """Return ``nbytes`` with the padding after it."""
    return padded(nbytes, ALIGNED)


def part_bytes(count: int, width: int, dtype: str, codec: str) -> int:
    """Return how many bytes ``count`` rows of ``width`` elements have, with the padding after them."""
    if codec == "int8":
        return aligned(count * 4) + aligned(count * width)
    return aligned(count * width * (ITEMSIZE[dtype] if codec == "none" else 2))


def write_rows(rows: Array, codec: str, into: memoryview) -> None:
    """Encode ``rows`` into the first bytes of ``into``.

    Args:
        rows: of shape (count, width); they are not changed.
        into: writable, at least ``part_bytes`` long. The padding is left as it is.
    """
    count, width = rows.shape
    if not rows.size:
        return
    if codec == "none":
        np.frombuffer(into, rows.dtype, rows.size).reshape(rows.shape)[:] = rows
        return
    rows = widened(rows)
    if codec in _HALVES:
        half = torch.frombuffer(into, dtype=_HALVES[codec], count=rows.size).view(count, width)
        values = tensor_of(rows)
        # Rounded to half, a large element would become infinite, and stay so in the float32 row that it is added to:
        # the table has the masters, halves are only on the way.
        top = torch.finfo(half.dtype).max
        low, high = torch.aminmax(values)
        if not -top <= low <= high <= top:
            values = torch.where(values.isinf(), values, values.clamp(-top, top))
        half.copy_(values)
    else:
        scales = np.frombuffer(into, np.float32, count)
        small = np.frombuffer(into, np.int8, rows.size, aligned(count * 4)).reshape(count, width)
        _quantize(rows, scales, small)


def _quantize(rows: Array, scales: Array, small: Array) -> None:
    with np.errstate(all="ignore"):
        greatest = np.maximum(rows.max(axis=1), -rows.min(axis=1))
        np.divide(greatest, 127, out=scales, casting="same_kind")
        # A scale that is zero, or so small that it is not a normal number, cannot be divided by.
        tiny = scales < np.finfo(np.float32).tiny
        scales[tiny] = 0
        factors = np.divide(1, scales, out=np.zeros_like(scales), where=~tiny)
        scaled = rows * factors[:, None]
        np.rint(scaled, out=scaled)
        broken = ~np.isfinite(greatest)
        if broken.any():
            scales[broken] = np.nan
            scaled[broken] = 0
        np.clip(scaled, -127, 127, out=scaled)
    small[:] = scaled


def read_rows(part: Buffer, count: int, width: int, dtype: str, codec: str) -> Array:
    """Return the ``count`` rows of ``width`` elements that ``part`` encodes: with ``none`` a view of it, else new.

    Raises:
        WireError: it has not the length of so many rows.
    """
    view = memoryview(part).cast("B")
    if len(view) != part_bytes(count, width, dtype, codec):
        wanted = part_bytes(count, width, dtype, codec)
        raise WireError(f"{count} rows of {width} {dtype} as {codec} are {wanted} bytes, not {len(view)}")
    if not count * width:
        return np.empty((count, width), array_dtype(dtype))
    if codec == "none":
        return np.frombuffer(view, array_dtype(dtype), count * width).reshape(count, width)
    rows = np.empty((count, width), sum_dtype(dtype))
    if codec in _HALVES:
        raw = np.frombuffer(view, np.int16, count * width)
        half = tensor_of(raw).view(_HALVES[codec])
        torch.from_numpy(rows).copy_(half.view(count, width))
    else:
        scales = np.frombuffer(view, np.float32, count)
        small = np.frombuffer(view, np.int8, count * width, aligned(count * 4)).reshape(count, width)
        with np.errstate(all="ignore"):
            np.multiply(small, scales[:, None], out=rows, casting="unsafe")
    return narrowed(rows, dtype)


def array_of(buffer: wire.Buffer, count: int, columns: int, dtype: str, what: str) -> Any:
    """Return a view of ``buffer``, only to be read, of shape (count, columns); (count,) if ``columns`` is 0.

    Raises:
        WireError: it has another length; the message names ``what``.
    """
    view = memoryview(buffer).cast("B").toreadonly()
    nbytes = count * (columns or 1) * ITEMSIZE[dtype]
    if len(view) != nbytes:
        raise WireError(f"{count} {what} are {nbytes} bytes, not {len(view)}")
    shape = (count, columns) if columns else (count,)
    kind = array_dtype(dtype)
    return np.frombuffer(view, kind).reshape(shape) if nbytes else np.empty(shape, kind)


def integers(buffer: wire.Buffer) -> Any:
    """Return a view of ``buffer``, only to be read, as numbers of int64.

    Raises:
        WireError: its length does not fit.
    """
    return array_of(buffer, len(memoryview(buffer).cast("B")) // 8, 0, "int64", "numbers")


def bytes_of(array: Any) -> memoryview:
    return memoryview(array).cast("B") if array.size else memoryview(b"")
