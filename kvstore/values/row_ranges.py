"""Some rows of an array as its payload: all other elements are 0. Where the array is cut, rows may straddle a cut.

A row that straddles a cut travels whole to both sides, and each takes its part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
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

    def places(self, ids: Any) -> PlacedRows:
        """Return where rows ``ids`` are in the range.

        Args:
            ids: an array of int64, rising, of rows that are in the range at least in part.
        """
        top, bottom = -(-self.first // self.width), (self.first + self.size) // self.width
        edges: list[Edge] = []
        for at in dict.fromkeys((0, len(ids) - 1)) if len(ids) else ():
            begin = int(ids[at]) * self.width - self.first
            start, stop = max(begin, 0), min(begin + self.width, self.size)
            if stop - start < self.width:
                edges.append(Edge(at, slice(start, stop), slice(start - begin, stop - begin)))
        if top >= bottom:
            return PlacedRows(len(ids), self.width, 0, 0, 0, ids[:0], edges)
        before = sum(edge.row.start > 0 for edge in edges)
        whole = ids[before : len(ids) - len(edges) + before]
        return PlacedRows(len(ids), self.width, top * self.width - self.first, bottom - top, before, whole - top, edges)


class Edge(NamedTuple):
    """A row that is partly in a range: which of the rows it is, which elements of the range, and which of the row."""

    at: int
    inside: slice
    row: slice


class PlacedRows(NamedTuple):
    """Where some rows are in a range of an array.

    Attributes:
        number, width: of the rows, and of their elements.
        start, whole: from which element on there are whole rows in the range, and how many.
        before: 1 if the first of the rows is partly in the range, and ends there; else 0.
        which: of those that are wholly in the range, which of ``whole`` they are.
        edges: those that are not.
    """

    number: int
    width: int
    start: int
    whole: int
    before: int
    which: Any
    edges: Sequence[Edge]

    def gather(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the rows in ``flat``, which are the elements of the range, copied; 0 where a row is outside of it."""
        whole = self._whole(flat)
        if not self.edges and flat.is_cpu:
            taken = torch.empty((self.number, self.width), dtype=flat.dtype, device="cpu")
            if self.number:
                _items(whole).take(self.which, out=_items(taken), mode="clip")
            return taken
        rows = flat.new_zeros((self.number, self.width))
        rows[self._wholes] = whole.index_select(0, torch.from_numpy(self.which).to(flat.device))
        for at, inside, of_row in self.edges:
            rows[at, of_row] = flat[inside]
        return rows

    def put(self, flat: torch.Tensor, rows: torch.Tensor) -> None:
        """Write ``rows`` to where ``gather`` takes them from."""
        rows = rows.to(flat.device, flat.dtype)
        if flat.is_cpu:
            _items(self._whole(flat)).put(self.which, _items(rows[self._wholes].contiguous()), mode="clip")
        else:
            self._whole(flat).index_copy_(0, torch.from_numpy(self.which).to(flat.device), rows[self._wholes])
        for at, inside, of_row in self.edges:
            flat[inside] = rows[at, of_row]

    def add(self, flat: torch.Tensor, rows: torch.Tensor) -> None:
        """Add ``rows`` to where ``gather`` takes them from."""
        rows = rows.to(flat.device, flat.dtype)
        self._whole(flat).index_add_(0, torch.from_numpy(self.which).to(flat.device), rows[self._wholes])
        for at, inside, of_row in self.edges:
            flat[inside] += rows[at, of_row]

    @property
    def _wholes(self) -> slice:
        return slice(self.before, self.before + len(self.which))

    def _whole(self, flat: torch.Tensor) -> torch.Tensor:
        return flat[self.start : self.start + self.whole * self.width].view(self.whole, self.width)


def _items(rows: torch.Tensor) -> Any:
    """Return ``rows``, on the CPU, as an array with one item for each: numpy copies these in less time than torch."""
    item = np.dtype((np.void, rows.shape[1] * rows.itemsize))
    return rows.view(torch.uint8).numpy().view(item).reshape(-1)


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
        self.window.places(self.ids).put(flat, self.rows)
        return flat

    def cut(self, start: int, stop: int) -> RowRange:
        window = self.window.cut(max(0, start - self.start), min(stop, self.stop) - self.start)
        low, high = np.searchsorted(self.ids, window.rows).tolist()
        return RowRange(max(self.start, start) - start, window, self.ids[low:high], self.rows[low:high])

    def write(self, out: torch.Tensor, add: bool) -> None:
        if add:
            self.window.places(self.ids).add(out, self.rows)
        else:
            out.zero_()
            self.window.places(self.ids).put(out, self.rows)
