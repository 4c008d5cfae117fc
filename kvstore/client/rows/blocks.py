"""Rows of several tables that lie in one array: they are moved in one step. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from kvstore.rows.sums import Positions, Rows


class RowBlock(NamedTuple):
    """One array with the rows of several tables.

    Attributes:
        rows: the array, of shape (n, width). There may be other rows in it.
        firsts: where in it the rows of each table begin.
    """

    rows: Rows
    firsts: Positions


def block_of(parts: Sequence[torch.Tensor], width: int) -> RowBlock | None:
    """Return the array in which the rows of all ``parts`` are; None if they have no memory in common.

    Args:
        parts: of each table its rows, contiguous, on the CPU, and all of one dtype.
        width: how many elements a row has.
    """
    first = parts[0]
    memory = first.untyped_storage()
    address, firsts = memory.data_ptr(), []
    for part in parts:
        row, rest = divmod(int(part.storage_offset()), width)
        if rest or part.untyped_storage().data_ptr() != address:
            return None
        firsts.append(row)
    count = memory.nbytes() // (first.element_size() * width)
    rows: Rows = first.detach().as_strided((count, width), (width, 1), 0).numpy()
    return RowBlock(rows, np.array(firsts, np.int64))
