"""The newest version of one table's rows on one server, kept as they were while training goes on. Pure.

A table knows which rows each update has changed, so a version costs no pass over it, and no copy. Before an update
changes a row for the first time since the version, the old row goes to a log: at most one copy of each row. A log is
kept only where readers ask for versions. Only the newest version can be read, and what has changed since any older one.

If versions come faster than readers fetch them, two servers never answer with the same version. So after a reader has
missed the version that it wanted, all servers keep each ``HELD``-th version until the next such one.
"""

from __future__ import annotations

from collections.abc import Iterator
from weakref import finalize

from kvstore.lineage import NOWHERE, Version, new_lineage
from kvstore.rows.frozen_rows import FrozenRows
from kvstore.rows.ids import Ids
from kvstore.rows.row_table import RowTable

HELD = 64  # see the module
FOLLOWED = 64  # versions that are made after a reader has asked; without another question, no more are
MOST_SLOTS = 1 << 14  # of a part: looking which of them have changed takes some 30 us
PART_BYTES = 1 << 20  # of rows in a part


class RowVersion:
    """A version of the rows: it can be read, and is logged, as long as somebody refers to this.

    So an answer is of one version, though the next one may be made before it is complete.
    """

    def __init__(self, table: RowTable, number: int, label: str) -> None:
        self.number, self.label = number, label
        self.rows: FrozenRows = table.freeze_values()
        self.at = self.rows.at
        self.batches = table.batches_gone  # of rows that had gone before
        finalize(self, self.rows.thaw)


class PublishedRows:
    """See the module.

    Attributes:
        table: whose rows these are.
        newest: the newest version; None if there is none, or nobody reads it.
        held: the last that stays longer.
        layout: says which rows each part has; see ``wire.ReadTable``.
    """

    def __init__(self, table: RowTable) -> None:
        self.table = table
        self.newest: RowVersion | None = None
        self.held: RowVersion | None = None
        self.layout = new_lineage()
        self.part_slots = max(1, min(MOST_SLOTS, PART_BYTES // table.table.row_bytes))
        self._last: tuple[int, str, Version] = 0, "", NOWHERE  # the newest version, and the table's state then
        self._left = self._holding = 0  # for how many versions more the newest is kept, and others are held

    def publish(self, number: int, label: str) -> None:
        """Make the table, as it is now, version ``number``."""
        self._last = number, label, self.table.at
        self.newest = None  # first: its log is not to have what the next one has
        self._left, self._holding = max(0, self._left - 1), max(0, self._holding - 1)
        if self._left:
            self.newest = RowVersion(self.table, number, label)
        if not (self._left and self._holding) or number % HELD == 0:
            self.held = self.newest if self._holding else None

    def read(self, want: int) -> RowVersion | None:
        """Return version ``want``; else a later one; else the newest; None if there is none. Keep the next versions."""
        self._left = FOLLOWED
        number, label, at = self._last
        if self.newest is None and number and self.table.at == at:
            self.newest = RowVersion(self.table, number, label)
        if not want or self.newest is None or self.newest.number <= want:
            return self.newest
        if self.held is not None and self.held.number >= want:
            return self.held
        self._holding = 2 * HELD
        return self.newest

    def gone(self, since: Version, version: RowVersion) -> Iterator[Ids] | None:
        """Yield ids that have gone from the state ``since`` to ``version``, in batches; None if it is not known."""
        if since == version.at or since == NOWHERE:
            return iter(())
        if version.at.since(since) is None or self.table.unknown(since):
            return None
        return self.table.gone_since(since, version.batches)
