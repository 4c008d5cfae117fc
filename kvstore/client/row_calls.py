"""The arguments of calls that are about tables, checked: which rows go out, and which come back into what.

A call may have many tables, and checking them one by one is what its worker would spend most of its time with. So what
calls usually have is checked for all tables together: of each one value and one out, and ids that rise. Whatever is
unusual, or wrong, is left to the checks of each table, which know what to say.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from kvstore.client.pack_rows import OutgoingRows, RowBlock, Striped, block_of
from kvstore.client.pending import RowCall
from kvstore.client.plans import RowPlan, RowPlans
from kvstore.client.unpack_rows import IncomingRows, RowReader, UnionRows
from kvstore.errors import UsageError
from kvstore.rows.ids import Ids, all_rise, joined, starts_of
from kvstore.rows.row_arguments import Wanted, contribution
from kvstore.rows.row_sparse import RowSparse
from kvstore.rows.sums import Positions, Rows, has_nan
from kvstore.rule import Rule
from kvstore.spec import Key
from kvstore.store.arguments import ROUND, RowRequest
from kvstore.store.wanted_rows import described, wanted_rows

PAGE = 16 << 20  # bytes of rows in one answer, where a whole table is pulled


class _Given(NamedTuple):
    """The rows that a call pushes to one table, each id once."""

    ids: Ids
    rows: Rows


class RowArguments:
    """Checks what the calls of one store have of tables.

    Args:
        rank: of this worker, for messages.
    """

    def __init__(self, plans: RowPlans, rule: Rule, rank: int) -> None:
        self._plans = plans
        self._rule = rule
        self._rank = rank

    def push(self, values: Mapping[Key, Sequence[Any]]) -> list[RowCall]:
        plan = self._plans.of(values)
        usual = self._usual_values(plan, values)
        if usual is not None:
            return [RowCall(plan, _outgoing(plan, usual), None)]
        return [self._call(list(values), self._given("push", values), None)]

    def pushpull(
        self, values: Mapping[Key, Sequence[Any]], requests: Mapping[Key, Sequence[RowRequest]]
    ) -> list[RowCall]:
        """Return what is pushed to tables, and what is read back; ``requests`` are of the same keys.

        Tables of which all rows are wanted that the round changes have messages of their own.
        """
        usual = self._usual_pushpull(values, requests)
        if usual is not None:
            return [usual]
        given = self._given("pushpull", values)
        wanted = {key: self._wanted("pushpull", key, requests[key], of) for key, of in values.items()}
        _keep(given, wanted.values())
        calls = []
        for united in (False, True):
            keys = [key for key, each in wanted.items() if each.changed == united]
            if keys:
                plan, of = self._plans.of(keys), [wanted[key] for key in keys]
                calls.append(self._call(keys, given, UnionRows(plan, of) if united else IncomingRows.of(plan, of)))
        return calls

    def pull(self, requests: Mapping[Key, Sequence[RowRequest]]) -> list[RowCall]:
        plan = self._plans.of(requests)
        usual = usual_requests(plan, list(requests.values()))
        if usual is not None:
            return [RowCall(plan, None, _incoming(plan, usual, Striped(plan, usual.ids, usual.whole)))]
        wanted = [self._wanted("row_sparse_pull", key, of, None) for key, of in requests.items()]
        return [RowCall(plan, None, IncomingRows.of(plan, wanted))]

    def pull_whole(self, key: Key, outs: Sequence[Any]) -> list[RowCall]:
        """Return what reads all rows of a table with a shape, some of them with each message."""
        table = self._plans.require(key)
        plan, what = self._plans.of([key]), described("pull", table.name(key), self._rank)
        if table.rows is None:
            raise UsageError(f"{what}: {table} has no last row; use row_sparse_pull, or table_rows")
        whole = Wanted(what, table)
        numbers = np.arange(table.rows)
        targets = [torch.empty((table.rows, *table.row), dtype=getattr(torch, table.dtype), device="cpu") for _ in outs]
        for at, out in enumerate(outs):
            whole.add(numbers, out)  # which checks it
            if isinstance(out, RowSparse):
                out.ids, out.rows, out.shape = torch.from_numpy(numbers.copy()), targets[at], tuple(targets[at].shape)
            else:
                targets[at] = out
        step = max(1, plan.servers * PAGE // table.row_bytes)
        calls = []
        for start in range(0, table.rows, step):
            page = Wanted(what, table)
            for target in targets:
                page.add(numbers[start : start + step], target[start : start + step])
            calls.append(RowCall(plan, None, IncomingRows.of(plan, [page])))
        return calls

    def _usual_values(self, plan: RowPlan, values: Mapping[Key, Sequence[Any]]) -> UsualRows | None:
        return None if self._rule.finite else usual_values(plan, list(values.values()))

    def _usual_pushpull(
        self, values: Mapping[Key, Sequence[Any]], requests: Mapping[Key, Sequence[RowRequest]]
    ) -> RowCall | None:
        """Return the call, if all is as it usually is; see ``kvstore.client.row_calls``."""
        plan = self._plans.of(values)
        given = self._usual_values(plan, values)
        wanted = None if given is None else usual_requests(plan, [requests[key] for key in values], given)
        if given is None or wanted is None or overlap(given, wanted):
            return None
        outgoing = _outgoing(plan, given)
        striped = outgoing.striped if wanted.ids is given.ids else Striped(plan, wanted.ids, wanted.whole)
        return RowCall(plan, outgoing, _incoming(plan, wanted, striped))

    def _given(self, call: str, values: Mapping[Key, Sequence[Any]]) -> dict[Key, _Given]:
        tables = {key: self._plans.require(key) for key in values}
        return {
            key: _Given(
                *contribution(described(call, tables[key].name(key), self._rank), tables[key], of, self._rule.finite)
            )
            for key, of in values.items()
        }

    def _wanted(self, call: str, key: Key, requests: Sequence[RowRequest], pushed: Sequence[Any] | None) -> Wanted:
        table = self._plans.require(key)
        wanted = wanted_rows(call, key, self._rank, table, requests, pushed)
        if wanted.changed:
            what = described(call, table.name(key), self._rank)
            if len(wanted.ids):
                raise UsageError(f"{what}: row_ids={ROUND!r} is for all outs of a key, or for none")
            if self._rule.mode != "sync" or self._rule.quorum is not None:
                raise UsageError(
                    f"{what}: row_ids={ROUND!r} needs rounds that have every worker's push, those of dist_sync without "
                    "a quorum; elsewhere pull the rows that the next batch needs, as workers.Embedding does"
                )
        return wanted

    def _call(self, keys: Sequence[Key], given: Mapping[Key, _Given], reader: RowReader | None) -> RowCall:
        plan = self._plans.of(keys)
        ids, rows = [given[key].ids for key in keys], [given[key].rows for key in keys]
        return RowCall(plan, OutgoingRows(plan, ids, rows), reader)


def _outgoing(plan: RowPlan, usual: UsualRows) -> OutgoingRows:
    return OutgoingRows(plan, usual.ids, usual.rows, usual.block, usual.whole)


def _incoming(plan: RowPlan, usual: UsualRows, striped: Striped) -> IncomingRows:
    return IncomingRows(plan, striped, usual.rows, usual.block)


def _keep(given: dict[Key, _Given], wanted: Iterable[Wanted]) -> None:
    """Copy rows that are to be pushed where an output shares their memory: it may be written before they have left."""
    memory = [out.untyped_storage() for each in wanted for out in each.targets]
    written = sorted((storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in memory)
    starts = [start for start, _ in written]
    reach = list(itertools.accumulate((stop for _, stop in written), max))  # where the outputs up to each end
    for key, (ids, rows) in given.items() if written else ():
        low = rows.__array_interface__["data"][0]
        before = bisect.bisect_left(starts, low + rows.nbytes)  # outputs that begin before the rows end
        if before and reach[before - 1] > low:
            given[key] = _Given(ids, rows.copy())


# ---- what is usual


class UsualRows(NamedTuple):
    """Rows of several tables, to be read or to be written."""

    ids: list[Ids]  # of each table; they rise, and can be in the table
    whole: Ids  # those of all tables, one after the other
    rows: list[Rows]  # of each table, of shape (n, width), contiguous
    block: RowBlock | None  # the array that has all of them, if they lie in one
    tensors: Sequence[torch.Tensor]  # of each table, over the memory of its rows


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
            numbers, array = value.ids.numpy(), tensor.numpy()
            if not (_are_ids(numbers) and _are_rows(array, dtype, row, len(numbers))):
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
            if type(out) is not torch.Tensor or out.is_inference():
                return None
            array = out.numpy()  # which refuses one that requires gradients
            if not _are_rows(array, dtype, row, len(numbers)):
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
        rows = [out.numpy() for out in outs if out is not None]
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


def _are_rows(array: Rows, dtype: np.dtype[Any], row: tuple[int, ...], count: int) -> bool:
    return array.dtype == dtype and array.shape == (count, *row) and array.flags.c_contiguous


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
            return has_nan(block.rows[first:stop])
    return has_nan(*usual.rows)
