"""Updates of several tables with one step of their optimizer: many small ones cost little more than a large one. Pure.

The bits are those of ``RowTable.update`` for each table: what a step does to one row does not depend on the others.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from kvstore.optim.updater import RowHyperparameters, RowUpdater
from kvstore.rows.ids import Ids
from kvstore.rows.joint_tables import JointTables, RowPlaces
from kvstore.rows.row_table import RowTable, tensor_of
from kvstore.rows.slabs import Array, Slots, scatter
from kvstore.rows.sums import Positions, Room, RowBatch, Rows, matches


def can_step_together(tables: Sequence[RowTable], updaters: Sequence[RowUpdater | None]) -> bool:
    """Return whether one step can update all ``tables``, which are of one width and dtype."""
    first = updaters[0]
    return first is None or (
        first.lazy
        and all(table.steps == tables[0].steps for table in tables)
        and all(each is first or (each is not None and first.steps_as(each)) for each in updaters)
    )


def update_together(
    tables: Sequence[RowTable],
    sums: RowBatch,
    updater: RowUpdater | None,
    hyper: RowHyperparameters,
    keep: bool = False,
    joint: JointTables | None = None,
) -> list[Ids]:
    """Make one update of each of ``tables``; see ``RowTable.update``. If ``updater`` fails, no row has changed.

    Args:
        tables: see ``can_step_together``.
        sums: of their gradients; the rows may be overwritten.
        updater: that of the first table.
        hyper: see ``RowUpdater.step``.
        keep: whether the rows of ``sums`` must stay as they are.
        joint: the tables together, if somebody keeps that. It cannot be used any more where rows have been made.
    """
    joint = JointTables(tables) if joint is None else joint
    places = None if updater is None or joint.evict else joint.live(sums.ids, sums.starts)
    if updater is None or places is None:
        return _update_each(tables, sums, updater, hyper, keep)
    rows, states = np.empty(sums.rows.shape, sums.rows.dtype), updater.empty_states(len(sums.rows))
    joint.gather(places, rows, states)
    tensors = {name: torch.from_numpy(value) for name, value in states.items()}
    updater.step(tables[0].steps + 1, torch.from_numpy(rows), tensor_of(sums.rows), tensors, hyper, keep)
    joint.write([(places, rows, states)])
    return sums.ids_of_each()


def _update_each(
    tables: Sequence[RowTable], sums: RowBatch, updater: RowUpdater | None, hyper: RowHyperparameters, keep: bool
) -> list[Ids]:
    """Do what ``update_together`` does where rows are made, or go: table by table, but for the step."""
    ids = sums.ids_of_each()
    each_found = zip(tables, ids, RowTable.found(tables, ids), strict=True)
    pending = [table.begin(own, found) for table, own, found in each_found]
    grads, starts = sums.rows, sums.starts
    if any(each.kept is not None for each in pending):
        kept = [
            np.ones(stop - start, bool) if each.kept is None else each.kept
            for each, (start, stop) in zip(pending, itertools.pairwise(sums.starts), strict=True)
        ]
        grads = grads[np.concatenate(kept)]
        starts = list(itertools.accumulate((len(each.ids) for each in pending), initial=0))
    parts = [slice(start, stop) for start, stop in itertools.pairwise(starts)]
    if updater is None:
        each_table = zip(tables, pending, parts, strict=True)
        return [table.finish(each, grads[part], {}) for table, each, part in each_table]
    rows, states = np.empty(grads.shape, grads.dtype), updater.empty_states(len(grads))
    own = [{name: value[part] for name, value in states.items()} for part in parts]
    for table, each, part, values in zip(tables, pending, parts, own, strict=True):
        table.gather(each, rows[part], values)
    tensors = {name: torch.from_numpy(value) for name, value in states.items()}
    updater.step(tables[0].steps + 1, torch.from_numpy(rows), tensor_of(grads), tensors, hyper, keep)
    return [
        table.finish(each, rows[part], values, stepped=True)
        for table, each, part, values in zip(tables, pending, parts, own, strict=True)
    ]


# Updates with what one or two workers have pushed, without a sum of all rows. Pure.
#
# What a step does to a row does not depend on the others. So the rows of each worker are stepped with for themselves,
# and only the rows that both have pushed are summed. The bits are those of ``kvstore.rows.updates``, and a third of
# the copies are saved. The new rows of each worker lie together, so they can be its answer.
MOST_SHARED = 4  # at most one row in so many may be in both parts: these are stepped with twice
_SAMPLE = 32  # of many rows, one in so many is looked at first
_MANY = 1024


class _Part(NamedTuple):
    """The rows of one worker, or those that both have.

    Attributes:
        rows, states: copies of the tables' rows and of their states.
        grads: what they are updated with.
    """

    rows: Rows
    states: Mapping[str, Array]
    grads: Rows

    def taken(self, positions: Positions, grads: Rows) -> _Part:
        """Return the rows at ``positions``, to be updated with ``grads``."""
        states = {name: value.take(positions, axis=0) for name, value in self.states.items()}
        return _Part(self.rows.take(positions, axis=0), states, grads)

    def replace(self, positions: Positions, part: _Part) -> None:
        """Let the rows at ``positions`` be those of ``part``."""
        scatter(self.rows, positions, part.rows)
        for name, value in part.states.items():
            scatter(self.states[name], positions, value)


def update_in_parts(
    tables: Sequence[RowTable],
    batches: Sequence[RowBatch],
    updater: RowUpdater,
    hyper: RowHyperparameters,
    rooms: Sequence[Room],
    joint: JointTables | None = None,
) -> list[Rows] | None:
    """Make one update of each of ``tables``; see ``RowTable.update``. If ``updater`` fails, no row has changed.

    Args:
        tables: see ``kvstore.rows.updates.can_step_together``.
        batches: what each of one or two workers has pushed to them. Their rows stay as they are.
        updater: that of the first table.
        hyper: see ``RowUpdater.step``.
        rooms: for each batch, what makes the memory of its new rows.
        joint: the tables together, if somebody keeps that.

    Returns:
        The new rows of each batch; None, and nothing has changed, if an update of the sums is better, or the only one
        that is possible: for rows that are to be made, tables whose rows go, and batches that are much alike.
    """
    joint = JointTables(tables) if joint is None else joint
    if joint.evict:
        return None
    first, *others = batches
    shared = _shared(first, others[0]) if others and not joint.rise else ()
    if shared is None:
        return None
    found = [joint.live(batch.ids, batch.starts) for batch in batches]
    places = [each for each in found if each is not None]
    if len(places) < len(found):
        return None
    if others and joint.rise:
        shared = _few(*_matches(*(each.at for each in places if each.at is not None)))
        if shared is None:
            return None
    parts = [
        _gathered(joint, batch, each, updater, room) for batch, each, room in zip(batches, places, rooms, strict=True)
    ]
    stepped = list(parts)
    if shared:
        sums = first.rows.take(shared[0], axis=0)
        sums += others[0].rows.take(shared[1], axis=0)
        stepped.append(parts[0].taken(shared[0], sums))
    for part in stepped:
        tensors = {name: torch.from_numpy(value) for name, value in part.states.items()}
        rows = torch.from_numpy(part.rows)
        updater.step(tables[0].steps + 1, rows, tensor_of(part.grads), tensors, hyper, keep=True)
    for part, positions in zip(parts, shared, strict=False):
        part.replace(positions, stepped[-1])
    joint.write([(each, part.rows, part.states) for each, part in zip(places, parts, strict=True)])
    return [part.rows for part in parts]


def _shared(first: RowBatch, second: RowBatch) -> tuple[Positions, Positions] | None:
    """Return where the rows are that both have, in each; None if they are many."""
    if len(first.starts) == 2 and len(first.ids) and len(second.ids) >= _MANY:
        sample = second.ids[::_SAMPLE]
        at = first.ids.searchsorted(sample)
        if np.count_nonzero(first.ids.take(at, mode="clip") == sample) * MOST_SHARED > len(sample):
            return None
    return _few(*matches(first, second))


def _matches(first: Slots, second: Slots) -> tuple[Positions, Array]:
    """Do what ``matches`` does, for places that rise."""
    at = first.searchsorted(second)
    return at, first.take(at, mode="clip") == second if len(first) else np.zeros(len(second), bool)


def _few(at: Positions, both: Array) -> tuple[Positions, Positions] | None:
    """Return where the rows are that both have, in each, from what ``matches`` returns; None if they are many."""
    again = np.flatnonzero(both)
    return None if len(again) * MOST_SHARED > len(both) else (at[again], again)


def _gathered(joint: JointTables, batch: RowBatch, places: RowPlaces, updater: RowUpdater, room: Room) -> _Part:
    """Return copies of the rows of ``batch``."""
    rows = room(batch.rows.shape, batch.rows.dtype)
    part = _Part(rows, updater.empty_states(len(rows)), batch.rows)
    joint.gather(places, part.rows, part.states)
    return part
