"""``RowSparse``: some rows of a table or an array, as they are pushed and pulled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from kvstore.dynamo import outside_graphs
from kvstore.errors import UsageError
from kvstore.rows.ids import array_of_ids
from kvstore.spec import Key, as_shape, shorten
from kvstore.values import as_dtype, as_tensor, readable


@outside_graphs
class RowSparse:
    """Rows of a table, or of an array, by their ids: a gradient, or what was pulled. MXNet's ``row_sparse_array``.

        store.push("item", kv.RowSparse([3, 7], grads))  # grads: a row for each id
        rows = kv.RowSparse.zeros((10**6, 64))
        store.row_sparse_pull("item", out=rows, row_ids=batch)  # rows.ids: those of the batch, each once

    An id may be there several times: then its rows are summed, in the order of their positions, when they are pushed.
    Rows may be on any device, and come to the CPU, where tables are.

    Attributes:
        ids: of the rows, a tensor of int64 on the CPU.
        rows: a tensor, over the memory that was given where that is contiguous; its first dimension is as long as
            ``ids``.
        shape: of the whole table; None where the table grows.
    """

    __slots__ = ("ids", "rows", "shape")

    def __init__(self, ids: Any, rows: Any, shape: Any = None) -> None:
        """Make one from ids and rows.

        Args:
            ids: integers: a list, or an array of any shape.
            rows: an array of any kind that a store takes: a row for each id, of shape ``(*ids.shape, *row)``, as
                ``row_sparse_pull`` returns them, or ``(number of ids, *row)``. A row may have several dimensions.
            shape: of the whole table, if that has one: the number of its rows, then the shape of one row.

        Raises:
            UsageError: ids are no integers, or do not fit rows or shape.
        """
        given = torch.from_numpy(readable(integers("the ids of a RowSparse", ids)))
        numbers, values = given.reshape(-1), as_tensor(rows)
        if values.dim() > given.dim() > 1 and values.shape[: given.dim()] == given.shape:
            values = values.reshape(len(numbers), *values.shape[given.dim() :])
        if values.dim() < 2 or len(values) != len(numbers):
            raise UsageError(
                f"{len(numbers)} ids need {len(numbers)} rows: an array of shape ({len(numbers)}, columns), "
                f"not of {tuple(values.shape)}"
            )
        self.ids: torch.Tensor = numbers
        self.rows: torch.Tensor = values
        self.shape = None if shape is None else as_shape(shape)
        if self.shape is not None:
            if self.shape[1:] != self.row:
                raise UsageError(f"a table of shape {self.shape} has no rows of shape {self.row}")
            outside = torch.nonzero((numbers < 0) | (numbers >= self.shape[0]))
            if len(outside):
                position = int(outside[0])
                raise UsageError(
                    f"id {int(numbers[position])} at position {position} is not in a table of shape {self.shape}: "
                    f"ids are from 0 to {self.shape[0] - 1}"
                )

    @classmethod
    def over(cls, ids: torch.Tensor, rows: torch.Tensor) -> RowSparse:
        """Return one over tensors that are known to be right, without looking at them.

        Args:
            ids: of shape (n,) and int64, on the CPU.
            rows: of shape (n, columns), or with more dimensions.
        """
        made = cls.__new__(cls)
        made.ids, made.rows, made.shape = ids, rows, None
        return made

    @classmethod
    def zeros(cls, shape: Any, dtype: Any = None) -> RowSparse:
        """Return one without rows, whose table is all zeros: to pull into, or to push nothing.

        Args:
            shape: of the whole table; with 0 rows for a table that grows.
            dtype: of the rows; float32 by default.
        """
        whole = as_shape(shape)
        return cls([], torch.empty((0, *whole[1:]), dtype=as_dtype(dtype), device="cpu"), whole if whole[0] else None)

    @classmethod
    def of(cls, value: Any) -> RowSparse:
        """Return ``value`` as row-sparse, over the same memory.

        Args:
            value: a ``RowSparse``, or a ``torch.sparse_coo`` tensor with one sparse dimension, coalesced or not: what
                ``torch.nn.Embedding(sparse=True)`` has as its gradient.

        Raises:
            UsageError: it is something else.
        """
        if isinstance(value, RowSparse):
            return value
        if not is_row_sparse(value):
            raise UsageError(f"expected a RowSparse or a torch.sparse_coo tensor, not {type(value).__name__}")
        if value.sparse_dim() != 1 or value.dense_dim() < 1:
            raise UsageError(
                f"a sparse tensor of rows has one sparse dimension, and rows below it; this one has "
                f"{value.sparse_dim()} sparse and {value.dense_dim()} dense dimensions"
            )
        value = value.detach()
        return cls(value._indices()[0], value._values(), tuple(value.shape))

    @property
    def row(self) -> tuple[int, ...]:
        """The shape of one row."""
        return tuple(self.rows.shape[1:])

    def to_dense(self) -> torch.Tensor:
        """Return the whole table, with zeros where there is no row; rows of one id are summed.

        Raises:
            UsageError: it has no shape.
        """
        dense = self.rows.new_zeros(self._require_shape())
        return dense.index_add_(0, self.ids.to(self.rows.device), self.rows)

    def to_sparse_coo(self) -> torch.Tensor:
        """Return it as a ``torch.sparse_coo`` tensor over the same memory, not coalesced.

        Raises:
            UsageError: it has no shape.
        """
        shape = self._require_shape()
        return torch.sparse_coo_tensor(
            self.ids.to(self.rows.device)[None],
            self.rows,
            shape,
            dtype=self.rows.dtype,
            device=self.rows.device,
            check_invariants=False,
        )

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        whole = "*" if self.shape is None else str(self.shape[0])
        dtype = str(self.rows.dtype).removeprefix("torch.")
        return f"<RowSparse of {len(self)} rows of {dtype}[{', '.join([whole, *map(str, self.row)])}]>"

    def _require_shape(self) -> tuple[int, ...]:
        if self.shape is None:
            raise UsageError(
                "this RowSparse has no shape, so it cannot be a whole table; make it as RowSparse(ids, rows, shape)"
            )
        return self.shape


class ParameterRows(RowSparse):
    """The rows that the table of a sparse parameter begins with, for ``init``."""

    __slots__ = ("parameter",)

    def __init__(self, ids: Any, rows: Any, shape: Any, parameter: Key) -> None:
        super().__init__(ids, rows, shape)
        self.parameter = parameter


def is_row_sparse(value: Any) -> bool:
    return isinstance(value, RowSparse) or (isinstance(value, torch.Tensor) and value.layout == torch.sparse_coo)


def require_whole(outs: Mapping[Key, Sequence[Any]]) -> None:
    """Raise ``UsageError`` if the value of an array, which is all of it, is to be written into some rows."""
    for key, each in outs.items():
        if any(map(is_row_sparse, each)):
            raise UsageError(f"key {key!r} has an array, whose value is all of it: pass an array of its shape as out")


def require_uncompressed(keys: Iterable[Key]) -> None:
    """Raise ``UsageError`` if there are ``keys`` of arrays of which a store that compresses is to take some rows."""
    if listed := list(keys):
        raise UsageError(
            f"rows of {shorten(listed)}, an array, cannot be compressed as its whole gradients are: push dense values, "
            "such as to_dense(), or a table, kv.Table(codec=...), or use a store without compression"
        )


def integers(what: str, given: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return ``given`` as an array of int64 of the same shape.

    Args:
        given: a list of integers, or an array of them; numpy's, torch's or one that has DLPack.

    Raises:
        UsageError: it has something else than integers, or one that needs more than 63 bits.
    """
    array = array_of_ids(what, given)
    if array.dtype.kind not in "iu" and array.size:
        position = next((i for i, each in enumerate(array.flat) if not _is_integer(each)), 0)
        raise UsageError(
            f"{what} must be integers, and at position {position} is {array.flat[position]!r}; convert arrays of floats"
        )
    if array.dtype == np.uint64 and array.size and int(array.max()) >= 2**63:
        position = int(np.argmax(array >= 2**63))
        view = "torch.int64" if isinstance(given, torch.Tensor) else "'int64'"
        raise UsageError(
            f"{what} are int64, and at position {position} is {array.flat[position]}: pass hashes as ids.view({view})"
        )
    return array.astype(np.int64, copy=False)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
