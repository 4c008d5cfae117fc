"""Parameters with sparse gradients, as of ``nn.Embedding(sparse=True)``: their rows are pushed and pulled as a table's.

Whether a gradient is sparse shows at the first step, so a parameter's table is made then. What comes back of a round is
the rows that any worker has pushed: so all workers' weights stay the same.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from kvstore import KVStore, RowSparse, Table, UsageError
from kvstore.rows.row_sparse import ParameterRows
from kvstore.ticket import Ticket
from workers.common.sparse_gradients import as_gradient, as_rows, is_sparse, table_key
from workers.trainer.parameters import Key, Parameter


class SparseParameters:
    """The parameters of a trainer whose gradients are sparse.

    Args:
        params: all parameters of the trainer.
        store: its store.
        updates: whether the store updates; else it sums.

    Attributes:
        positions: theirs, in the order in which their tables were made.
    """

    def __init__(self, params: Sequence[Parameter], store: KVStore, *, updates: bool) -> None:
        self.positions: list[int] = []
        self._params = params
        self._store = store
        self._updates = updates

    def find(self) -> list[int]:
        """Make tables for the parameters whose gradients are sparse for the first time; return their positions.

        Raises:
            UsageError: the store has no full rounds, so that workers' weights would differ.
        """
        new = [position for position, param in enumerate(self._params) if any(map(is_sparse, param.tensors))]
        return self.make(new)

    def make(self, positions: Sequence[int]) -> list[int]:
        """Make tables for those parameters at ``positions`` that have none; return their positions.

        Raises:
            UsageError: see ``find``.
        """
        new = [position for position in positions if position not in self.positions]
        for position in new:
            self._require_rounds(self._params[position].key)
        if new:
            self._store.init(
                [table_key(self._params[position].key) for position in new],
                [self._first(self._params[position]) for position in new],
            )
            self.positions += new
        return new

    def push(self, left_out: Collection[int] = ()) -> RoundRows | None:
        """Push the gradients, and ask for what becomes of the rows; return at once. None if there are none.

        Args:
            left_out: positions of parameters that no worker has a gradient of.

        Raises:
            UsageError: a parameter has no gradient.
        """
        pushed = [self._params[position] for position in self.positions if position not in left_out]
        if not pushed:
            return None
        values = [[as_rows(grad) for grad in param.gradients()] for param in pushed]
        rows = [RowSparse.zeros(param.tensors[0].shape, param.tensors[0].dtype) for param in pushed]
        keys = [table_key(param.key) for param in pushed]
        ticket = self._store.pushpull(keys, values, rows, wait=False, row_ids=["round"] * len(keys))
        return RoundRows(ticket, pushed, rows)

    def refresh(self, positions: Collection[int]) -> None:
        """Pull all rows of the parameters at ``positions`` into their weights."""
        for position in positions:
            param = self._params[position]
            weight = param.tensors[0].detach()
            whole = weight if weight.is_cpu and weight.is_contiguous() else torch.empty_like(weight, device="cpu")
            self._store.pull(table_key(param.key), whole, ignore_sparse=False)
            for tensor in param.tensors:
                if tensor.data_ptr() != whole.data_ptr():
                    tensor.detach().copy_(whole)

    def _first(self, param: Parameter) -> Table | RowSparse:
        """Return what a table begins with: rank 0's weight; zeros, where the store sums."""
        weight, shape = param.tensors[0], tuple(param.tensors[0].shape)
        if not self._updates:
            return Table(shape=shape, dtype=weight.dtype, parameter=param.key)
        of_rank_0 = weight.detach().cpu()
        rows = of_rank_0 if self._store.rank == 0 else of_rank_0[:0]
        return ParameterRows(torch.arange(len(rows), dtype=torch.int64, device="cpu"), rows, shape, param.key)

    def _require_rounds(self, key: Key) -> None:
        kind, rule = self._store.type, getattr(self._store, "rule", None)
        if any(word in kind for word in ("async", "ssp")) or getattr(rule, "quorum", None) is not None:
            raise UsageError(
                f"the gradient of {key!r} is sparse, and with a {kind!r} store whose updates are not all workers' "
                "together their weights would not stay the same: use workers.Embedding, whose rows are the store's, or "
                "make the layer with sparse=False"
            )


class RoundRows:
    """What comes back of one push: rows of each parameter, new weights or summed gradients.

    Args:
        ticket: of the push.
        params: the parameters.
        rows: what comes back of each, when ``ticket`` is done.
    """

    def __init__(self, ticket: Ticket, params: Sequence[Parameter], rows: Sequence[RowSparse]) -> None:
        self._ticket = ticket
        self._params = params
        self._rows = rows

    @torch.no_grad()
    def write_weights(self) -> None:
        """Write the rows into the weights, when they have come."""
        self._ticket.wait()
        for param, came in zip(self._params, self._rows, strict=True):
            for tensor in param.tensors:
                tensor.detach().index_copy_(0, came.ids.to(tensor.device), came.rows.to(tensor.device))

    @torch.no_grad()
    def write_gradients(self) -> None:
        """Let the rows be the gradients, when they have come."""
        self._ticket.wait()
        for param, came in zip(self._params, self._rows, strict=True):
            for tensor in param.tensors:
                tensor.grad = as_gradient(came, tensor)
