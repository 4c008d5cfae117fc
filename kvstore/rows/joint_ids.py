"""The ids of several tables, one after the other, and checks of them: a few steps for all tables. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from kvstore.rows.ids import Ids

Bounds: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"  # of each table


def joined(ids: Sequence[Ids]) -> Ids:
    """Return the ids of at least one table, one table's after the other's."""
    return ids[0] if len(ids) == 1 else np.concatenate(ids)


def starts_of(ids: Sequence[Ids]) -> list[int]:
    """Return where in ``joined`` the ids of each table begin, and where those of the last end."""
    return list(itertools.accumulate(map(len, ids), initial=0))


def all_rise(ids: Ids, starts: Sequence[int] | Bounds, least: Bounds, greatest: Bounds) -> bool:
    """Return whether the ids of each table rise, and can be in the table.

    Args:
        ids: of all tables, as int32 or int64.
        starts: where those of each table begin, and where those of the last end.
        least, greatest: the ids that each table can have.
    """
    if not len(ids):
        return True
    falls = ids[1:] <= ids[:-1]
    if len(least) == 1:
        return bool(least[0] <= ids[0] and ids[-1] <= greatest[0]) and not np.logical_or.reduce(falls)
    bounds = np.asarray(starts)
    firsts, stops = bounds[:-1], bounds[1:]
    if not np.logical_and.reduce(firsts < stops):
        there = firsts < stops  # the others have no ids
        firsts, stops, least, greatest = firsts[there], stops[there], least[there], greatest[there]
    falls[firsts[1:] - 1] = False  # where one table's end and the next one's begin
    return not (
        np.logical_or.reduce(falls)
        or np.logical_or.reduce(ids[firsts] < least)
        or np.logical_or.reduce(ids[stops - 1] > greatest)
    )
