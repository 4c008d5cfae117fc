"""Requests for rows of tables: what comes is checked, rows are gathered into memory that can be sent. No I/O.

A message brings ids and rows of many tables in a few buffers. They are decoded and checked as a whole as far as that is
possible: a message of 26 small tables costs little more than one of the same bytes about one table.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvstore import wire
from kvstore.errors import NotFinite, UsageError, WireError
from kvstore.rows.halves import array_dtype, widened
from kvstore.rows.ids import Ids, all_rise, joined, starts_of, stripes_of
from kvstore.rows.joint_tables import JointTables
from kvstore.rows.layout import ALIGNED, part_bytes, read_rows, write_rows
from kvstore.rows.sums import RowBatch, Rows, has_nan
from kvstore.spec import ITEMSIZE
from kvstore.transport.memory import SMALL, Memory, space
from servers.store.row_target import RowTarget, TableGroup

_PUSH_BUFFERS = 3  # ids, rows, wanted ids
_PULL_BUFFERS = 1  # wanted ids
_PADDING = bytes(16)

_NARROW, _WIDE = np.dtype(np.int32), np.dtype(np.int64)


class UsualPush(NamedTuple):
    """What a message pushes to one table, or to a group."""

    batch: RowBatch  # the rows, a view of the message without NaN. The ids of each table rise, and can be in it, here
    answer: bool  # whether their new rows are what the message wants


def usual_push(message: wire.PushRows, target: RowTarget | TableGroup) -> UsualPush | None:
    """Return what ``message`` pushes to ``target``, whose segments it lists; None if it is unusual, or wrong.

    It makes a fifth of the calls that ``pushed_rows`` makes, which says what is wrong.
    """
    if message.union or message.codecs != target.codecs or len(message.buffers) != _PUSH_BUFFERS:
        return None
    count, rows_buffer = sum(message.counts), message.buffers[1]
    dtype = message.dtype(target.dtype)
    nbytes = count * target.width * ITEMSIZE[dtype]
    if not count or _nbytes(rows_buffer) != nbytes or nbytes % ALIGNED:
        return None
    starts = list(itertools.accumulate(message.counts, initial=0))
    ids = _usual_ids(message, target, message.buffers[0], starts)
    if ids is None:
        return None
    answer = wants_pushed(message)
    if not answer:
        wanted = list(itertools.accumulate(message.wanted, initial=0))
        if _usual_ids(message, target, message.buffers[2], wanted) is None:
            return None
    rows = widened(np.frombuffer(rows_buffer, array_dtype(dtype)).reshape(count, target.width))
    return None if has_nan(rows) else UsualPush(RowBatch(ids.astype(np.int64, copy=False), rows, starts), answer)


def _usual_ids(
    message: wire.PushRows, target: RowTarget | TableGroup, buffer: wire.Buffer, starts: Sequence[int]
) -> Ids | None:
    """Return the ids in ``buffer``, of which each table's begin at ``starts``; None unless they are usual."""
    count, dtype = starts[-1], id_dtype(message.wide)
    if _nbytes(buffer) != count * dtype.itemsize:
        return None
    if not count:
        return np.empty(0, np.int64)
    ids = np.frombuffer(buffer, dtype)
    return ids if all_rise(ids, starts, target.least, target.greatest) and all_in_stripe(target, ids) else None


def wants_pushed(message: wire.PushRows) -> bool:
    """Return whether ``message`` wants just those rows that it pushes. Its buffers need not have been checked."""
    if not message.want or message.wanted != message.counts or len(message.buffers) != 3:
        return False
    pushed, _, wanted = message.buffers
    if type(pushed) is bytearray and type(wanted) is bytearray:
        return pushed == wanted
    return bytes(pushed) == bytes(wanted)  # views would be compared element by element


def all_in_stripe(target: RowTarget | TableGroup, ids: Ids) -> bool:
    """Return whether all ``ids`` are of the stripe of ``target`` that is here."""
    if target.stripes == 1 or not len(ids):
        return True
    mask = target.stripes - 1
    if not target.description.grows and not target.stripes & mask:  # a remainder costs ten times as much
        return not int(np.bitwise_or.reduce(ids ^ target.stripe)) & mask
    return bool((stripes_of(target.description, ids, target.stripes) == target.stripe).all())


def id_dtype(wide: bool) -> np.dtype[np.signedinteger]:
    return _WIDE if wide else _NARROW


def _nbytes(buffer: wire.Buffer) -> int:
    return memoryview(buffer).nbytes


class RowPart(NamedTuple):
    """The rows of one table in a message.

    Attributes:
        ids, rows: the rows.
        batch: all rows of the message, if they are of one width and as they are in memory, and the place of this table
            among its tables.
    """

    ids: Ids
    rows: Rows
    batch: tuple[RowBatch, int] | None = None


class PushedRows(NamedTuple):
    """What a message pushes."""

    parts: list[RowPart]  # to each of its tables
    answer: bool  # whether their new rows, one after the other, are what the message wants


def pushed_rows(message: wire.PushRows, targets: Sequence[RowTarget]) -> PushedRows:
    """Return what ``message`` contributes to each of ``targets``. Nothing is copied that need not be converted.

    Rows of half precision become float32, in which they are summed.

    Raises:
        UsageError: ids that do not rise, or are not of the tables and stripes that are here.
        NotFinite: a row has NaN.
        WireError: the buffers have not the lengths that the message says.
    """
    if len(targets) == 1 and (usual := usual_push(message, targets[0])) is not None:
        return PushedRows([RowPart(usual.batch.ids, usual.batch.rows)], usual.answer)
    if len(message.buffers) != _PUSH_BUFFERS:
        raise WireError(f"a push of rows has {_PUSH_BUFFERS} buffers, not {len(message.buffers)}")
    whole, ids = _checked(message, targets, message.buffers[0], message.counts, "pushed")
    wanted = wants_pushed(message)
    if not wanted:
        _checked(message, targets, message.buffers[2], message.wanted, "wanted")
    answer = wanted and not message.union and _as_answered(targets, message.codecs)
    view = memoryview(message.buffers[1]).cast("B")
    dtypes = [message.dtype(target.dtype) for target in targets]
    sizes = _part_sizes(targets, message.counts, message.codecs, dtypes)
    if sum(sizes) != len(view):
        raise WireError(
            f"{message.node} sent {len(view)} bytes of rows; {_described(targets, message.counts, message.codecs)} "
            f"are {sum(sizes)}"
        )
    if len(whole) and len(targets) > 1 and _of_one_width(targets, message.codecs):
        rows = widened(np.frombuffer(view, array_dtype(dtypes[0])).reshape(len(whole), targets[0].width))
        batch, parts = _batch(rows, whole, ids)
        _require_numbers(message, targets, parts, [batch.rows])
        return PushedRows(parts, answer)
    starts = itertools.accumulate(sizes, initial=0)
    parts = []
    for target, own, codec, dtype, start, size in zip(
        targets, ids, message.codecs, dtypes, starts, sizes, strict=False
    ):
        sent = dtype if codec == "none" else target.description.sum_dtype  # decoded, they are not rounded once more
        parts.append(RowPart(own, widened(read_rows(view[start : start + size], len(own), target.width, sent, codec))))
    _require_numbers(message, targets, parts, [part.rows for part in parts])
    return PushedRows(parts, answer)


def _require_numbers(
    message: wire.PushRows, targets: Sequence[RowTarget], parts: Sequence[RowPart], arrays: Sequence[Rows]
) -> None:
    """Raise ``NotFinite`` if one of ``arrays``, which have all rows of ``parts``, has NaN: it would spoil its row."""
    if not has_nan(*arrays):
        return
    for target, part in zip(targets, parts, strict=True):
        broken = np.flatnonzero(np.isnan(part.rows).any(axis=1))
        if len(broken):
            position = int(broken[0])
            raise NotFinite(
                f"{message.node} pushed NaN in row {part.ids[position]} (position {position}) of {target.name!r}; "
                "nothing has been updated"
            )


def _as_answered(targets: Sequence[RowTarget], codecs: Sequence[str]) -> bool:
    """Return whether the rows of a message are as they are in memory, with nothing between them."""
    return codecs.count("none") == len(codecs) and all(target.row_bytes % ALIGNED == 0 for target in targets)


def _of_one_width(targets: Sequence[RowTarget], codecs: Sequence[str]) -> bool:
    """Return whether the rows of a message are one array: nothing is between the parts of its tables."""
    width, dtype = targets[0].width, targets[0].dtype
    return (
        codecs.count("none") == len(codecs)
        and targets[0].description.row_bytes % ALIGNED == 0
        and all(target.width == width and target.dtype == dtype for target in targets)
    )


def _batch(rows: Rows, whole: Ids, ids: Sequence[Ids]) -> tuple[RowBatch, list[RowPart]]:
    starts = list(itertools.accumulate(map(len, ids), initial=0))
    batch = RowBatch(whole, rows, starts)
    ranges = itertools.pairwise(starts)
    return batch, [
        RowPart(own, rows[start:stop], (batch, place))
        for place, (own, (start, stop)) in enumerate(zip(ids, ranges, strict=True))
    ]


def require_wanted(message: wire.PullRows, targets: Sequence[RowTarget]) -> None:
    """Raise as ``pushed_rows`` does, unless ``message`` wants rows that ``targets`` can have."""
    if len(message.buffers) != _PULL_BUFFERS:
        raise WireError(f"a pull of rows has {_PULL_BUFFERS} buffer, not {len(message.buffers)}")
    _checked(message, targets, message.buffers[0], message.wanted, "wanted")


def wanted_ids(message: wire.PushRows | wire.PullRows) -> list[Ids]:
    """Return the ids of the rows of each table that the answer brings; the message has been checked."""
    return _divided(_decoded(message, message.buffers[-1], message.wanted), message.wanted)


def gathered(
    targets: Sequence[RowTarget],
    ids: Sequence[Ids],
    codecs: Sequence[str],
    memory: Memory,
    joint: JointTables | None = None,
) -> wire.Buffer:
    """Return the rows ``ids`` of each of ``targets`` as they are now, encoded, in one buffer that can be sent.

    ``joint`` are their tables together, if somebody keeps that.
    """
    counts = list(map(len, ids))
    sizes = _part_sizes(targets, counts, codecs, [target.dtype for target in targets])
    nbytes = sum(sizes)
    buffer = memory.allocate(nbytes) if nbytes >= SMALL else space(nbytes)
    if nbytes and _of_one_width(targets, codecs):
        rows = np.frombuffer(buffer, array_dtype(targets[0].dtype)).reshape(sum(counts), targets[0].width)
        joint = JointTables([target.table for target in targets]) if joint is None else joint
        joint.pull(joined(ids), starts_of(ids), rows)
        return buffer
    stop = 0
    for target, own, codec, size in zip(targets, ids, codecs, sizes, strict=True):
        if not size:
            continue
        start, stop = stop, stop + size
        buffer[stop - len(_PADDING) : stop] = _PADDING  # what memory held before is nobody's business
        count, width = len(own), target.width
        if codec == "none":
            out = np.frombuffer(buffer, array_dtype(target.dtype), count * width, start).reshape(count, width)
            target.table.pull(own, out)
        else:
            rows = np.empty((count, width), array_dtype(target.dtype))
            target.table.pull(own, rows)
            write_rows(rows, codec, buffer[start:stop])
    return buffer


def packed(ids: Sequence[Ids], wide: bool) -> wire.Buffer:
    whole = np.concatenate(ids) if ids else np.empty(0, np.int64)
    return whole.astype(id_dtype(wide), copy=False).data.cast("B")


def _checked(
    message: wire.PushRows | wire.PullRows,
    targets: Sequence[RowTarget],
    buffer: wire.Buffer,
    counts: Sequence[int],
    what: str,
) -> tuple[Ids, list[Ids]]:
    """Return all ids in ``buffer``, and the ids of each table, once all have been checked."""
    whole = _decoded(message, buffer, counts)
    divided = _divided(whole, counts)
    if len(whole):
        _require_rising(message, targets, whole, divided, what)
        _require_here(message, targets, whole, divided, what)
    return whole, divided


def _decoded(message: wire.PushRows | wire.PullRows, buffer: wire.Buffer, counts: Sequence[int]) -> Ids:
    dtype, count = id_dtype(message.wide), sum(counts)
    view = memoryview(buffer)
    if view.nbytes != count * dtype.itemsize:
        raise WireError(f"{message.node} sent {view.nbytes} bytes of ids; {count} are {count * dtype.itemsize}")
    if not count:
        return np.empty(0, np.int64)
    return np.frombuffer(view, dtype).astype(np.int64, copy=False)


def _divided(whole: Ids, counts: Sequence[int]) -> list[Ids]:
    if len(counts) == 1:
        return [whole]
    stops = itertools.accumulate(counts)
    return [whole[stop - count : stop] for count, stop in zip(counts, stops, strict=True)]


def _require_rising(
    message: wire.PushRows | wire.PullRows, targets: Sequence[RowTarget], whole: Ids, divided: Sequence[Ids], what: str
) -> None:
    falls = whole[1:] <= whole[:-1]
    if len(divided) > 1:
        firsts = [stop - 1 for stop in itertools.accumulate(map(len, divided)) if 0 < stop < len(whole)]
        falls[firsts] = False  # where one table's end and the next one's begin
    if not falls.any():
        return
    for target, ids in zip(targets, divided, strict=True):
        falling = np.flatnonzero(ids[1:] <= ids[:-1])
        if len(falling):
            position = int(falling[0]) + 1
            raise UsageError(
                f"{message.node} {_VERBS[what]} rows of {target.name!r} whose ids do not rise: {ids[position]} "
                f"at position {position} follows {ids[position - 1]}"
            )


def _require_here(
    message: wire.PushRows | wire.PullRows, targets: Sequence[RowTarget], whole: Ids, divided: Sequence[Ids], what: str
) -> None:
    """Raise ``UsageError`` unless all ids, which rise, are in range, and of the stripes that are here."""
    for target, ids in zip(targets, divided, strict=True):
        rows = target.description.rows
        if rows is not None and len(ids) and (ids[0] < 0 or ids[-1] >= rows):
            position = 0 if ids[0] < 0 else int(np.searchsorted(ids, rows))
            raise UsageError(
                f"{message.node} {_VERBS[what]} row {ids[position]} (position {position}) of {target.name!r}, "
                f"whose rows are 0 to {rows - 1}"
            )
    likeness = {(target.description.grows, target.stripe, target.stripes) for target in targets}
    if len(likeness) == 1 and all_in_stripe(targets[0], whole):
        return
    for target, ids in zip(targets, divided, strict=True):
        if not all_in_stripe(target, ids):
            position = int(np.flatnonzero(stripes_of(target.description, ids, target.stripes) != target.stripe)[0])
            raise UsageError(
                f"{message.node} {_VERBS[what]} row {ids[position]} (position {position}) of {target.name!r}, which is "
                f"not on this server: it has stripe {target.stripe} of {target.stripes}"
            )


_VERBS = {"pushed": "pushed", "wanted": "asked for"}


def _part_sizes(
    targets: Sequence[RowTarget], counts: Sequence[int], codecs: Sequence[str], dtypes: Sequence[str]
) -> list[int]:
    return [
        part_bytes(count, target.width, dtype, codec)
        for target, count, codec, dtype in zip(targets, counts, codecs, dtypes, strict=True)
    ]


def _described(targets: Sequence[RowTarget], counts: Sequence[int], codecs: Sequence[str]) -> str:
    parts = [
        f"{count} rows of {target.name!r} as {codec}"
        for target, count, codec in zip(targets, counts, codecs, strict=True)
    ]
    return ", ".join(parts[:3]) + (f" and {len(parts) - 3} more" if len(parts) > 3 else "")
