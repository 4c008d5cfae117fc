"""The rows that a push carries, split over servers. They are read when a message is made."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvstore.client.rows.blocks import RowBlock
from kvstore.client.rows.plan import RowPlan
from kvstore.client.rows.striped import Striped
from kvstore.rows.ids import Ids
from kvstore.rows.layout import write_rows
from kvstore.rows.sums import Rows


class OutgoingRows:
    """One push of several tables.

    Args:
        plan: of the tables.
        ids: of each table, rising.
        rows: of each table, a row for each id, contiguous. They must stay as they are until the messages are made.
        block: the array that has all rows, if they lie in one.
        whole: the ids of all tables, one after the other, if somebody has them.

    Attributes:
        striped: the ids, by server.
    """

    def __init__(
        self,
        plan: RowPlan,
        ids: Sequence[Ids],
        rows: Sequence[Rows],
        block: RowBlock | None = None,
        whole: Ids | None = None,
    ) -> None:
        self._plan = plan
        self._rows = rows
        self._block = block
        self.striped = Striped(plan, ids, whole)

    def counts(self, server: int) -> list[int]:
        """Return how many rows of each table go to ``server``."""
        return self.striped.counts[server]

    def ids(self, server: int) -> Ids:
        """Return the ids of the rows that go to ``server``."""
        return self.striped.ids(server)

    def nbytes(self, server: int) -> int:
        """Return how many bytes the rows are that go to ``server``."""
        return self._plan.nbytes(self.counts(server))

    def write(self, server: int, into: memoryview) -> None:
        """Write the rows that go to ``server``, table by table."""
        at = 0
        if not len(into):
            return
        if self._plan.item is not None:
            whole = np.frombuffer(into, self._rows[0].dtype).reshape(-1, self._plan.tables[0].width)
            if self._block is not None:
                self._block.rows.take(self.striped.rows_in(self._block.firsts, server), axis=0, out=whole, mode="clip")
                return
            for rows, positions in zip(self._rows, self.striped.positions(server), strict=True):
                if len(positions):
                    stop = at + len(positions)
                    rows.take(positions, 0, whole[at:stop], "clip")  # they are in range: no check of them
                    at = stop
            return
        lengths = self._plan.lengths(self.counts(server))
        for table, rows, positions, length in zip(
            self._plan.tables, self._rows, self.striped.positions(server), lengths, strict=True
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
