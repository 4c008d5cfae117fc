"""Rows that replace others: a table's first rows, and those that are put into it later."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvstore.errors import UsageError
from kvstore.rows.contribution import row_sparse
from kvstore.rows.ids import Ids, require_ids
from kvstore.rows.row_sparse import RowSparse, is_row_sparse
from kvstore.rows.sums import Rows, coalesce
from kvstore.spec import Key
from kvstore.table import Table


def is_table(value: Any) -> bool:
    """Whether ``init`` makes a table of ``value``, not an array."""
    return isinstance(value, Table) or is_row_sparse(value)


def name_of(key: Key, value: Any) -> Key:
    """Return the name by which users know the table that ``init`` makes of ``value`` as ``key``."""
    parameter: Key | None = getattr(value, "parameter", None)
    return key if parameter is None else parameter


def first_rows(what: str, value: Any) -> tuple[Table, tuple[Ids, Rows] | None]:
    """Return the table that ``init`` makes of ``value``, and the rows that it is to begin with.

    Args:
        what: the call, with its key and worker, for messages.
        value: a ``Table``, or a row-sparse value with a shape, whose table has zeros beside these rows.

    Raises:
        UsageError: the value has no shape, an id that is not in it, or a dtype that no table has.
    """
    if isinstance(value, Table):
        return value, None
    try:
        given = RowSparse.of(value)
        if given.shape is None:
            raise UsageError("a RowSparse has no shape; pass RowSparse(ids, rows, shape), or a Table that grows")
        table = Table(shape=given.shape, dtype=given.rows.dtype, parameter=getattr(given, "parameter", None))
    except UsageError as exc:
        raise UsageError(f"{what}: {exc}") from None
    return table, coalesce(*_parts(what, given, table))


def given_rows(what: str, table: Table, value: Any) -> tuple[Ids, Rows]:
    """Return the ids of ``value``, rising, and its rows, which are to replace those of ``table``.

    Args:
        what: the call, with its key and worker, for messages.
        table: the table.
        value: a row-sparse value.

    Raises:
        Mismatch: its rows are not those of the table.
        UsageError: an id cannot be in the table, or comes twice.
    """
    ids, rows = _parts(what, row_sparse(what, value, table), table)
    unique, sums = coalesce(ids, rows)
    if len(unique) < len(ids):
        ordered = np.sort(ids)
        twice = int(ordered[1:][ordered[1:] == ordered[:-1]][0])
        raise UsageError(f"{what}: id {twice} comes twice; pass one row for each id")
    return unique, sums


def _parts(what: str, given: RowSparse, table: Table) -> tuple[Ids, Rows]:
    ids = require_ids(f"{what}: ids", given.ids, table)
    return ids, given.rows.detach().cpu().reshape(len(ids), table.width).contiguous().numpy()
