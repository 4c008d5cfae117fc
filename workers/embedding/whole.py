"""Whole tables as tensors: for ``state_dict``, chunk by chunk, so that no second copy is in memory at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from kvstore import KVStore, RowSparse, UsageError
from kvstore.table import Table
from kvstore.values import as_dtype

CHUNK_BYTES = 8 << 20

_left_out: ContextVar[bool] = ContextVar("tables are left out", default=False)


@contextmanager
def tables_left_out() -> Iterator[None]:
    """Let ``state_dict`` leave out tables in this block: for names and shapes of the rest."""
    token = _left_out.set(True)
    try:
        yield
    finally:
        _left_out.reset(token)


def table_state(store: KVStore, key: Any, table: Table, padding: int | None) -> dict[str, torch.Tensor]:
    """Return a table as tensors by name: ``weight``; of one that grows ``ids``, rising, and ``rows``.

    The padding's row is zeros. Within ``tables_left_out`` there are none.
    """
    if _left_out.get():
        return {}
    if table.rows is None:
        parts = list(store.table_rows(key))
        nothing = RowSparse.zeros((0, *table.row), table.dtype)
        ids = torch.cat([part.ids for part in parts] or [nothing.ids])
        rows = torch.cat([part.rows for part in parts] or [nothing.rows])
        order = torch.argsort(ids)
        return {"ids": ids[order], "rows": rows[order]}
    weight = torch.empty((table.rows, *table.row), dtype=as_dtype(table.dtype), device="cpu")
    for chunk in _chunks(table, table.rows):
        ids = torch.arange(chunk.start, chunk.stop, dtype=torch.int64, device="cpu")
        store.row_sparse_pull(key, weight[chunk.start : chunk.stop], row_ids=ids)
    if padding is not None:
        weight[padding] = 0
    return {"weight": weight}


def load_table(
    store: KVStore, key: Any, table: Table, padding: int | None, state: Mapping[str, Any]
) -> tuple[list[str], list[str]]:
    """Give a table rank 0's rows. Every worker calls this, and returns when they are there.

    Args:
        store, key, table: what is loaded.
        padding: the id without a row.
        state: what ``table_state`` returned, or an ``nn.Embedding`` has as its state.

    Returns:
        The names that are missing, and those that are not known. If any is missing, nothing is loaded.

    Raises:
        UsageError: a tensor has another shape, or the padding's row is not zeros.
    """
    expected = ["ids", "rows"] if table.rows is None else ["weight"]
    missing = [name for name in expected if name not in state]
    unexpected = [name for name in state if name not in expected]
    if missing:
        return missing, unexpected
    given = state["rows" if table.rows is None else "weight"].detach()
    ids = state["ids"] if table.rows is None else None
    count = len(ids) if ids is not None else table.rows
    if tuple(given.shape) != (count, *table.row):
        raise UsageError(f"its rows have the shape {tuple(given.shape)}, but should have {(count, *table.row)}")
    if padding is not None and ids is None and bool(given[padding].any()):
        raise UsageError(f"row {padding} is that of the padding, which is zeros here, but not in what is loaded")
    if store.rank == 0:
        for chunk in _chunks(table, len(given)):
            part = slice(chunk.start, chunk.stop)
            numbers = (
                torch.arange(chunk.start, chunk.stop, dtype=torch.int64, device="cpu") if ids is None else ids[part]
            )
            store.put_rows(key, RowSparse(numbers, given[part].to(as_dtype(table.dtype)).cpu()))
    store.barrier()
    return [], unexpected


def _chunks(table: Table, count: int) -> Iterator[range]:
    size = max(1, CHUNK_BYTES // table.row_bytes)
    for start in range(0, count, size):
        yield range(start, min(start + size, count))
