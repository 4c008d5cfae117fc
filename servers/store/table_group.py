"""Tables that are pushed together: one set of rounds for all of them. No I/O, no clock.

Most workers push the same list of tables in each message. Each table then needs no round, contribution and list of
waiting requests of its own. A group is to its tables what a bucket is to its segments. It is made of tables that are at
the same point, and whoever needs one of them for itself splits it first. To make or to split a group changes no row and
no round, and the same requests wait.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvstore.rows.ids import Ids
from kvstore.rows.joint_tables import JointTables
from kvstore.rows.layout import ALIGNED
from kvstore.rows.sums import RowBatch
from kvstore.rows.updates import can_step_together
from servers.names import workers
from servers.store.hyperparameters import UpdateHyperparameters
from servers.store.row_target import KEPT, RequestName, RowContribution, RowTarget
from servers.store.target import HeldSegments, Target

_EVERY = np.iinfo(np.int64)


@dataclass(slots=True)
class GroupContribution:
    """What one worker contributes to a round of all tables of a group; see ``RowContribution``.

    Attributes:
        batch: the rows of each table, one after the other.
        ranks, clock, hyper, request: see ``RowContribution``.
    """

    ranks: Sequence[int]
    clock: int
    batch: RowBatch
    hyper: UpdateHyperparameters
    request: RequestName | None

    @property
    def who(self) -> str:
        """The worker, for messages."""
        return workers(self.ranks)

    def of(self, place: int) -> RowContribution:
        """Return what is contributed to the table at ``place``."""
        batch = self.batch
        part = slice(*batch.starts[place : place + 2])
        return RowContribution(
            self.ranks, self.clock, batch.ids[part], batch.rows[part], self.hyper, (batch, place), self.request
        )


class TableGroup(Target[GroupContribution]):
    """See the module.

    Args:
        targets: the tables; see ``can_be_grouped``.

    Attributes:
        targets: see above.
        tables: their rows.
        joint: these together.
        updater: steps with sums of rows of all of them.
        codecs: how their rows travel.
        width, dtype, row_bytes: of a row.
        least, greatest: the ids that rows of each table can have.
    """

    def __init__(self, targets: Sequence[RowTarget]) -> None:
        first = targets[0]
        columns = zip(*(target.segments for target in targets), strict=True)
        segments = HeldSegments(*(list(itertools.chain(*parts)) for parts in columns))
        super().__init__(segments, first.rounds.copy())  # type: ignore[arg-type]  # there is no contribution in it
        self.judged, self.last_at = first.judged, first.last_at
        self.targets = targets
        self.tables = [target.table for target in targets]
        self.joint = JointTables(self.tables)
        self.updater = first.updater
        self.codecs = ["none"] * len(targets)
        self.width, self.dtype, self.row_bytes = first.width, first.dtype, first.row_bytes
        rows = [target.description.rows for target in targets]
        self.least = np.array([_EVERY.min if each is None else 0 for each in rows])
        self.greatest = np.array([_EVERY.max if each is None else each - 1 for each in rows])
        self._changed: dict[int, list[tuple[Ids, Sequence[int]]]] = {}

    def renew(self) -> None:
        """Look at the tables again: rows have been made."""
        self.joint = JointTables(self.tables)

    def note_changed(self, batches: Sequence[tuple[Ids, Sequence[int]]]) -> None:
        """Do what ``RowTarget.note_changed`` does, of all tables.

        Args:
            batches: ids of all tables, one after the other, and where those of each begin.
        """
        version = self.rounds.version
        self._changed[version] = [(ids if ids.base is None else ids.copy(), starts) for ids, starts in batches]
        if len(self._changed) > KEPT:
            self._changed = {clock: kept for clock, kept in self._changed.items() if clock > version - KEPT}

    def split(self) -> None:
        """Let each table have rounds of its own again, and what waits for them. The group cannot be used any more."""
        rounds, contributed = self.rounds, self.rounds.open()
        waiting = [(*entry, set(entry[1].request.ids)) for entry in self.parked]
        for place, target in enumerate(self.targets):
            target.rounds = rounds.copy()  # type: ignore[assignment]  # there is no contribution in it
            for clock, ranks, item in contributed:
                target.rounds.contribute(ranks, clock, item.of(place))
            for clock, parked, wanted in waiting:
                if target.number in wanted:
                    target.parked.append((clock, parked))
                    parked.left += 1
            target.judged, target.last_at = self.judged, self.last_at
            for version, batches in self._changed.items():
                target.add_changed(version, [ids[slice(*starts[place : place + 2])] for ids, starts in batches])
            target.group = None
        for _, parked, _ in waiting:
            parked.left -= 1
        self.rounds, self.parked = rounds.copy(), []


class TableGroups:
    """The groups of one store. No table is in two."""

    def __init__(self) -> None:
        self._by_ids: dict[tuple[int, ...], TableGroup] = {}

    def find(self, ids: Sequence[int]) -> TableGroup | None:
        """Return the group of segments ``ids``, in this order."""
        return self._by_ids.get(tuple(ids)) if self._by_ids else None

    def make(self, targets: Sequence[RowTarget]) -> TableGroup:
        """Return a new group of ``targets``."""
        group = self._by_ids[tuple(target.number for target in targets)] = TableGroup(targets)
        for target in targets:
            target.group = group
        return group

    def split(self, target: RowTarget) -> RowTarget:
        """Return ``target``, which is in no group any more."""
        if target.group is not None:
            self._by_ids.pop(target.group.ids).split()
        return target

    def split_all(self) -> None:
        """Let there be no groups."""
        for group in list(self._by_ids.values()):
            self.split(group.targets[0])


def alike(targets: Sequence[RowTarget]) -> bool:
    """Return whether rows of all ``targets`` are of one kind, so that they could be a group at any time."""
    first = targets[0]
    return first.row_bytes % ALIGNED == 0 and all(
        target.width == first.width
        and target.dtype == first.dtype
        and target.description.codec == "none"
        and target.description.grows == first.description.grows
        and not target.description.evict
        and (target.stripe, target.stripes) == (first.stripe, first.stripes)
        for target in targets
    )


def at_one_point(targets: Sequence[RowTarget]) -> bool:
    """Return whether ``targets``, which are alike, can be a group now: no round is open, and they are equally far."""
    updater, rounds = targets[0].updater, targets[0].rounds
    return (
        updater is not None
        and updater.lazy
        and all(target.idle and not target.failures and target.rounds.state == rounds.state for target in targets)
        and can_step_together([target.table for target in targets], [target.updater for target in targets])
    )
