"""The ids of rows that have gone, for saves of what has changed since an earlier one."""

from __future__ import annotations

from collections import deque

import numpy as np

from kvstore.errors import UsageError
from kvstore.rows.ids import Ids

KEPT = 1 << 20  # ids at least, however few rows the table has


class GoneIds:
    """Which rows have gone in which update. The oldest are forgotten when there are many more than rows.

    Attributes:
        floor: the earliest version of which all is known that has gone since.
    """

    def __init__(self, floor: int = 0) -> None:
        self.floor = floor
        self._batches: deque[tuple[int, Ids]] = deque()
        self._count = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the ids."""
        return 8 * self._count

    def add(self, ids: Ids, version: int, rows: int) -> None:
        """Note that ``ids`` went in update ``version``; ``rows`` are left."""
        if not len(ids):
            return
        self._batches.append((version, ids))
        self._count += len(ids)
        while self._count > max(KEPT, rows) and len(self._batches) > 1:
            self.floor, oldest = self._batches.popleft()
            self._count -= len(oldest)

    def since(self, version: int) -> Ids:
        """Return the ids that went after update ``version``, sorted; some may have come again.

        Raises:
            UsageError: that is not known any more.
        """
        if unknown := self.unknown(version):
            raise UsageError(f"{unknown}; save the whole table")
        return np.unique(np.concatenate([np.empty(0, np.int64), *(ids for at, ids in self._batches if at > version)]))

    def unknown(self, version: int) -> str:
        """Return why it is not known which rows have gone after update ``version``; nothing if it is known."""
        if version >= self.floor:
            return ""
        return (
            f"what has changed since version {version} is not known: rows that went are remembered since version "
            f"{self.floor} alone"
        )

    def forget(self, version: int) -> None:
        """Know nothing of what was before ``version``, which may be lower than those before."""
        self._batches.clear()
        self._count = 0
        self.floor = version
