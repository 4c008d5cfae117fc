"""Which rows of one table a call asks for, each once, and where they are written when they are there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from kvstore.cached import cached
from kvstore.errors import Mismatch, UsageError
from kvstore.rows.contribution import row_sparse
from kvstore.rows.ids import Ids, require_ids
from kvstore.rows.row_sparse import RowSparse
from kvstore.rows.sums import Rows
from kvstore.table import Table
from kvstore.values import as_output, spec_of


class Wanted:
    """The rows that one call wants of one table.

    Args:
        what: the call, with its key and worker, for messages.
        table: whose rows they are.

    Attributes:
        targets: the outputs that are arrays.
    """

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

        Raises:
            Mismatch: ``out`` has another shape or dtype.
            UsageError: an id cannot be in the table, or ``out`` cannot be written to.
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
                self._direct = target.view(-1, self._table.width).numpy()
                return self._direct
        rows: Rows = np.empty((len(self.ids), self._table.width), self._table.dtype)
        return rows

    @cached
    def ids(self) -> Ids:
        """All ids whose rows are wanted, each once, rising."""
        unique, _ = self._all
        return unique

    def write(self, rows: Rows) -> None:
        """Write the rows of ``ids`` where they belong.

        Args:
            rows: of shape (len(ids), width).
        """
        if rows is self._direct:
            return
        _, places = self._all
        start = 0
        for given, write in zip(self._given, self._writes, strict=True):
            stop = start + len(given)
            write(rows[start:stop] if places is None else rows.take(places[start:stop], axis=0))
            start = stop

    def write_changed(self, ids: Ids, rows: Rows) -> None:
        """Write what a push has changed.

        Args:
            ids: rising.
            rows: of shape (len(ids), width).
        """
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
        out.rows = torch.from_numpy(owned).view(len(ids), *self._table.row).to(out.rows.device)
        out.shape = None if self._table.rows is None else (self._table.rows, *self._table.row)


def _unique(ids: Ids) -> tuple[Ids, Ids | None]:
    """Return the unique ``ids``, rising, and where each of ``ids`` is among them; None if they are these."""
    if len(ids) < 2 or bool((ids[1:] > ids[:-1]).all()):
        return ids, None
    unique, places = np.unique(ids, return_inverse=True)
    return unique, places.reshape(-1)


def _copy(rows: Rows, target: torch.Tensor) -> None:
    target.copy_(torch.from_numpy(rows).view(target.shape))
