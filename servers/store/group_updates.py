"""What contributions do to a group of tables: the optimizer steps with the rows of all of them. No I/O."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvstore.errors import Mismatch
from kvstore.rows.part_updates import update_in_parts
from kvstore.rows.sums import sum_batches
from kvstore.rows.updates import update_together
from servers.store.hyperparameters import UpdateHyperparameters, agreed_by
from servers.store.row_updates import RowUpdates
from servers.store.table_group import GroupContribution, TableGroup


class GroupUpdates:
    """The updates of the groups of one store, as ``RowUpdates`` would make them of each table.

    Args:
        updates: of the store's tables.
    """

    def __init__(self, updates: RowUpdates) -> None:
        self._updates = updates

    def close(self, group: TableGroup, items: Sequence[GroupContribution]) -> Exception | None:
        """Sum the contributions of a round and update; return the error. A round that fails is over, too."""
        try:
            hyper = agreed_by(items, group.segments.keys[:1])
        except Mismatch as exc:
            return exc
        return self.make(group, items, hyper)

    def make(
        self, group: TableGroup, items: Sequence[GroupContribution], hyper: UpdateHyperparameters
    ) -> Exception | None:
        """Make one update; return why it has failed, if it has."""
        if (doubt := self._updates.doubt_of(group.ids)) is not None:
            return doubt
        versions = [table.version for table in group.tables]
        try:
            self._make(group, items, hyper)
        except Exception as exc:
            return self._updates.failed(exc, group.targets, versions)[group.targets[0]]
        return None

    def _make(self, group: TableGroup, items: Sequence[GroupContribution], hyper: UpdateHyperparameters) -> None:
        tables, updater, answers = group.tables, group.updater, self._updates.answers
        numbers = self._updates.numbers(hyper)
        batches = [item.batch for item in items]
        if len(items) <= 2 and updater is not None:
            requests = [item.request for item in items]
            rooms = list(map(answers.room, requests))
            made = update_in_parts(tables, batches, updater, numbers, rooms, group.joint)
            if made is not None:
                answers.keep(requests, made, tables[:1])  # all of them change together
                group.note_changed([(batch.ids, batch.starts) for batch in batches])
                return
        with np.errstate(over="ignore", invalid="ignore"):
            sums = sum_batches(batches)
        changed = update_together(tables, sums, updater, numbers, joint=group.joint)
        group.renew()
        starts = np.cumsum([0, *map(len, changed)]).tolist()
        group.note_changed([(np.concatenate(changed), starts)])
