"""The stripe of a table on this server: what rounds of its rows go to. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvstore import wire
from kvstore.lineage import UNKNOWN
from kvstore.optim.row_updater import RowUpdater
from kvstore.rows.ids import Ids
from kvstore.rows.row_table import RowTable
from kvstore.rows.slab_space import SlabSpace
from kvstore.rows.sums import RowBatch, Rows, united
from kvstore.spec import Key
from kvstore.table import Table, TableSpec
from servers.names import workers
from servers.store.clocks import WorkerClocks
from servers.store.hyperparameters import UpdateHyperparameters
from servers.store.rounds import Rounds
from servers.store.target import AnyTarget, HeldSegments, Target

RequestName: TypeAlias = "tuple[wire.Node, int]"  # who makes it, and its number
KEPT = 4  # rounds whose changed ids are known, for answers that are repeated by another server


@dataclass(slots=True)
class RowContribution:
    """What one worker contributes to a round of a table.

    Attributes:
        ranks: of the worker.
        clock: the number of the push among the worker's pushes to this table.
        ids: of the rows; they rise.
        rows: of shape (n, width); only to be read.
        hyper: the hyper-parameters to update with.
        batch: all rows of the message, if they are of one width, and which of its tables this is.
        request: the message, if it wants just these rows as its answer: its sender, and its number.
    """

    ranks: Sequence[int]
    clock: int
    ids: Ids
    rows: Rows
    hyper: UpdateHyperparameters
    batch: tuple[RowBatch, int] | None = None
    request: RequestName | None = None

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
        space: for the rows of this table and of others.
        lineage: in which the table begins.

    Attributes:
        name: by which users know the table, in settings and messages.
        width, dtype, row_bytes: of a row.
        table: the rows.
        updater: steps with sums of rows; None if they are assigned.
        group: that the table is in, which then has its rounds and the requests that wait for them; None outside.
    """

    def __init__(
        self,
        number: int,
        key: Key,
        description: Table,
        stripe: int,
        stripes: int,
        rounds: Rounds[RowContribution] | WorkerClocks[RowContribution],
        space: SlabSpace | None = None,
        lineage: int = UNKNOWN,
    ) -> None:
        self.name = description.name(key)
        super().__init__(HeldSegments([number], [self.name], [TableSpec.of(description)], [0]), rounds)
        self.number = number
        self.key = key
        self.description = description
        self.width, self.dtype, self.row_bytes = description.width, description.dtype, description.row_bytes
        self.stripe = stripe
        self.stripes = stripes
        self.table = RowTable(description, stripe, stripes, space=space, lineage=lineage)
        self.updater: RowUpdater | None = None
        self.group: AnyTarget | None = None
        self._changed: dict[int, Sequence[Ids]] = {}

    def use(self, updater: RowUpdater | None) -> None:
        """Step with ``updater`` from now on; states of the same rule stay."""
        self.updater = updater
        self.table.use(updater)

    @property
    def changed(self) -> dict[int, Ids]:
        """The ids whose rows the last updates have changed, rising, by version of the rounds."""
        return {version: self.changed_in(version) for version in self._changed}

    @changed.setter
    def changed(self, ids: Mapping[int, Ids]) -> None:
        self._changed = {version: [of] for version, of in ids.items()}

    def changed_in(self, version: int) -> Ids:
        """Return what ``changed`` has of ``version``.

        Raises:
            KeyError: it is not known any more.
        """
        parts = self._changed[version]
        if len(parts) > 1:
            parts = self._changed[version] = [united(parts)]
        return parts[0]

    def note_changed(self, *parts: Ids) -> None:
        """Note which rows the update has changed that makes the present version: those of all ``parts``."""
        version = self.rounds.version
        # They may be of a message, which may go.
        self.add_changed(version, [ids if ids.base is None else ids.copy() for ids in parts])

    def add_changed(self, version: int, parts: Sequence[Ids]) -> None:
        """Note which rows the update has changed that has made ``version``, the last one that is noted."""
        self._changed[version] = parts
        if len(self._changed) > KEPT:
            self._changed = {clock: kept for clock, kept in self._changed.items() if clock > version - KEPT}
