"""A saved table as a Parquet file, for tools of data analysis. Needs pyarrow, the extra ``parquet``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from kvstore.dynamo import outside_graphs
from kvstore.errors import UsageError
from kvstore.job.files import replacing
from kvstore.rows.open_table import open_table, whole_pages
from kvstore.rows.slabs import Array

ROW_GROUP = 1 << 16  # rows of which a file is written, and read, at a time at most


@outside_graphs
def export_parquet(directory: str | os.PathLike[str], path: str | os.PathLike[str], state: bool = False) -> int:
    """Write the table in ``directory``, as ``open_table`` reads it, to the Parquet file ``path``.

    A column ``id`` has the ids, and a column ``row`` the rows, in no order. Each row is a list of fixed length: of a
    table of shape ``(rows, n)`` its n elements; of one of shape ``(rows, n, m)``, or of more dimensions, all elements
    of the row one after the other, the last dimension's first: ``numpy.reshape(row, (n, m))`` has them in order. A
    table with a shape has all its rows, also those that no push has changed, which are as they begin.

    Args:
        directory: where ``save_table`` has written.
        path: the file, which is replaced or made whole.
        state: also write what else was saved of each row, a column for each: ``seen``, and the optimizer's states
            as ``state.NAME``. A row that no push has changed has nulls there.

    Returns:
        The number of rows.

    Raises:
        UsageError: pyarrow is not installed, or not one for this numpy.
        CheckpointError: there is no whole table, or it is damaged.
        OSError: the file cannot be written.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as exc:
        raise UsageError(f"export_parquet needs pyarrow: pip install 'torch-kvstore[parquet]' ({exc})") from None
    opened = open_table(directory, verify=True)
    parts = opened.manifest.parts if state else {}
    described = {"id": ("int64", 0), "row": (opened.table.dtype, opened.table.width), **parts}
    types = {name: _type(pyarrow, dtype, width) for name, (dtype, width) in described.items()}
    schema = pyarrow.schema(list(types.items()))
    count = 0
    with replacing(Path(path)) as draft, pyarrow.parquet.ParquetWriter(draft, schema) as writer:
        for page in whole_pages(opened.table, opened.pages(ROW_GROUP, state), ROW_GROUP):
            columns = {"id": page.ids, "row": page.rows, **page.parts}
            arrays = [_array(pyarrow, columns.get(name), kind, len(page.ids)) for name, kind in types.items()]
            writer.write_batch(pyarrow.record_batch(arrays, schema=schema))
            count += len(page.ids)
    return count


def _type(pyarrow: Any, dtype: str, width: int) -> Any:
    """Return the type of a column: numbers, or lists of ``width`` numbers."""
    number = pyarrow.from_numpy_dtype(dtype)
    return pyarrow.list_(number, width) if width else number


def _array(pyarrow: Any, values: Array | None, kind: Any, count: int) -> Any:
    if values is None:  # a row of an earlier save, with states of another kind
        return pyarrow.nulls(count, kind)
    flat = pyarrow.array(values.reshape(-1))
    return flat if values.ndim == 1 else pyarrow.FixedSizeListArray.from_arrays(flat, type=kind)
