"""The new rows of an update as answers to the pushes that want just these: they need not be gathered again. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from kvstore import wire
from kvstore.rows.row_table import RowTable
from kvstore.rows.sums import Room, Rows
from kvstore.transport.memory import SMALL, Memory
from servers.store.row_target import RequestName


class _Answer(NamedTuple):
    """Rows of ``tables`` as they were made by the updates ``versions``."""

    rows: Rows
    tables: Sequence[RowTable]
    versions: Sequence[int]


class RowAnswers:
    """Rows that are about to be sent. They are forgotten with the message that has changed them.

    Args:
        memory: for rows that are sent.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._kept: dict[RequestName, _Answer] = {}

    def room(self, request: RequestName | None) -> Room:
        """Return what makes the memory of rows that answer ``request``; None for rows that answer nothing."""
        return np.empty if request is None else self._sendable

    def keep(self, requests: Sequence[RequestName | None], rows: Sequence[Rows], tables: Sequence[RowTable]) -> None:
        """Note that ``rows``, which ``room`` has made, are those of ``tables`` that answer ``requests``."""
        versions = [table.version for table in tables]
        for request, of in zip(requests, rows, strict=True):
            if request is not None:
                self._kept[request] = _Answer(of, tables, versions)

    def take(self, request: RequestName) -> wire.Buffer | None:
        """Return the rows that answer ``request``; None if they are not here, or have changed since."""
        answer = self._kept.pop(request, None) if self._kept else None
        if answer is None:
            return None
        for table, version in zip(answer.tables, answer.versions, strict=True):
            if table.version != version:
                return None
        return answer.rows.reshape(-1).view(np.uint8).data

    def forget(self) -> None:
        """Forget all: what comes next may change rows."""
        self._kept.clear()

    def _sendable(self, shape: tuple[int, int], dtype: np.dtype[Any]) -> Rows:
        nbytes = shape[0] * shape[1] * dtype.itemsize
        if nbytes < SMALL:
            return np.empty(shape, dtype)
        rows: Rows = np.frombuffer(self._memory.allocate(nbytes), dtype).reshape(shape)
        return rows
