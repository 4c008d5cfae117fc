"""The tables on this server that contributions go to: the stripe of one, or a group of them. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from kvstore import wire
from kvstore.lineage import UNKNOWN
from kvstore.optim.updater import RowUpdater
from kvstore.rows.ids import Bounds, Ids
from kvstore.rows.joint_tables import JointTables
from kvstore.rows.layout import ALIGNED
from kvstore.rows.row_table import RowTable
from kvstore.rows.slab_space import SlabSpace
from kvstore.rows.sums import RowBatch, Rows, united
from kvstore.rows.updates import can_step_together
from kvstore.spec import Key
from kvstore.table import Table, TableSpec
from servers.store.hyperparameters import Contributed, UpdateHyperparameters
from servers.store.rounds import Rounds, WorkerClocks
from servers.store.target import AnyTarget, HeldSegments, Target

RequestName: TypeAlias = "tuple[wire.Node, int]"  # its sender, and its number
# Each push of another list splits the group, which costs more than a group saves in a round.
MOST_LISTS = 4  # a table that has been pushed in so many changing lists is in no group
KEPT = 4  # rounds whose changed ids are known, for answers that are repeated by another server


@dataclass(slots=True)
class RowContribution(Contributed):
    """A contribution to a table.

    Attributes:
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


class RowTarget(Target[RowContribution]):
    """One stripe of a table.

    Args:
        stripe, stripes: which rows are here; see ``kvstore.rows.ids.stripes_of``.

    Attributes:
        name: by which users know the table, in settings and messages.
        codecs, least, greatest: what a usual push has; see ``TableGroup``.
        table, joint: the rows.
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
        self.codecs = ["none"]
        self.least, self.greatest = _bounds([description])
        self.table = RowTable(description, stripe, stripes, space=space, lineage=lineage)
        self.joint = JointTables(
            [self.table]
        )  # of one table, it looks for nothing beforehand: it never goes out of date
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
        """Return what ``changed`` has of ``version``. Raises ``KeyError`` if it is not known any more."""
        parts = self._changed[version]
        if len(parts) > 1:
            parts = self._changed[version] = [united(parts)]
        return parts[0]

    def note_changed(self, *parts: Ids) -> None:
        """Note which rows the update has changed that makes the present version: all in ``parts``."""
        version = self.rounds.version
        # They may be of a message, which may go.
        self.add_changed(version, [ids if ids.base is None else ids.copy() for ids in parts])

    def add_changed(self, version: int, parts: Sequence[Ids]) -> None:
        """Note which rows the update has changed that has made ``version``, the last one that is noted."""
        self._changed[version] = parts
        if len(self._changed) > KEPT:
            self._changed = {clock: kept for clock, kept in self._changed.items() if clock > version - KEPT}


_EVERY = np.iinfo(np.int64)


def _bounds(tables: Sequence[Table]) -> tuple[Bounds, Bounds]:
    """Return the least and the greatest id that rows of each table can have."""
    rows = [table.rows for table in tables]
    least = np.array([_EVERY.min if each is None else 0 for each in rows])
    return least, np.array([_EVERY.max if each is None else each - 1 for each in rows])


@dataclass(slots=True)
class GroupContribution(Contributed):
    """A contribution to all tables of a group: the rows of each, one after the other; see ``RowContribution``."""

    ranks: Sequence[int]
    clock: int
    batch: RowBatch
    hyper: UpdateHyperparameters
    request: RequestName | None

    def of(self, place: int) -> RowContribution:
        batch = self.batch
        part = slice(*batch.starts[place : place + 2])
        return RowContribution(
            self.ranks, self.clock, batch.ids[part], batch.rows[part], self.hyper, (batch, place), self.request
        )


class TableGroup(Target[GroupContribution]):
    """Tables that are pushed together: one set of rounds for all of them.

    Most workers push the same list of tables in each message. Each table then needs no round, contribution and list of
    waiting requests of its own. A group is to its tables what a bucket is to its segments. It is made of tables that
    are at the same point, and whatever needs one of them by itself splits it first. To make or to split a group changes
    no row and no round, and the same requests wait.

    Attributes:
        targets: the tables; see ``alike`` and ``at_one_point``.
        codecs: how the rows of each travel in a usual push.
        width, dtype, row_bytes, description, stripe, stripes: of the first, and alike in all.
        least, greatest: the ids that rows of each table can have.
    """

    def __init__(self, targets: Sequence[RowTarget]) -> None:
        first = targets[0]
        segments = HeldSegments.joined([target.segments for target in targets])
        super().__init__(segments, first.rounds.copy())  # type: ignore[arg-type]  # there is no contribution in it
        self.judged, self.last_at = first.judged, first.last_at
        self.targets = targets
        self.tables = [target.table for target in targets]
        self.joint = JointTables(self.tables)
        self.updater = first.updater
        self.codecs = ["none"] * len(targets)
        self.width, self.dtype, self.row_bytes = first.width, first.dtype, first.row_bytes
        self.description, self.stripe, self.stripes = first.description, first.stripe, first.stripes
        self.least, self.greatest = _bounds([target.description for target in targets])
        self._changed: dict[int, list[tuple[Ids, Sequence[int]]]] = {}

    def renew(self) -> None:
        """Look at the tables again: rows have been made."""
        self.joint = JointTables(self.tables)

    def note_changed(self, batches: Sequence[tuple[Ids, Sequence[int]]]) -> None:
        """Do what ``RowTarget.note_changed`` does, of all tables."""
        version = self.rounds.version
        self._changed[version] = [(ids if ids.base is None else ids.copy(), starts) for ids, starts in batches]
        if len(self._changed) > KEPT:
            self._changed = {clock: kept for clock, kept in self._changed.items() if clock > version - KEPT}

    def split(self) -> None:
        """Let each table have rounds of its own again, and what waits for them. The group cannot be used any more."""
        self.divide(self.targets, GroupContribution.of)
        for place, target in enumerate(self.targets):
            target.judged, target.last_at = self.judged, self.last_at
            for version, batches in self._changed.items():
                target.add_changed(version, [ids[slice(*starts[place : place + 2])] for ids, starts in batches])
            target.group = None
        self.rounds, self.parked = self.rounds.copy(), []


class TableGroups:
    """The groups of one store. No table is in two."""

    def __init__(self) -> None:
        self._by_ids: dict[tuple[int, ...], TableGroup] = {}
        self._lists: dict[int, tuple[int, ...]] = {}  # by segment: what it has been pushed with last
        self._changes: dict[int, int] = {}  # by segment: how often that was another list than before

    def find(self, ids: Sequence[int]) -> TableGroup | None:
        """Return the group of segments ``ids``, in this order."""
        return self._by_ids.get(tuple(ids)) if self._by_ids else None

    def learn(self, targets: Sequence[RowTarget]) -> None:
        """Make a group of ``targets``, which have just been pushed together, if they can be one."""
        if len(targets) < 2 and not self._lists:
            return
        if not self._mixed(targets) and len(targets) > 1 and at_one_point(targets) and alike(targets):
            self.make(targets)

    def make(self, targets: Sequence[RowTarget]) -> TableGroup:
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

    def _mixed(self, targets: Sequence[RowTarget]) -> bool:
        """Return whether one of ``targets`` is pushed in lists that change, so that a group would be split again."""
        listed = tuple(target.number for target in targets)
        mixed = False
        for number in listed:
            if self._lists.setdefault(number, listed) != listed:
                self._lists[number] = listed
                self._changes[number] = self._changes.get(number, 0) + 1
            mixed |= self._changes.get(number, 0) >= MOST_LISTS
        return mixed


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
