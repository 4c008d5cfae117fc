"""What a call has of tables: which rows go out, and which come back into what.

A call may have many tables, and checking them one by one is what its worker would spend most of its time with. So what
calls usually have is checked for all tables together: of each one value and one out, and ids that rise. Whatever is
unusual, or wrong, is left to the checks of each table, which know what to say.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from kvstore.client.pack import OutgoingRows, RowBlock, RowsOfArrays, Striped, block_of
from kvstore.client.plans import Plan, RowPlan
from kvstore.client.unpack import IncomingRows, RowReader, Writer
from kvstore.rows.halves import array_of_rows, widened
from kvstore.rows.ids import Ids, all_rise, joined, starts_of
from kvstore.rows.row_arguments import Wanted
from kvstore.rows.row_sparse import RowSparse
from kvstore.rows.sums import Positions, Rows, has_nan
from kvstore.spec import Key
from kvstore.store.arguments import RowRequest


class RowCall(NamedTuple):
    """Tables that share their messages, one for each server."""

    plan: RowPlan
    contribution: OutgoingRows | None  # the rows to push; None to push nothing
    reader: RowReader | None  # takes the rows that come back; None if none are wanted


class ArrayRowsCall(NamedTuple):
    """Arrays of which some rows are pushed."""

    plan: Plan  # one message for each server
    rows: RowsOfArrays
    pulled: Plan | None  # the same arrays, as their new values come
    writer: Writer | None  # writes these; None if they are not wanted


class GivenRows(NamedTuple):
    """The rows that a call pushes to one table, each id once."""

    ids: Ids
    rows: Rows


def copy_shared(given: dict[Key, GivenRows], wanted: Iterable[Wanted]) -> None:
    """Copy rows that are to be pushed where an output shares their memory: it may be written before they have left."""
    memory = [out.untyped_storage() for each in wanted for out in each.targets]
    written = sorted((storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in memory)
    starts = [start for start, _ in written]
    reach = list(itertools.accumulate((stop for _, stop in written), max))  # where the outputs up to each end
    for key, (ids, rows) in given.items() if written else ():
        low = rows.__array_interface__["data"][0]
        before = bisect.bisect_left(starts, low + rows.nbytes)  # outputs that begin before the rows end
        if before and reach[before - 1] > low:
            given[key] = GivenRows(ids, rows.copy())


# ---- what is usual


class UsualRows(NamedTuple):
    """Rows of several tables, to be read or to be written."""

    ids: list[Ids]  # of each table; they rise, and can be in the table
    whole: Ids  # those of all tables, one after the other
    rows: list[Rows]  # of each table, of shape (n, width), contiguous
    block: RowBlock | None  # the array that has all of them, if they lie in one
    tensors: Sequence[torch.Tensor]  # of each table, over the memory of its rows

    def outgoing(self, plan: RowPlan) -> OutgoingRows:
        return OutgoingRows(plan, self.ids, self.rows, self.block, self.whole)

    def incoming(self, plan: RowPlan, striped: Striped | None = None) -> IncomingRows:
        """Return what reads these rows; ``striped`` are their ids by server, where a push has worked these out."""
        return IncomingRows(plan, striped or Striped(plan, self.ids, self.whole), self.rows, self.block)


def usual_values(plan: RowPlan, values: Sequence[Sequence[Any]]) -> UsualRows | None:
    """Return what is pushed to each table of ``plan``; None unless each has one ``RowSparse`` that is all right."""
    ids: list[Ids] = []
    rows: list[Rows] = []
    tensors: list[torch.Tensor] = []
    try:
        for (dtype, row), shape, given in zip(plan.formats, plan.shapes, values, strict=True):
            value = given[0]
            if len(given) > 1 or type(value) is not RowSparse or not (value.shape is None or value.shape == shape):
                return None
            tensor = value.rows.detach() if value.rows.requires_grad else value.rows
            numbers, array = value.ids.numpy(), array_of_rows(tensor)
            if not (_are_ids(numbers) and tensor.dtype is dtype and _are_rows(array, row, len(numbers))):
                return None
            ids.append(numbers)
            rows.append(array)
            tensors.append(tensor)
    except _NO_ARRAY:
        return None
    whole = joined(ids)
    if not all_rise(whole, starts_of(ids), plan.least, plan.greatest):
        return None
    usual = _usual(plan, ids, whole, rows, tensors)
    return None if _have_nan(usual) else usual


def usual_requests(
    plan: RowPlan, requests: Sequence[Sequence[RowRequest]], pushed: UsualRows | None = None
) -> UsualRows | None:
    """Return which rows of each table of ``plan`` are read into what; None unless each has ids and one plain tensor.

    A tensor is made where there is none. If the ids are those of ``pushed``, the same ``ids`` are returned.
    """
    ids: list[Ids] = []
    rows: list[Rows] = []
    outs: list[torch.Tensor | None] = []
    try:
        for (dtype, row), given in zip(plan.formats, requests, strict=True):
            request = given[0]
            numbers, out = request.ids, request.out
            if type(numbers) is torch.Tensor:
                numbers = numbers.numpy()
            if len(given) > 1 or type(numbers) is not np.ndarray or not _are_ids(numbers):
                return None
            ids.append(numbers)
            outs.append(out)
            if out is None:
                continue
            if type(out) is not torch.Tensor or out.is_inference() or out.requires_grad or out.dtype is not dtype:
                return None
            array = array_of_rows(out)
            if not _are_rows(array, row, len(numbers)):
                return None
            rows.append(array)
    except _NO_ARRAY:
        return None
    whole = joined(ids)
    if pushed is not None and [*map(len, ids)] == [*map(len, pushed.ids)] and (whole == pushed.whole).all():
        ids, whole = pushed.ids, pushed.whole
    elif not all_rise(whole, starts_of(ids), plan.least, plan.greatest):
        return None
    if len(rows) < len(outs):
        outs = _made(plan, requests, ids)
        rows = [array_of_rows(out) for out in outs if out is not None]
    return _usual(plan, ids, whole, rows, [out for out in outs if out is not None])


def _made(plan: RowPlan, requests: Sequence[Sequence[RowRequest]], ids: Sequence[Ids]) -> list[torch.Tensor | None]:
    """Return what the rows are read into, and make it where there is nothing."""
    for table, dtype, (request,), numbers in zip(plan.tables, plan.dtypes, requests, ids, strict=True):
        if request.out is None:
            request.out = torch.empty((len(numbers), *table.row), dtype=dtype, device="cpu")
    return [request.out for (request,) in requests]


# What says that a tensor has no memory that numpy can use as it is: it is elsewhere, sparse, negated by a bit, or part
# of a computation whose gradients are wanted.
_NO_ARRAY = (TypeError, RuntimeError, AttributeError)
_IDS = np.dtype(np.int64)


def _are_ids(array: Rows) -> bool:
    return array.dtype == _IDS and array.ndim == 1 and array.flags.c_contiguous


def _are_rows(array: Rows, row: tuple[int, ...], count: int) -> bool:
    return array.shape == (count, *row) and array.flags.c_contiguous


def _usual(
    plan: RowPlan, ids: list[Ids], whole: Ids, rows: Sequence[Rows], tensors: Sequence[torch.Tensor]
) -> UsualRows:
    flat = [
        each if each.ndim == 2 else each.reshape(len(each), table.width)
        for each, table in zip(rows, plan.tables, strict=True)
    ]
    if plan.item is None:
        block = None
    elif len(flat) == 1:
        block = RowBlock(flat[0], _FIRST)
    else:
        block = block_of(tensors, plan.tables[0].width)
    return UsualRows(ids, whole, flat, block, tensors)


_FIRST = np.zeros(1, np.int64)


def overlap(read: UsualRows, written: UsualRows) -> bool:
    """Return whether rows of ``read`` share memory with some of ``written``."""
    if read.block is not None and written.block is not None:  # rows of both may be anywhere in their arrays
        return np.may_share_memory(read.block.rows, written.block.rows)
    (lows, highs), (starts, stops) = _ranges(read), _ranges(written)
    if not len(lows) or not len(starts):
        return False
    # By the highest end so far, not pair by pair: a call may have thousands of tables.
    order = starts.argsort()
    reach = np.maximum.accumulate(stops[order])  # where the targets up to each end
    before = starts[order].searchsorted(highs)  # targets that begin before each source ends
    return bool((reach[before - 1] > lows)[before > 0].any())


def _ranges(usual: UsualRows) -> tuple[Positions, Positions]:
    """Return where in memory the rows of each table begin and end, for tables of which there are some."""
    starts = np.array([tensor.data_ptr() for tensor in usual.tensors], np.int64)
    sizes = np.array([rows.nbytes for rows in usual.rows], np.int64)
    there = sizes > 0
    return starts[there], (starts + sizes)[there]


def _have_nan(usual: UsualRows) -> bool:
    block = usual.block
    if block is not None and len(usual.rows) > 1:
        sizes = np.array(list(map(len, usual.ids)))
        first, stop = int(block.firsts[0]), int(block.firsts[-1] + sizes[-1])
        if np.array_equal(block.firsts[1:], (block.firsts + sizes)[:-1]):  # one after the other
            return has_nan(widened(block.rows[first:stop]))
    return has_nan(*map(widened, usual.rows))
