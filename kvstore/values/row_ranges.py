"""Some rows of an array as its payload: all other elements are 0. Where the array is cut, rows may straddle a cut.

A row that straddles a cut travels whole to both sides, and each takes its part of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch


class RowWindow(NamedTuple):
    """A range of an array, flat: which parts of which rows are in it.

    Attributes:
        first: the first element of the range in the array.
        size: how many elements the range has.
        width: how many elements a row of the array has.
    """

    first: int
    size: int
    width: int

    @property
    def rows(self) -> tuple[int, int]:
        """The first row that is in the range at least in part, and the one after the last."""
        return self.first // self.width, -(-(self.first + self.size) // self.width)

    def cut(self, start: int, stop: int) -> RowWindow:
        """Return elements ``start`` to ``stop`` of the range."""
        return RowWindow(self.first + start, stop - start, self.width)

    def gather(self, flat: torch.Tensor, ids: Any) -> torch.Tensor:
        """Return rows ``ids`` of ``flat``, which are the elements of the range; 0 where a row is outside of it.

        Args:
            ids: an array of int64, rising, of rows that are in the range at least in part.
        """
        whole, index, place = self._whole(flat, ids)
        if len(index) == len(ids):
            return whole.index_select(0, index)
        rows = flat.new_zeros((len(ids), self.width))
        if len(index):
            rows[place : place + len(index)] = whole.index_select(0, index)
        for at, inside, of_row in self._edges(ids):
            rows[at, of_row] = flat[inside]
        return rows

    def put(self, flat: torch.Tensor, ids: Any, rows: torch.Tensor) -> None:
        """Write ``rows`` to where ``gather`` takes them from."""
        whole, index, place = self._whole(flat, ids)
        rows = rows.to(flat.device, flat.dtype)
        if len(index):
            whole.index_copy_(0, index, rows[place : place + len(index)])
        for at, inside, of_row in self._edges(ids):
            flat[inside] = rows[at, of_row]

    def add(self, flat: torch.Tensor, ids: Any, rows: torch.Tensor) -> None:
        """Add ``rows`` to where ``gather`` takes them from."""
        whole, index, place = self._whole(flat, ids)
        rows = rows.to(flat.device, flat.dtype)
        if len(index):
            whole.index_add_(0, index, rows[place : place + len(index)])
        for at, inside, of_row in self._edges(ids):
            flat[inside] += rows[at, of_row]

    def _whole(self, flat: torch.Tensor, ids: Any) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Return the rows that are wholly in ``flat``, which of them are among ``ids``, and where these begin there."""
        top, bottom = -(-self.first // self.width), (self.first + self.size) // self.width
        if top >= bottom:
            return flat[:0].view(0, self.width), torch.empty(0, dtype=torch.int64, device=flat.device), 0
        start = top * self.width - self.first
        whole = flat[start : start + (bottom - top) * self.width].view(-1, self.width)
        place = int(len(ids) > 0 and ids[0] < top)
        stop = len(ids) - int(len(ids) > 0 and ids[-1] >= bottom)
        return whole, torch.from_numpy(ids[place:stop] - top).to(flat.device), place

    def _edges(self, ids: Any) -> Iterator[tuple[int, slice, slice]]:
        """Yield the rows that are cut: the place among ``ids``, which elements are in the range, and which of the row.

        Only the first row and the last one can be.
        """
        for at in dict.fromkeys((0, len(ids) - 1)) if len(ids) else ():
            begin = int(ids[at]) * self.width - self.first
            start, stop = max(begin, 0), min(begin + self.width, self.size)
            if stop - start < self.width:
                yield at, slice(start, stop), slice(start - begin, stop - begin)


class RowRange(NamedTuple):
    """Elements of a payload from ``start`` on: rows ``ids`` of the array that ``window`` is in. A ``PayloadRange``.

    Attributes:
        ids: an array of int64; they rise, and the rows are in the window at least in part.
        rows: of shape (number of ids, width).
    """

    start: int
    window: RowWindow
    ids: Any
    rows: torch.Tensor

    @property
    def stop(self) -> int:
        return self.start + self.window.size

    @property
    def values(self) -> torch.Tensor:
        flat = self.rows.new_zeros(self.window.size)
        self.window.put(flat, self.ids, self.rows)
        return flat

    def cut(self, start: int, stop: int) -> RowRange:
        window = self.window.cut(max(0, start - self.start), min(stop, self.stop) - self.start)
        low, high = np.searchsorted(self.ids, window.rows).tolist()
        return RowRange(max(self.start, start) - start, window, self.ids[low:high], self.rows[low:high])

    def write(self, out: torch.Tensor, add: bool) -> None:
        if add:
            self.window.add(out, self.ids, self.rows)
        else:
            out.zero_()
            self.window.put(out, self.ids, self.rows)
