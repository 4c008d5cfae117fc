"""A table as it was at one round, for a checkpoint: frozen then, and read page by page by a thread while it changes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvstore.checkpoint.tables import IDS, VALUES, page_name, rest_name
from kvstore.checkpoint.tensors import TensorHeader
from kvstore.spec import ITEMSIZE
from servers.store.row_arrays import bytes_of
from servers.store.row_target import RowTarget

PAGE_BYTES = 2 << 20  # of rows and what belongs to them: an update waits for one page at most


class TableCapture:
    """See the module. ``drop`` must follow.

    Args:
        target: the table.
    """

    def __init__(self, target: RowTarget) -> None:
        self._segment = target.number
        self._table = target.description
        self._parts = dict(target.table.parts)
        self._frozen = target.table.freeze()
        self._rest = target.table.rest()
        others = sum(max(1, part.columns) * ITEMSIZE[part.dtype] for part in self._parts.values())
        self._slots = max(1, PAGE_BYTES // (self._table.row_bytes + 8 + others))
        self._pages: list[int] = []  # the first slot of each page that has rows

    def headers(self) -> Iterator[TensorHeader]:
        """Yield what a file says of the tensors; for the thread, and before ``contents``."""
        self._pages = []
        for start in range(0, self._frozen.slots, self._slots):
            count = self._frozen.count(start, self._slots)
            if count:
                yield from self._page_headers(len(self._pages), count)
                self._pages.append(start)
        for name, array in self._rest.items():
            yield TensorHeader(rest_name(self._segment, name), "int64", (len(array),))

    def contents(self) -> Iterator[memoryview]:
        """Yield the bytes of what ``headers`` lists."""
        for start in self._pages:
            ids, rows, parts = self._frozen.page(start, self._slots)
            yield from map(bytes_of, (ids, rows, *parts.values()))
        for array in self._rest.values():
            yield bytes_of(np.ascontiguousarray(array, np.int64))

    def drop(self) -> None:
        """Let go of it: the table keeps nothing for it any more."""
        self._frozen.thaw()

    def _page_headers(self, page: int, count: int) -> Iterator[TensorHeader]:
        table = self._table
        yield TensorHeader(page_name(self._segment, page, IDS), "int64", (count,))
        yield TensorHeader(page_name(self._segment, page, VALUES), table.dtype, (count, table.width))
        for name, part in self._parts.items():
            shape = (count, part.columns) if part.columns else (count,)
            yield TensorHeader(page_name(self._segment, page, name), part.dtype, shape)
