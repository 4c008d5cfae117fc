"""What a worker pushes to one table: checked, and summed over duplicates and devices before anything is sent."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvstore.cached import cached
from kvstore.errors import Mismatch, NotFinite, UsageError
from kvstore.rows.halves import array_dtype, array_of_rows, narrowed, tensor_of_rows, widened
from kvstore.rows.ids import Ids, require_ids
from kvstore.rows.row_sparse import RowSparse, is_row_sparse
from kvstore.rows.sums import Rows, coalesce, has_nan, sum_rows
from kvstore.spec import Key, Spec
from kvstore.table import Table
from kvstore.values import all_finite, as_output, spec_of, summed_in


@dataclass(frozen=True)
class ArrayOfRows:
    """An array of which a call pushes some rows: what it has in common with a table."""

    rows: int
    row: tuple[int, ...]
    dtype: str
    grows = False

    @classmethod
    def of(cls, what: str, spec: Spec) -> ArrayOfRows:
        """Return the array of ``spec``; raise ``UsageError`` if it has no rows."""
        if len(spec.shape) < 2 or not spec.size:
            raise UsageError(f"{what} is of {spec}, an array without rows, so it takes no RowSparse: push to_dense()")
        return cls(spec.shape[0], spec.shape[1:], spec.dtype)

    @property
    def width(self) -> int:
        return math.prod(self.row)

    def __str__(self) -> str:
        return f"an array of {self.dtype}[{', '.join(map(str, (self.rows, *self.row)))}]"


def contribution(
    what: str, table: Table | ArrayOfRows, values: Sequence[Any], finite: bool = False
) -> tuple[Ids, Rows]:
    """Return the ids that ``values`` have, rising, and for each the sum of its rows.

    The rows of one id are summed in the order of their positions, then over the values, in their order. Those of half
    precision are float32, and so are their sums.

    Args:
        values: one for each device: a ``RowSparse``, or a ``torch.sparse_coo`` tensor.
        finite: refuse rows with infinite elements, too; those with NaN are refused always, for one would spoil its row
            for good.

    Raises:
        NotFinite: see ``finite``. The message has the first such row, and its position.
    """
    parts = [_part(what, table, value, finite) for value in values]
    return parts[0] if len(parts) == 1 else sum_rows(parts)


def row_sparse(what: str, value: Any, table: Table | ArrayOfRows) -> RowSparse:
    """Return ``value`` as a ``RowSparse`` whose rows are of ``table``'s shape and dtype; its ids may be any."""
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


def _part(what: str, table: Table | ArrayOfRows, value: Any, finite: bool) -> tuple[Ids, Rows]:
    given = row_sparse(what, value, table)
    ids = require_ids(what, given.ids, table)
    rows = given.rows.detach().to("cpu", summed_in(given.rows.dtype))
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


def is_table(value: Any) -> bool:
    return isinstance(value, Table) or is_row_sparse(value)


def name_of(key: Key, value: Any) -> Key:
    """Return the name by which users know the table that ``init`` makes of ``value`` as ``key``."""
    parameter: Key | None = getattr(value, "parameter", None)
    return key if parameter is None else parameter


def first_rows(what: str, value: Any) -> tuple[Table, tuple[Ids, Rows] | None]:
    """Return the table that ``init`` makes of ``value``, and the rows that it is to begin with.

    Args:
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
    ids, rows = _parts(what, given, table)
    if bool((ids[1:] <= ids[:-1]).any()):
        ids, rows = coalesce(ids, widened(rows))
        rows = narrowed(rows, table.dtype)
    return table, (ids, rows)


def given_rows(what: str, table: Table, value: Any) -> tuple[Ids, Rows]:
    """Return the ids of ``value``, rising, and its rows, which are to replace those of ``table``.

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
    return ids, array_of_rows(given.rows.detach().cpu().reshape(len(ids), table.width).contiguous())


class Wanted:
    """The rows that one call wants of one table. ``targets``: the outputs that are arrays."""

    def __init__(self, what: str, table: Table) -> None:
        self._what = what
        self._table = table
        self._given: list[Ids] = []
        self._writes: list[Callable[[Rows], None]] = []
        self._changed: list[RowSparse] = []
        self.targets: list[torch.Tensor] = []
        self._direct: Rows | None = None

    @property
    def changed(self) -> bool:
        """Whether an output becomes the rows that the push of the same call has changed."""
        return bool(self._changed)

    def add(self, ids: Any, out: Any) -> Any:
        """Note that the rows of ``ids`` are to be written into ``out``; return that.

        Args:
            ids: integers, of any shape and order, with duplicates. None for those that the push has changed.
            out: an array of shape ``(*ids.shape, *row)``, a ``RowSparse``, or None for a new tensor.
        """
        if isinstance(out, RowSparse):
            out = row_sparse(self._what, out, self._table)
        if ids is None:
            if not isinstance(out, RowSparse):
                raise UsageError(
                    f"{self._what}: the ids of a round's rows are not known before: pass a RowSparse as out, not "
                    f"{type(out).__name__}"
                )
            self._changed.append(out)
            return out
        numbers = require_ids(f"{self._what}: row_ids", ids, self._table)
        flat = numbers.reshape(-1)
        if isinstance(out, RowSparse):
            unique, _ = _unique(flat)
            self._note(unique, lambda rows: self._become(out, unique, rows))
            return out
        shape, dtype = (*numbers.shape, *self._table.row), getattr(torch, self._table.dtype)
        if out is None:
            out = torch.empty(shape, dtype=dtype, device="cpu")
        target = as_output(out)
        if target.shape != shape or target.dtype != dtype:
            raise Mismatch(
                f"{self._what}: rows of {self._table} need an out of {list(shape)}, but this is {spec_of(target)}"
            )
        self.targets.append(target)
        self._note(flat, lambda rows: _copy(rows, target))
        return out

    def destination(self) -> Rows:
        """Return memory for the rows of ``ids``: an output where they are what that is to have, else new memory."""
        _, places = self._all
        if places is None and len(self._given) == 1 and self.targets:
            (target,) = self.targets
            if target.device.type == "cpu" and target.is_contiguous():
                self._direct = array_of_rows(target.view(-1, self._table.width))
                return self._direct
        rows: Rows = np.empty((len(self.ids), self._table.width), array_dtype(self._table.dtype))
        return rows

    @cached
    def ids(self) -> Ids:
        """All ids whose rows are wanted, each once, rising."""
        unique, _ = self._all
        return unique

    def write(self, rows: Rows) -> None:
        """Write the rows of ``ids`` where they belong."""
        if rows is self._direct:
            return
        _, places = self._all
        start = 0
        for given, write in zip(self._given, self._writes, strict=True):
            stop = start + len(given)
            write(rows[start:stop] if places is None else rows.take(places[start:stop], axis=0))
            start = stop

    def write_changed(self, ids: Ids, rows: Rows) -> None:
        """Write what a push has changed."""
        for out in self._changed:
            self._become(out, ids, rows)

    @cached
    def _all(self) -> tuple[Ids, Ids | None]:
        if not self._given:
            return np.empty(0, np.int64), None
        return _unique(self._given[0] if len(self._given) == 1 else np.concatenate(self._given))

    def _note(self, ids: Ids, write: Callable[[Rows], None]) -> None:
        self._given.append(ids)
        self._writes.append(write)

    def _become(self, out: RowSparse, ids: Ids, rows: Rows) -> None:
        owned = rows if rows.base is None else rows.copy()
        out.ids = torch.from_numpy(ids.copy())
        out.rows = tensor_of_rows(owned).view(len(ids), *self._table.row).to(out.rows.device)
        out.shape = None if self._table.rows is None else (self._table.rows, *self._table.row)


def _unique(ids: Ids) -> tuple[Ids, Ids | None]:
    """Return the unique ``ids``, rising, and where each of ``ids`` is among them; None if they are these."""
    if len(ids) < 2 or bool((ids[1:] > ids[:-1]).all()):
        return ids, None
    unique, places = np.unique(ids, return_inverse=True)
    return unique, places.reshape(-1)


def sparse_of(table: Table, ids: Ids, rows: Rows) -> RowSparse:
    """Return rows of ``table``, as they are in memory, for the program."""
    shape = None if table.rows is None else (table.rows, *table.row)
    return RowSparse(ids, tensor_of_rows(rows).view(len(ids), *table.row), shape)


def _copy(rows: Rows, target: torch.Tensor) -> None:
    target.copy_(tensor_of_rows(rows).view(target.shape))
