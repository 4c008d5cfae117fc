"""The usual push of rows: it is to one table, or to a group of them, and has no error. Pure.

A few steps tell whether a push is usual. ``row_requests`` checks all others, and says what is wrong with them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvstore import wire
from kvstore.rows.ids import Ids, stripes_of
from kvstore.rows.joint_ids import all_rise
from kvstore.rows.layout import ALIGNED
from kvstore.rows.sums import RowBatch, Rows, has_nan
from servers.store.row_target import RowTarget
from servers.store.table_group import TableGroup

_NARROW, _WIDE = np.dtype(np.int32), np.dtype(np.int64)


def usual_push(message: wire.PushRows, target: RowTarget) -> tuple[Ids, Rows] | None:
    """Return the ids and the rows that ``message`` pushes to ``target``, its only table; None if it is unusual.

    Returns:
        Ids that rise, and are of the table and stripe that are here; and their rows, of shape (n, width), a view of the
        message without NaN. The message wants just these rows.
    """
    if message.union or message.codecs[0] != "none" or not wants_pushed(message):
        return None
    ids_buffer, rows_buffer, _ = message.buffers
    count, dtype = message.counts[0], id_dtype(message.wide)
    nbytes = count * target.row_bytes
    if not count or _nbytes(ids_buffer) != count * dtype.itemsize or _nbytes(rows_buffer) != nbytes or nbytes % ALIGNED:
        return None
    ids = np.frombuffer(ids_buffer, dtype)
    if not np.logical_and.reduce(ids[1:] > ids[:-1]) or not _in_range(target, ids) or not all_in_stripe(target, ids):
        return None
    rows = np.frombuffer(rows_buffer, target.dtype).reshape(count, target.width)
    return None if has_nan(rows) else (ids.astype(np.int64, copy=False), rows)


class PushToGroup(NamedTuple):
    """What a message pushes to a group.

    Attributes:
        batch: the rows, a view of the message without NaN.
        answer: whether their new rows are what the message wants.
    """

    batch: RowBatch
    answer: bool


def usual_push_of_group(message: wire.PushRows, group: TableGroup) -> PushToGroup | None:
    """Return what ``message`` pushes to ``group``, whose segments it lists; None if it is unusual.

    Returns:
        Ids that rise in each table, and are of the tables and stripe that are here. So are those that it wants.
    """
    if message.union or message.codecs != group.codecs or len(message.buffers) != 3:
        return None
    count, rows_buffer = sum(message.counts), message.buffers[1]
    ids = _ids_of(message, group, message.buffers[0], message.counts)
    if not count or ids is None or _nbytes(rows_buffer) != count * group.row_bytes:
        return None
    answer = wants_pushed(message)
    if not answer and _ids_of(message, group, message.buffers[2], message.wanted) is None:
        return None
    rows = np.frombuffer(rows_buffer, group.dtype).reshape(count, group.width)
    if has_nan(rows):
        return None
    starts = list(itertools.accumulate(message.counts, initial=0))
    return PushToGroup(RowBatch(ids.astype(np.int64, copy=False), rows, starts), answer)


def _ids_of(message: wire.PushRows, group: TableGroup, buffer: wire.Buffer, counts: Sequence[int]) -> Ids | None:
    """Return the ids of each table in ``buffer``; None unless they are usual."""
    count, dtype = sum(counts), id_dtype(message.wide)
    if _nbytes(buffer) != count * dtype.itemsize:
        return None
    if not count:
        return np.empty(0, np.int64)
    ids = np.frombuffer(buffer, dtype)
    starts = list(itertools.accumulate(counts, initial=0))
    rise = all_rise(ids, starts, group.least, group.greatest)
    return ids if rise and all_in_stripe(group.targets[0], ids) else None


def wants_pushed(message: wire.PushRows) -> bool:
    """Return whether ``message`` wants just those rows that it pushes. Its buffers need not have been checked."""
    if not message.want or message.wanted != message.counts or len(message.buffers) != 3:
        return False
    pushed, _, wanted = message.buffers
    if type(pushed) is bytearray and type(wanted) is bytearray:
        return pushed == wanted
    return bytes(pushed) == bytes(wanted)  # views would be compared element by element


def all_in_stripe(target: RowTarget, ids: Ids) -> bool:
    """Return whether all ``ids`` are of the stripe of ``target`` that is here."""
    if target.stripes == 1 or not len(ids):
        return True
    mask = target.stripes - 1
    if not target.description.grows and not target.stripes & mask:  # a remainder costs ten times as much
        return not int(np.bitwise_or.reduce(ids ^ target.stripe)) & mask
    return bool((stripes_of(target.description, ids, target.stripes) == target.stripe).all())


def id_dtype(wide: bool) -> np.dtype[np.signedinteger]:
    """Return the dtype of ids in messages."""
    return _WIDE if wide else _NARROW


def _in_range(target: RowTarget, ids: Ids) -> bool:
    """Return whether all ``ids``, which rise, can be in the table."""
    rows = target.description.rows
    return rows is None or 0 <= ids.item(0) <= ids.item(-1) < rows


def _nbytes(buffer: wire.Buffer) -> int:
    return memoryview(buffer).nbytes
