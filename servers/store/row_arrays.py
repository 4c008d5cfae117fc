"""Arrays of rows, and of what belongs to each row, in the buffers of messages."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvstore import wire
from kvstore.errors import WireError
from kvstore.spec import ITEMSIZE


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
    return np.frombuffer(view, dtype).reshape(shape) if nbytes else np.empty(shape, dtype)


def integers(buffer: wire.Buffer) -> Any:
    """Return a view of ``buffer``, only to be read, as numbers of int64.

    Raises:
        WireError: its length does not fit.
    """
    return array_of(buffer, len(memoryview(buffer).cast("B")) // 8, 0, "int64", "numbers")


def bytes_of(array: Any) -> memoryview:
    return memoryview(array).cast("B") if array.size else memoryview(b"")
