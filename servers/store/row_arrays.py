"""Arrays of rows, and of what belongs to each row, in the buffers of messages."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvstore import wire
from kvstore.errors import WireError
from kvstore.rows.ids import Ids
from kvstore.rows.sums import RowBatch, Rows
from kvstore.spec import ITEMSIZE
from kvstore.table import Table


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
    """Return the bytes of a contiguous array."""
    return memoryview(array).cast("B") if array.size else memoryview(b"")


def recorded_sums(
    message: wire.ClosedRowRounds, tables: Sequence[Table]
) -> tuple[list[tuple[Ids, Rows]], RowBatch | None]:
    """Return the sums in a record for each of ``tables``, and all of them if they are one array.

    Raises:
        ValueError: rows of different tables in one array.
        WireError: the buffers do not fit.
    """
    sizes = [count * table.row_bytes for count, table in zip(message.counts, tables, strict=True)]
    if message.together:
        if len({(table.width, table.dtype) for table in tables}) != 1:
            raise ValueError("rows of tables of several widths or dtypes in one array")
        sizes = [sum(sizes)]
    ids_buffer, *buffers = wire.unpack_arrays(message.buffers, [sum(message.counts) * ITEMSIZE["int64"], *sizes])
    ids = _array(ids_buffer, "int64")
    starts = list(itertools.accumulate(message.counts, initial=0))
    if message.together:
        batch = RowBatch(ids, _array(buffers[0], tables[0].dtype).reshape(-1, tables[0].width), starts)
        return batch.of_each(), batch
    rows = [_array(buffer, table.dtype).reshape(-1, table.width) for buffer, table in zip(buffers, tables, strict=True)]
    return list(zip((ids[start:stop] for start, stop in itertools.pairwise(starts)), rows, strict=True)), None


def _array(buffer: memoryview, dtype: str) -> Rows:
    return np.frombuffer(buffer, dtype) if len(buffer) else np.empty(0, dtype)
