"""The rows that a push carries, split over servers. They are read when a message is made."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvstore.dist.rows.plan import RowPlan
from kvstore.dist.rows.striped import Striped
from kvstore.rows.ids import Ids
from kvstore.rows.layout import part_bytes, write_rows
from kvstore.rows.sums import Rows


class OutgoingRows:
    """One push of several tables.

    Args:
        plan: of the tables.
        ids: of each table, rising.
        rows: of each table, a row for each id, contiguous. They must stay as they are until the messages are made.
    """

    def __init__(self, plan: RowPlan, ids: Sequence[Ids], rows: Sequence[Rows]) -> None:
        self._plan = plan
        self._rows = rows
        self._striped = Striped(plan, ids)

    def counts(self, server: int) -> list[int]:
        """Return how many rows of each table go to ``server``."""
        return self._striped.counts[server]

    def ids(self, server: int) -> Ids:
        """Return the ids of the rows that go to ``server``."""
        return self._striped.ids(server)

    def lengths(self, server: int) -> list[int]:
        """Return how many bytes the rows of each table are that go to ``server``."""
        return [
            part_bytes(count, table.width, table.dtype, table.codec)
            for count, table in zip(self.counts(server), self._plan.tables, strict=True)
        ]

    def write(self, server: int, lengths: Sequence[int], into: memoryview) -> None:
        """Write the rows that go to ``server``, table by table, each of so many bytes."""
        at = 0
        if not len(into):
            return
        if self._plan.item is not None:
            whole = np.frombuffer(into, self._rows[0].dtype).reshape(-1, self._plan.tables[0].width)
            for rows, positions in zip(self._rows, self._striped.positions(server), strict=True):
                stop = at + len(positions)
                rows.take(positions, axis=0, out=whole[at:stop], mode="clip")  # they are in range: no check of them
                at = stop
            return
        for table, rows, positions, length in zip(
            self._plan.tables, self._rows, self._striped.positions(server), lengths, strict=True
        ):
            part = into[at : at + length]
            at += length
            if not len(positions):
                continue
            if table.codec == "none":
                target = np.frombuffer(part, rows.dtype, len(positions) * table.width).reshape(-1, table.width)
                rows.take(positions, axis=0, out=target, mode="clip")
            else:
                write_rows(rows[positions], table.codec, part)
