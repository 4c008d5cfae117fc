"""The stripe of a table on this server: what rounds of its rows go to. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.optim.row_updater import RowUpdater
from kvstore.rows.ids import Ids
from kvstore.rows.row_table import RowTable
from kvstore.rows.sums import RowBatch, Rows
from kvstore.spec import Key
from kvstore.table import Table, TableSpec
from servers.names import workers
from servers.store.clocks import WorkerClocks
from servers.store.hyperparameters import UpdateHyperparameters
from servers.store.rounds import Rounds
from servers.store.target import HeldSegments, Target

KEPT = 4  # rounds whose changed ids are known, for answers that are repeated by another server


@dataclass
class RowContribution:
    """What one worker contributes to a round of a table.

    Attributes:
        ranks: of the worker.
        clock: the number of the push among the worker's pushes to this table.
        ids: of the rows; they rise.
        rows: of shape (n, width); only to be read.
        hyper: the hyper-parameters to update with.
        batch: all rows of the message, if they are of one width, and which of its tables this is.
    """

    ranks: Sequence[int]
    clock: int
    ids: Ids
    rows: Rows
    hyper: UpdateHyperparameters
    batch: tuple[RowBatch, int] | None = None

    @property
    def who(self) -> str:
        """The worker, for messages."""
        return workers(self.ranks)


class RowTarget(Target[RowContribution]):
    """One stripe of a table.

    Args:
        number: of the segment.
        key: of the table.
        description: of the table.
        stripe, stripes: which rows are here; see ``kvstore.rows.ids.stripes_of``.
        rounds: of the table.

    Attributes:
        width, dtype: of a row.
        table: the rows.
        updater: steps with sums of rows; None if they are assigned.
        changed: the ids whose rows the last updates have changed, by version of the rounds.
    """

    def __init__(
        self,
        number: int,
        key: Key,
        description: Table,
        stripe: int,
        stripes: int,
        rounds: Rounds[RowContribution] | WorkerClocks[RowContribution],
    ) -> None:
        super().__init__(HeldSegments([number], [key], [TableSpec.of(description)], [0]), rounds)
        self.number = number
        self.key = key
        self.description = description
        self.width, self.dtype = description.width, description.dtype
        self.stripe = stripe
        self.stripes = stripes
        self.table = RowTable(description, stripe, stripes)
        self.updater: RowUpdater | None = None
        self.changed: dict[int, Ids] = {}

    def use(self, updater: RowUpdater | None) -> None:
        """Step with ``updater`` from now on; states of the same rule stay."""
        self.updater = updater
        self.table.use(updater)

    def note_changed(self, ids: Ids) -> None:
        """Note which rows the update has changed that makes the present version."""
        version = self.rounds.version
        self.changed[version] = ids if ids.base is None else ids.copy()  # perhaps of a message, which may go
        if len(self.changed) > KEPT:
            self.changed = {clock: kept for clock, kept in self.changed.items() if clock > version - KEPT}
