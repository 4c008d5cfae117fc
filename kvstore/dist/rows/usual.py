"""What calls usually have of tables: of each one value and one out, and ids that rise. All are checked together.

A call may have many tables, and checking them one by one is what its worker then spends most of its time with. Whatever
is unusual, or wrong, is left to the checks of each table, which know what to say. Pure.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from kvstore.dist.rows.blocks import RowBlock, block_of
from kvstore.dist.rows.plan import RowPlan
from kvstore.rows.ids import Ids
from kvstore.rows.joint_ids import all_rise
from kvstore.rows.row_sparse import RowSparse
from kvstore.rows.sums import Positions, Rows, has_nan
from kvstore.store.arguments import RowRequest


class UsualRows(NamedTuple):
    """Rows of several tables, to be read or to be written.

    Attributes:
        ids: of each table; they rise, and can be in the table.
        whole: those of all tables, one after the other.
        rows: of each table, of shape (n, width), contiguous.
        block: the array that has all of them, if they lie in one.
    """

    ids: list[Ids]
    whole: Ids
    rows: list[Rows]
    block: RowBlock | None


def usual_values(plan: RowPlan, values: Sequence[Sequence[Any]]) -> UsualRows | None:
    """Return what is pushed to each table of ``plan``; None unless each has one ``RowSparse`` that is all right."""
    ids: list[Ids] = []
    rows: list[torch.Tensor] = []
    for table, dtype, shape, given in zip(plan.tables, plan.dtypes, plan.shapes, values, strict=True):
        value = given[0]
        if len(given) > 1 or type(value) is not RowSparse or value.shape not in (None, shape):
            return None
        numbers, its_rows = value.ids, value.rows
        if not (_plain(numbers, torch.int64, 1) and _plain(its_rows, dtype, len(table.row) + 1)):
            return None
        if its_rows.shape != (len(numbers), *table.row):
            return None
        ids.append(numbers.numpy())
        rows.append(its_rows.detach() if its_rows.requires_grad else its_rows)
    whole = _joined(ids)
    if not all_rise(whole, _starts(ids), plan.least, plan.greatest):
        return None
    usual = _usual(plan, ids, whole, rows)
    return None if _have_nan(usual) else usual


def usual_requests(
    plan: RowPlan, requests: Sequence[Sequence[RowRequest]], pushed: UsualRows | None = None
) -> UsualRows | None:
    """Return which rows of each table of ``plan`` are read into what; None unless each has ids and one plain tensor.

    A tensor is made where there is none. If the ids are those of ``pushed``, the same ``ids`` are returned.
    """
    ids: list[Ids] = []
    for given in requests:
        if len(given) > 1:
            return None
        numbers = given[0].ids
        if type(numbers) is torch.Tensor and _plain(numbers, torch.int64, 1):
            numbers = numbers.numpy()
        elif type(numbers) is not np.ndarray or numbers.dtype != np.int64 or numbers.ndim != 1:
            return None
        ids.append(numbers)
    for table, dtype, (request,), numbers in zip(plan.tables, plan.dtypes, requests, ids, strict=True):
        out = request.out
        if out is not None and (type(out) is not torch.Tensor or not _plain(out, dtype, len(table.row) + 1)):
            return None
        if out is not None and (out.shape != (len(numbers), *table.row) or out.is_inference() or out.requires_grad):
            return None
    whole = _joined(ids)
    if pushed is not None and [*map(len, ids)] == [*map(len, pushed.ids)] and (whole == pushed.whole).all():
        ids, whole = pushed.ids, pushed.whole
    elif not all_rise(whole, _starts(ids), plan.least, plan.greatest):
        return None
    outs: list[torch.Tensor] = []
    for table, dtype, (request,), numbers in zip(plan.tables, plan.dtypes, requests, ids, strict=True):
        if request.out is None:
            request.out = torch.empty((len(numbers), *table.row), dtype=dtype)
        outs.append(request.out)
    return _usual(plan, ids, whole, outs)


def _usual(plan: RowPlan, ids: list[Ids], whole: Ids, tensors: Sequence[torch.Tensor]) -> UsualRows:
    rows = [
        (each if each.dim() == 2 else each.view(len(each), table.width)).numpy()
        for each, table in zip(tensors, plan.tables, strict=True)
    ]
    if plan.item is None:
        block = None
    elif len(rows) == 1:
        block = RowBlock(rows[0], _FIRST)
    else:
        block = block_of(tensors, plan.tables[0].width)
    return UsualRows(ids, whole, rows, block)


_FIRST = np.zeros(1, np.int64)


def _joined(ids: Sequence[Ids]) -> Ids:
    return ids[0] if len(ids) == 1 else np.concatenate(ids)


def _starts(ids: Sequence[Ids]) -> list[int]:
    """Return where the ids of each table begin among all, and where those of the last end."""
    return list(itertools.accumulate(map(len, ids), initial=0))


def overlap(read: UsualRows, written: UsualRows) -> bool:
    """Return whether rows of ``read`` share memory with some of ``written``."""
    if read.block is not None and written.block is not None:  # rows of both may be anywhere in their arrays
        return np.may_share_memory(read.block.rows, written.block.rows)
    (lows, highs), (starts, stops) = _ranges(read), _ranges(written)
    if not len(lows) or not len(starts):
        return False
    order = np.argsort(starts)
    reach = np.maximum.accumulate(stops[order])  # where the targets up to each end
    before = np.searchsorted(starts[order], highs)  # targets that begin before each source ends
    return bool((reach[before - 1] > lows)[before > 0].any())


def _ranges(usual: UsualRows) -> tuple[Positions, Positions]:
    """Return where in memory the rows of each table begin and end, for tables of which there are some."""
    arrays = [rows for rows in usual.rows if rows.size]
    starts = np.array([rows.ctypes.data for rows in arrays], np.int64)
    return starts, starts + np.array([rows.nbytes for rows in arrays], np.int64)


def _plain(tensor: torch.Tensor, dtype: torch.dtype, dims: int) -> bool:
    return (
        tensor.dtype is dtype
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.dim() == dims
        and tensor.is_contiguous()
        and not tensor.is_neg()
    )


def _have_nan(usual: UsualRows) -> bool:
    block = usual.block
    if block is not None and len(usual.rows) > 1:
        sizes = np.array(list(map(len, usual.ids)))
        first, stop = int(block.firsts[0]), int(block.firsts[-1] + sizes[-1])
        if np.array_equal(block.firsts[1:], (block.firsts + sizes)[:-1]):  # one after the other
            return has_nan(block.rows[first:stop])
    return has_nan(*usual.rows)
