"""Rows of half precision as arrays of numpy: float16 as it is, and the bits of bfloat16, which numpy lacks, as int16.

Rows are kept, pulled and saved in the dtype of their table. What is summed is float32 (``kvstore.spec.sum_dtype``). No
table has integers, so the dtype of an array says what its numbers are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kvstore.rows.slabs import Array

_BITS = np.dtype(np.int16)
_HALF = np.dtype(np.float16)


def array_dtype(dtype: str) -> np.dtype[Any]:
    """Return the dtype of numpy that has numbers of ``dtype``."""
    return _BITS if dtype == "bfloat16" else np.dtype(dtype)


def tensor_of(array: Array) -> torch.Tensor:
    """Return ``array``, or a copy of one that may only be read, as a tensor: torch would warn of the array itself."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def tensor_of_rows(rows: Array) -> torch.Tensor:
    """Return ``rows`` as a tensor over their memory."""
    return _numbers(torch.from_numpy(rows))


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.bfloat16) if tensor.dtype is torch.int16 else tensor


def array_of_rows(rows: torch.Tensor) -> Array:
    """Return ``rows``, on the CPU, as an array over their memory."""
    return rows.view(torch.int16).numpy() if rows.dtype is torch.bfloat16 else rows.numpy()


def widened(rows: Array) -> Array:
    """Return a copy of rows of half precision as float32; other rows as they are."""
    if rows.dtype != _HALF and rows.dtype != _BITS:
        return rows
    wide = np.empty(rows.shape, np.float32)
    torch.from_numpy(wide).copy_(_numbers(tensor_of(rows)))
    return wide


def narrowed(rows: Array, dtype: str) -> Array:
    """Return ``rows`` as a table of ``dtype`` has them: rounded copies, unless they are of this dtype."""
    if rows.dtype == array_dtype(dtype):
        return rows
    narrow = np.empty(rows.shape, array_dtype(dtype))
    narrow_into(rows, narrow)
    return narrow


def narrow_into(rows: Array, out: Array) -> None:
    """Write ``rows``, rounded, to ``out``."""
    tensor_of_rows(out).copy_(tensor_of(rows))
