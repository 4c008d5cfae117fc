"""What a worker pushes to one table: checked, and summed over duplicates and devices before anything is sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvstore.errors import Mismatch, NotFinite, UsageError
from kvstore.rows.ids import Ids, require_ids
from kvstore.rows.row_sparse import RowSparse, is_row_sparse
from kvstore.rows.sums import Rows, coalesce, has_nan, sum_rows
from kvstore.table import Table
from kvstore.values import all_finite


def contribution(what: str, table: Table, values: Sequence[Any], finite: bool = False) -> tuple[Ids, Rows]:
    """Return the ids that ``values`` have, rising, and for each the sum of its rows.

    The rows of one id are summed in the order of their positions, then over the values, in their order.

    Args:
        what: the push, with its key and worker, for messages.
        table: what is pushed to.
        values: one for each device: a ``RowSparse``, or a ``torch.sparse_coo`` tensor.
        finite: refuse rows with infinite elements, too; those with NaN are refused always, for one would spoil its row
            for good.

    Returns:
        Ids, and rows of shape (ids, width) on the CPU; perhaps over the caller's memory.

    Raises:
        Mismatch: a value is not row-sparse, or its rows are not those of the table.
        NotFinite: see ``finite``. The message has the first such row, and its position.
        UsageError: an id cannot be in the table. The message has the first such, and its position.
    """
    parts = [_part(what, table, value, finite) for value in values]
    return parts[0] if len(parts) == 1 else sum_rows(parts)


def row_sparse(what: str, value: Any, table: Table) -> RowSparse:
    """Return ``value`` as a ``RowSparse`` whose rows are of ``table``'s shape and dtype; its ids may be any.

    Raises:
        Mismatch, UsageError: it cannot be one.
    """
    if not is_row_sparse(value):
        raise Mismatch(
            f"{what} is of {table}, which takes a RowSparse or a torch.sparse_coo tensor, not {type(value).__name__}"
        )
    try:
        given = RowSparse.of(value)
    except UsageError as exc:
        raise UsageError(f"{what}: {exc}") from None
    if given.row != table.row or given.rows.dtype != getattr(torch, table.dtype):
        raise Mismatch(f"{what} is of {table}, but this call has {given!r}")
    if given.shape is not None and not table.grows and given.shape[0] != table.rows:
        raise Mismatch(f"{what} is of {table}, but this call has {given!r}")
    if given.ids.dim() != 1 or given.ids.shape[0] != given.rows.shape[0]:
        raise UsageError(f"{what}: {len(given.ids)} ids need as many rows, not {len(given.rows)}")
    return given


def _part(what: str, table: Table, value: Any, finite: bool) -> tuple[Ids, Rows]:
    given = row_sparse(what, value, table)
    ids = require_ids(what, given.ids, table)
    rows = given.rows.detach()
    if not rows.is_cpu:
        rows = rows.cpu()
    rows = rows.reshape(len(ids), table.width).contiguous()
    if finite or has_nan(rows.numpy()):
        _require_finite(what, ids, rows, finite)
    return coalesce(ids, rows.numpy())


def _require_finite(what: str, ids: Ids, rows: torch.Tensor, finite: bool) -> None:
    if finite and all_finite(rows):
        return
    wrong = ~torch.isfinite(rows) if finite else rows.isnan()
    position = int(torch.nonzero(wrong.any(1))[0])
    elements = "NaN or infinite elements" if finite else "elements that are NaN"
    raise NotFinite(
        f"{what}: the row of id {int(ids[position])} at position {position} has {elements}; nothing has been updated"
    )
