"""Updates of several tables with one step of their optimizer: many small ones cost little more than a large one. Pure.

The bits are those of ``RowTable.update`` for each table: what a step does to one row does not depend on the others.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch

from kvstore.optim.row_updater import RowHyperparameters, RowUpdater
from kvstore.rows.ids import Ids
from kvstore.rows.joint_tables import JointTables
from kvstore.rows.row_table import RowTable, tensor_of
from kvstore.rows.sums import RowBatch


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
