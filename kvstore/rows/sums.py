"""Sums of rows with the same id, always in the same order, so that equal pushes give equal bits. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from kvstore.rows.ids import Ids
from kvstore.rows.slabs import Array, scatter

Rows: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"  # of shape (n, width)
Positions: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"
Room: TypeAlias = "Callable[[tuple[int, int], np.dtype[Any]], Rows]"  # makes memory for rows of a shape and a dtype
# Level k adds the k-th row of every id that has so many, in one call. The most frequent id (padding, a common word) may
# have half of all rows: there would be a call for each of them, with one row.
LEVELS = 16  # up to so many rows of an id are summed with the others' in the same rank; the rest one id at a time


class RowBatch(NamedTuple):
    """Rows of several tables of one width, table by table."""

    ids: Ids
    rows: Rows
    starts: Sequence[int]  # where the rows of each table begin, and where the last table's end

    def ids_of_each(self) -> list[Ids]:
        return [self.ids[start:stop] for start, stop in itertools.pairwise(self.starts)]

    def of_each(self) -> list[tuple[Ids, Rows]]:
        return [(self.ids[start:stop], self.rows[start:stop]) for start, stop in itertools.pairwise(self.starts)]


class TableIds(NamedTuple):
    """Ids of several tables, which rise in each."""

    ids: Ids
    starts: Sequence[int]  # where the ids of each table begin, and where the last table's end


class Union(NamedTuple):
    """The ids of two parts, those of each table rising."""

    ids: Ids
    starts: Sequence[int]
    first: Positions  # where in it the ids of each part are
    second: Positions
    shared: tuple[Positions, Positions]  # where the ids are that both have, in each part


def _quiet() -> np.errstate:
    """Return a block in which numpy neither raises nor warns: sums overflow and underflow in silence, as torch's do."""
    # A program that sets np.seterr(all="raise") looks for its own overflows. One errstate for all calls would keep its
    # state in itself in numpy before 2.0, where threads would take each other's.
    return np.errstate(all="ignore")


def coalesce(ids: Ids, rows: Rows) -> tuple[Ids, Rows]:
    """Return the unique ``ids``, sorted, and the sum of each one's rows, in the order of their positions.

    Args:
        rows: of shape (n, width), contiguous; they are not changed.
    """
    if len(ids) < 2 or bool((ids[1:] > ids[:-1]).all()):
        return ids, rows
    order = _order(ids)
    ordered = ids[order]
    new = np.empty(len(ids), bool)
    new[0] = True
    np.not_equal(ordered[1:], ordered[:-1], out=new[1:])
    if new.all():
        return ordered, rows.take(order, axis=0)
    starts = np.flatnonzero(new)
    with _quiet():
        return ordered[starts], _summed(rows, order, starts)


def _order(ids: Ids) -> Positions:
    """Return a stable order that sorts ``ids``."""
    if ids.min() >= 0 and ids.max() < 1 << 31 and len(ids) < 1 << 31:
        keys = ids << 32  # the positions in the lower half make it stable, and numpy sorts integers faster than orders
        keys |= np.arange(len(ids))
        keys.sort()
        keys &= 0xFFFFFFFF
        return keys
    order: Positions = np.argsort(ids, kind="stable")
    return order


def _summed(rows: Rows, order: Positions, starts: Positions) -> Rows:
    counts = np.diff(starts, append=len(order))
    sums: Rows = rows.take(order[starts], axis=0)
    left = np.flatnonzero(counts > 1)
    for rank in range(1, LEVELS):
        if not len(left):
            return sums
        sums[left] += rows.take(order[starts[left] + rank], axis=0)
        left = left[counts[left] > rank + 1]
    for group in left.tolist():
        start = starts[group]
        rest = rows.take(order[start + LEVELS : start + counts[group]], axis=0)
        # Along rows numpy adds one after the other, but not along a single column: there it adds pairwise.
        rest = np.concatenate([sums[group : group + 1], rest])
        sums[group] = np.add.accumulate(rest, axis=0)[-1] if rest.shape[1] < 2 else np.add.reduce(rest, axis=0)
    return sums


def sum_rows(parts: Sequence[tuple[Ids, Rows]], room: Room = np.empty) -> tuple[Ids, Rows]:
    """Return all ids of ``parts``, sorted, and for each the sum of its rows, in the order of the parts.

    Args:
        parts: at least one; in each the ids rise. They are not changed.
    """
    first_ids, first = parts[0]
    if len(parts) == 1:  # copied all the same: a step may overwrite sums, and parts lie in messages
        return first_ids, _copied(first, room)
    if all(len(ids) == len(first_ids) and np.array_equal(ids, first_ids) for ids, _ in parts[1:]):
        sums = room(first.shape, first.dtype)
        with _quiet():
            np.add(first, parts[1][1], out=sums)
            for _, rows in parts[2:]:
                sums += rows
        return first_ids, sums
    if len(parts) == 2:
        one, other = (RowBatch(ids, rows, [0, len(ids)]) for ids, rows in parts)
        merged = _merged(one, other, room)
        return merged.ids, merged.rows
    union = united([ids for ids, _ in parts])
    sums = room((len(union), first.shape[1]), first.dtype)
    # Sums begin as copies of the first rows, not as zeros: -0.0 + 0.0 is 0.0, another bit than one worker's row alone.
    there = np.zeros(len(union), bool)
    for ids, rows in parts:
        at = np.searchsorted(union, ids)
        again = np.flatnonzero(there[at])
        both = at[again]
        added = sums.take(both, axis=0)
        with _quiet():
            added += rows.take(again, axis=0)
        scatter(sums, at, rows)
        scatter(sums, both, added)
        there[at] = True
    return union, sums


def united(lists: Sequence[Ids]) -> Ids:
    """Return all ids of ``lists``, of which there is at least one, each once, rising."""
    union = np.concatenate(lists)
    union.sort()  # np.unique would hash them first
    new = np.empty(len(union), bool)
    new[:1] = True
    np.not_equal(union[1:], union[:-1], out=new[1:])
    return union[new]


def has_nan(*arrays: Rows) -> bool:
    """Whether an element of ``arrays``, which are contiguous, is NaN: then the sum of all squares is one, else never.

    BLAS computes it in three quarters of the time that the least element takes.
    """
    squares: Any = 0.0
    with _quiet():
        for rows in arrays:
            flat = rows.reshape(-1)
            squares = squares + flat.dot(flat)
    return bool(squares != squares)


def sum_batches(parts: Sequence[RowBatch], room: Room = np.empty) -> RowBatch:
    """Return what ``sum_rows`` does for each of several tables, with as many calls as for one.

    Args:
        parts: at least one, all of the same tables, whose rows are of one width.
    """
    summed = parts[0]
    if len(parts) == 1:
        return summed._replace(rows=_copied(summed.rows, room))
    for part in parts[1:-1]:
        summed = _merged(summed, part, np.empty)
    return _merged(summed, parts[-1], room)


def _copied(rows: Rows, room: Room) -> Rows:
    copy = room(rows.shape, rows.dtype)
    np.copyto(copy, rows)
    return copy


def _merged(first: RowBatch, second: RowBatch, room: Room) -> RowBatch:
    """Return the sums of two parts."""
    union = unite(first, second)
    pairs, again = union.shared
    sums = room((len(union.ids), first.rows.shape[1]), first.rows.dtype)
    scatter(sums, union.second, second.rows)
    scatter(sums, union.first, first.rows)
    added = first.rows.take(pairs, axis=0)
    with _quiet():
        added += second.rows.take(again, axis=0)
    scatter(sums, union.second[again], added)
    return RowBatch(union.ids, sums, union.starts)


def unite(first: TableIds | RowBatch, second: TableIds | RowBatch) -> Union:
    """Return the union of two parts, without sorting."""
    ids, other_ids = first.ids, second.ids
    at, both = matches(first, second)
    again = np.flatnonzero(both)
    pairs = at[again]
    fresh = ~both
    before = np.cumsum(fresh)
    starts = [
        start + (int(before[other - 1]) if other else 0)
        for start, other in zip(first.starts, second.starts, strict=True)
    ]
    at += before  # now in the union; one too far for those that the first has not
    at -= fresh
    own = np.ones(starts[-1], bool)
    own[at[fresh]] = False
    at_first = np.flatnonzero(own)
    union = np.empty(starts[-1], np.int64)
    union[at_first], union[at] = ids, other_ids
    return Union(union, starts, at_first, at, (pairs, again))


def matches(first: TableIds | RowBatch, second: TableIds | RowBatch) -> tuple[Positions, Array]:
    """Return before which row of ``first`` each row of ``second`` belongs, and whether it is of the same id."""
    at = _places(first, second)
    if not len(first.ids):
        return at, np.zeros(len(at), bool)
    both = first.ids.take(at, mode="clip") == second.ids
    if len(first.starts) > 2:  # there, the next table may begin with the same id
        both &= at < np.repeat(first.starts[1:], np.diff(second.starts))
    return at, both


def _places(first: TableIds | RowBatch, second: TableIds | RowBatch) -> Positions:
    """Return before which row of ``first`` each row of ``second`` belongs."""
    if len(first.starts) == 2:
        return np.searchsorted(first.ids, second.ids)
    places = np.empty(len(second.ids), np.int64)
    of_both = zip(itertools.pairwise(first.starts), itertools.pairwise(second.starts), strict=True)
    for (start, stop), (other_start, other_stop) in of_both:
        if other_start < other_stop:
            found = first.ids[start:stop].searchsorted(second.ids[other_start:other_stop])
            np.add(found, start, out=places[other_start:other_stop])
    return places
