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
from kvstore.rows.row_sparse import RowSparse
from kvstore.rows.sums import has_nan
from kvstore.store.arguments import RowRequest


class UsualRows(NamedTuple):
    """Rows of several tables, to be read or to be written.

    Attributes:
        ids: of each table; they rise, and can be in the table.
        rows: of each table, of shape (n, *row), contiguous, on the CPU.
        block: the array that has all of them, if they lie in one.
    """

    ids: list[Ids]
    rows: list[torch.Tensor]
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
    if not all_rise(plan, ids):
        return None
    usual = UsualRows(ids, rows, None if plan.item is None else block_of(rows, plan.tables[0].width))
    return None if _have_nan(usual) else usual


def usual_requests(plan: RowPlan, requests: Sequence[Sequence[RowRequest]]) -> UsualRows | None:
    """Return which rows of each table of ``plan`` are read into what; None unless each has ids and one plain tensor.

    A tensor is made where there is none.
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
    if not all_rise(plan, ids):
        return None
    outs: list[torch.Tensor] = []
    for table, dtype, (request,), numbers in zip(plan.tables, plan.dtypes, requests, ids, strict=True):
        if request.out is None:
            request.out = torch.empty((len(numbers), *table.row), dtype=dtype)
        outs.append(request.out)
    return UsualRows(ids, outs, None if plan.item is None else block_of(outs, plan.tables[0].width))


def all_rise(plan: RowPlan, ids: Sequence[Ids]) -> bool:
    """Return whether the ids of each table of ``plan`` rise, and can be in the table."""
    whole = ids[0] if len(ids) == 1 else np.concatenate(ids)
    if not len(whole):
        return True
    sizes = np.array(list(map(len, ids)))
    stops = np.cumsum(sizes)
    falls = whole[1:] <= whole[:-1]
    falls[stops[(stops > 0) & (stops < len(whole))] - 1] = False  # where one table's end and the next one's begin
    there = sizes > 0
    firsts, lasts = whole[(stops - sizes)[there]], whole[stops[there] - 1]
    return not (falls.any() or (firsts < plan.least[there]).any() or (lasts > plan.greatest[there]).any())


def overlap(read: UsualRows, written: UsualRows) -> bool:
    """Return whether rows of ``read`` share memory with some of ``written``."""
    if read.block is not None and written.block is not None:  # each in memory of its own, or all in the same
        return bool(read.block.rows.ctypes.data == written.block.rows.ctypes.data)
    sources, targets = (sorted(_range(rows) for rows in each.rows if rows.numel()) for each in (read, written))
    reach = list(itertools.accumulate((stop for _, stop in targets), max))  # where the targets up to each end
    starts = np.array([start for start, _ in targets], np.int64)
    before = np.searchsorted(
        starts, np.array([stop for _, stop in sources], np.int64)
    )  # targets that begin before each source ends
    return any(at and reach[at - 1] > low for at, (low, _) in zip(before.tolist(), sources, strict=True))


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    start = tensor.data_ptr()
    return start, start + tensor.nbytes


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
    if block is not None:
        sizes = np.array(list(map(len, usual.ids)))
        first, stop = int(block.firsts[0]), int(block.firsts[-1] + sizes[-1])
        if np.array_equal(block.firsts[1:], (block.firsts + sizes)[:-1]):  # one after the other
            return has_nan(block.rows[first:stop])
    return any(has_nan(rows.numpy()) for rows in usual.rows)
