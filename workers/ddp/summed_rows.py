"""Sums over workers of sparse gradients: the rows of a parameter are those of a table that sums."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch

from kvstore import KVStore, RowSparse, Table
from kvstore.ticket import Ticket
from workers.common.sparse_gradients import as_gradient, as_rows, table_key


class RowSums(NamedTuple):
    """What one push brings back: by position the rows that any worker has pushed, when ``ticket`` is done."""

    ticket: Ticket
    rows: Mapping[int, RowSparse]


class SummedRows:
    """The parameters whose gradients are sparse on some worker; on all workers alike.

    Args:
        names: of all parameters, which are keys of the store.
        tensors: the parameters.
        store: a synchronous store without optimizer.
        known: its keys, to which those of tables are added.

    Attributes:
        positions: those of the parameters with sparse gradients.
    """

    def __init__(
        self, names: Sequence[str], tensors: Sequence[torch.Tensor], store: KVStore, known: set[str] | None = None
    ) -> None:
        self.positions: list[int] = []
        self._names, self._tensors = names, tensors
        self._store = store
        self._known = set[str]() if known is None else known

    def add(self, positions: Collection[int]) -> list[int]:
        """Note that the gradients of the parameters at ``positions`` are sparse; return which are new. Collective."""
        new = [position for position in positions if position not in self.positions]
        made = {
            str(key): position for key, position in zip(self._keys(new), new, strict=True) if key not in self._known
        }
        if made:
            tensors = [self._tensors[position] for position in made.values()]
            tables = [Table(shape=tuple(tensor.shape), dtype=tensor.dtype) for tensor in tensors]
            self._store.init(list(made), tables)
            self._known.update(made)
        self.positions += new
        return new

    def push(self, positions: Sequence[int], absent: bool = False) -> RowSums:
        """Push the gradients of these parameters, of those without one no rows; return at once.

        Args:
            positions: of the parameters.
            absent: whether to push no rows of any.
        """
        tensors = [self._tensors[position] for position in positions]
        values = [
            RowSparse.zeros(tensor.shape, tensor.dtype) if absent or tensor.grad is None else as_rows(tensor.grad)
            for tensor in tensors
        ]
        outs = [RowSparse.zeros(tensor.shape, tensor.dtype) for tensor in tensors]
        keys = self._keys(positions)
        ticket = self._store.pushpull(keys, values, outs, wait=False, row_ids=["round"] * len(keys))
        return RowSums(ticket, dict(zip(positions, outs, strict=True)))

    def write(self, sums: RowSums, counts: Sequence[int], divisor: int) -> None:
        """Wait for sums; let these, divided, be the gradients of the parameters that have one on some worker.

        Args:
            sums: what ``push`` has returned.
            counts: by position, on how many workers there is a gradient.
            divisor: of the sums.

        Raises:
            KVStoreError: the push failed.
        """
        sums.ticket.wait()
        for position, rows in sums.rows.items():
            tensor = self._tensors[position]
            if counts[position]:
                tensor.grad = as_gradient(rows, tensor)
                tensor.grad.div_(divisor)

    def _keys(self, positions: Sequence[int]) -> list[str | int]:
        return [table_key(self._names[position]) for position in positions]
