"""Which rows of a table a batch needs: each id once, and where each position of the batch finds its row. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvstore import UsageError
from kvstore.rows.ids import Ids
from kvstore.rows.row_sparse import integers
from kvstore.table import Table
from workers.common.tensors import to_tensor
from workers.common.torch_internals import write_count


@dataclass(frozen=True)
class Lookup:
    """The rows of one table that a batch needs.

    Attributes:
        given: the ids as they were given; int64, of any shape.
        ids: each id once, rising, without the padding; int64, on the CPU.
        inverse: for each position of ``given`` that of its id in ``ids``, or ``len(ids)`` for the padding; of the same
            shape and device.
        order: the positions of ``given``, sorted by their ids as torch sorts what a sparse gradient has of one id.
        starts: where in ``order`` the positions of each id begin; those of the padding, too.
        padded: whether there is padding.
        writes: how often ``given`` had been written to.
    """

    given: torch.Tensor
    ids: torch.Tensor
    inverse: torch.Tensor
    order: torch.Tensor
    starts: torch.Tensor
    padded: bool
    writes: int

    def matches(self, given: torch.Tensor) -> bool:
        """Whether this is for just these ids, in this order."""
        mine = self.given
        if _writes(mine) != self.writes:
            return False
        same = mine.shape == given.shape and mine.device == given.device and mine.dtype == given.dtype
        return mine is given or (same and torch.equal(mine, given))


def look_up(key: Any, table: Table, given: Any, padding: int | None = None) -> Lookup:
    """Return which rows of ``table`` the ids ``given`` need.

    Args:
        key: of the table, for messages.
        table: the table.
        given: a tensor of integers, an array or a list of them.
        padding: the id that needs no row; None if there is none.

    Raises:
        UsageError: these are no integers, or one of them cannot be in the table.
    """
    tensor = given if isinstance(given, torch.Tensor) else to_tensor(given).clone()  # for nobody tells of its writes
    writes = _writes(tensor)
    array = integers(f"ids of {key!r}", tensor)
    ordered, order = torch.sort(torch.from_numpy(array).reshape(-1))
    unique, inverse, starts = _unique(ordered.numpy(), order.numpy())
    padded = False
    if padding is not None:
        at = int(np.searchsorted(unique, padding))
        padded = at < len(unique) and int(unique[at]) == padding
        if padded:
            unique = np.delete(unique, at)
            inverse = np.where(inverse == at, len(unique), inverse - (inverse > at))
    if table.rows is not None and len(unique) and not (unique[0] >= 0 and unique[-1] < table.rows):
        _refuse(key, table.rows, array)
    positions = torch.from_numpy(inverse.reshape(array.shape)).to(tensor.device)
    return Lookup(tensor, torch.from_numpy(unique), positions, order, torch.from_numpy(starts), padded, writes)


def _unique(ordered: Ids, order: Ids) -> tuple[Ids, Ids, Ids]:
    """Return each of the ids once, for each position where its id is among these, and where in ``order`` each begins.

    Args:
        ordered: ids, sorted.
        order: their positions.
    """
    new = np.empty(len(ordered), bool)
    new[:1] = True
    np.not_equal(ordered[1:], ordered[:-1], out=new[1:])
    starts = np.flatnonzero(new)
    inverse = np.empty(len(order), np.int64)
    inverse[order] = np.cumsum(new) - 1
    return ordered[starts], inverse, starts


def contains(ids: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether all of ``wanted`` are among ``ids``; both rise."""
    if not len(ids):
        return not len(wanted)
    return torch.equal(ids[torch.searchsorted(ids, wanted).clamp_(max=len(ids) - 1)], wanted)


def _writes(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else write_count(tensor)


def _refuse(key: Any, rows: int, array: Ids) -> None:
    flat = array.reshape(-1)
    position = int(np.argmax((flat < 0) | (flat >= rows)))
    raise UsageError(
        f"id {flat[position]} at position {position} is not in table {key!r}, whose ids are from 0 to {rows - 1}"
    )
