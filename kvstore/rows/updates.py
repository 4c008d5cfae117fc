"""Updates of tables, several with one step of their optimizer: many small ones cost little more than a large one. Pure.

There are two ways, with the same bits, because what a step does to one row does not depend on the others. The fast one,
``update_parts``, is for what one or two workers have pushed to tables that take all rows, and keep them.
``update_together`` is for the sums of any number of workers, for admission, and it lets rows go.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from kvstore.optim.updater import RowHyperparameters, RowUpdater
from kvstore.rows.halves import tensor_of
from kvstore.rows.ids import Ids
from kvstore.rows.joint_tables import JointTables
from kvstore.rows.row_table import RowTable, update_each
from kvstore.rows.slabs import Array, Slots, scatter
from kvstore.rows.stripe import beginning
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
    """Make one update of each of ``tables``; return the ids whose rows are there now and have changed.

    Args:
        tables: one, or several that ``can_step_together``.
        sums: of their gradients; the rows may be overwritten unless ``keep``.
        updater: that of the first table; None assigns the sums. If it fails, no row has changed, unless it updates all
            rows.
        joint: the tables together, if somebody keeps that. It cannot be used any more where rows have been made.
    """
    if len(tables) == 1:
        return [tables[0].update(sums.ids, sums.rows, updater, hyper, keep)]
    if updater is not None and update_parts(tables, [sums], updater, hyper, [np.empty], joint, keep) is not None:
        return sums.ids_of_each()
    return update_each(tables, sums, updater, hyper, keep)


# With two workers, the rows of each are stepped with for themselves, and only the rows that both have are summed: a
# third of the copies are saved, and the new rows of each worker lie together, so they can be its answer. Rows that both
# have are stepped with twice (once for nothing), so from one in four on the sum of all is faster.
MOST_SHARED = 4  # at most one row in so many may be in both parts: these are stepped with twice
# Workers that share most of their rows (a small table, a full batch) are told by a sample: to compare all ids costs as
# much as the sum saves.
_SAMPLE = 32  # of many rows, one in so many is looked at first
_MANY = 1024


class _Part(NamedTuple):
    """The rows of one worker, or those that both have."""

    rows: Rows
    states: Mapping[str, Array]
    grads: Rows

    def taken(self, positions: Positions, grads: Rows) -> _Part:
        states = {name: value.take(positions, axis=0) for name, value in self.states.items()}
        return _Part(self.rows.take(positions, axis=0), states, grads)

    def replace(self, positions: Positions, part: _Part) -> None:
        scatter(self.rows, positions, part.rows)
        for name, value in part.states.items():
            scatter(self.states[name], positions, value)


def update_parts(
    tables: Sequence[RowTable],
    batches: Sequence[RowBatch],
    updater: RowUpdater,
    hyper: RowHyperparameters,
    rooms: Sequence[Room],
    joint: JointTables | None = None,
    keep: bool = True,
) -> list[Rows] | None:
    """Make one update without a sum of all rows; return the new rows of each batch.

    None, and nothing has changed, where ``update_together`` with the sums is better, or the only way: a table decides
    whether a row is made, rows of a table go, all rows are updated, or the batches are much alike. If ``updater``
    fails, no row has changed or been made.

    Args:
        batches: what each of one or two workers has pushed to them.
        keep: whether the rows of the batches must stay as they are.
    """
    joint = JointTables(tables) if joint is None else joint
    if joint.evict or not updater.lazy:
        return None
    first, *others = batches
    shared = shared_rows(first, others[0]) if others and not joint.rise else ()
    if others and joint.rise:
        shared = _few(*_matches(*(joint.keys(batch.ids, batch.starts) for batch in batches)))
    if shared is None:
        return None
    places = [joint.places(batch.ids, batch.starts) for batch in batches]
    if joint.admit and any(len(each.new) for each in places):
        return None
    parts, dtype = [], tables[0].slabs[""].dtype
    for batch, each, room in zip(batches, places, rooms, strict=True):
        part = _Part(room(batch.rows.shape, dtype), updater.empty_states(len(batch.rows)), batch.rows)
        joint.gather(each, part.rows, part.states)
        if len(each.new):
            for name, state in updater.states.items():
                part.states[name][each.new] = beginning(state, part.rows[each.new])
        parts.append(part)
    stepped = list(parts)
    if shared:
        sums = first.rows.take(shared[0], axis=0)
        sums += others[0].rows.take(shared[1], axis=0)
        stepped.append(parts[0].taken(shared[0], sums))
    # Only copies are stepped with, and nothing is written before all steps are made: a step that fails changes no row.
    for part in stepped:
        tensors = {name: torch.from_numpy(value) for name, value in part.states.items()}
        rows = torch.from_numpy(part.rows)
        updater.step(tables[0].steps + 1, rows, tensor_of(part.grads), tensors, hyper, keep)
    for part, positions in zip(parts, shared, strict=False):
        part.replace(positions, stepped[-1])
    joint.write([(each, part.rows, part.states) for each, part in zip(places, parts, strict=True)])
    return [part.rows for part in parts]


def shared_rows(first: RowBatch, second: RowBatch) -> tuple[Positions, Positions] | None:
    """Return where the rows are that both have, in each; None if they are many."""
    if len(first.starts) == 2 and len(first.ids) and len(second.ids) >= _MANY:
        sample = second.ids[::_SAMPLE]
        at = first.ids.searchsorted(sample)
        if np.count_nonzero(first.ids.take(at, mode="clip") == sample) * MOST_SHARED > len(sample):
            return None
    return _few(*matches(first, second))


def _matches(first: Slots, second: Slots) -> tuple[Positions, Array]:
    at = first.searchsorted(second)
    return at, first.take(at, mode="clip") == second if len(first) else np.zeros(len(second), bool)


def _few(at: Positions, both: Array) -> tuple[Positions, Positions] | None:
    """Return where the rows are that both have, in each, from what ``matches`` returns; None if they are many."""
    again = np.flatnonzero(both)
    return None if len(again) * MOST_SHARED > len(both) else (at[again], again)
