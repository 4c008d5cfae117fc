"""Pushes that have some rows of arrays, as of sparse gradients: checked, and summed row by row. Pure.

They are contributions to buckets as all others are, and their elements are those of a ``RowRange``. So buckets may be
divided between them, and a round may have whole arrays of some workers and rows of others.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from kvstore import wire
from kvstore.errors import Mismatch, UsageError, WireError
from kvstore.rows.ids import Ids
from kvstore.rows.sums import Room, RowBatch, sum_rows
from kvstore.rows.updates import shared_rows
from kvstore.spec import Key
from kvstore.values import PayloadRange, RowRange, RowWindow, as_dtype, cut, from_buffer, to_buffer
from servers.store.target import HeldSegments

_BUFFERS = 3  # numbers of rows, ids, rows


def is_rows(payload: Sequence[PayloadRange]) -> bool:
    """Whether a contribution has some rows of its arrays only."""
    return len(payload) > 0 and type(payload[0]) is RowRange


def rows_of(
    who: Any, runs: Sequence[Sequence[int]], buffers: Sequence[wire.Buffer], segments: HeldSegments, dtype: str
) -> list[RowRange]:
    """Return the rows that ``buffers`` bring of ``segments``, checked; see ``wire.Push.runs``.

    Raises:
        UsageError: ids that do not rise, or are not in the segments; rows of another width than the array's.
        WireError: the buffers have not the lengths that they say.
    """
    if len(buffers) != _BUFFERS:
        raise WireError(f"a push of some rows has {_BUFFERS} buffers, not {len(buffers)}")
    counts = _integers(buffers[0], len(runs), "numbers of rows").tolist()
    if min(counts) < 0:
        raise WireError(f"{min(counts)} rows of an array")
    ids = _integers(buffers[1], sum(counts), "ids")
    lengths = [count * width for count, (_, _, width) in zip(counts, runs, strict=True)]
    itemsize = as_dtype(dtype).itemsize
    if memoryview(buffers[2]).nbytes != sum(lengths) * itemsize:
        raise WireError(f"{memoryview(buffers[2]).nbytes} bytes of rows; {sum(lengths)} {dtype} are expected")
    values = from_buffer(buffers[2], dtype) if sum(lengths) else torch.empty(0, dtype=as_dtype(dtype), device="cpu")
    ranges: list[RowRange] = []
    place = at = row = start = 0
    sizes = [spec.size for spec in segments.specs]
    for (number, first, width), count, length in zip(runs, counts, lengths, strict=True):
        window = RowWindow(first, sum(sizes[place : place + number]), width)
        own = ids[row : row + count]
        _require(who, segments.keys[place], segments.specs[place].shape, window, own)
        ranges.append(RowRange(start, window, own, values[at : at + length].view(count, width)))
        place, at, row, start = place + number, at + length, row + count, start + window.size
    return ranges


def _integers(buffer: wire.Buffer, count: int, what: str) -> Ids:
    view = memoryview(buffer)
    for itemsize, dtype in ((8, np.int64), (4, np.int32)):
        if view.nbytes == count * itemsize:
            return np.frombuffer(view, dtype).astype(np.int64, copy=False) if count else np.empty(0, np.int64)
    raise WireError(f"{view.nbytes} bytes of {what}, where there are {count}")


def _require(who: Any, key: Key, shape: Sequence[int], window: RowWindow, ids: Ids) -> None:
    """Raise ``UsageError`` unless rows ``ids`` can be those of segments in ``window``.

    ``shape`` is that of the first segment: flat where the array is cut.
    """
    if not window.size:
        raise UsageError(f"{who} pushed rows of {key!r}, an array without elements")
    if len(shape) > 1 and (window.first, window.width * shape[0]) != (0, window.size):
        raise UsageError(
            f"{who} pushed rows of {window.width} elements of {key!r}, whose shape is {shape}: a row has "
            f"{window.size // max(1, shape[0])}"
        )
    if not len(ids):
        return
    falls = ids[1:] <= ids[:-1]
    if np.count_nonzero(falls):
        position = int(falls.argmax()) + 1
        raise UsageError(
            f"{who} pushed rows of {key!r} whose ids do not rise: {ids[position]} at position {position} follows "
            f"{ids[position - 1]}"
        )
    least, stop = window.rows
    if ids[0] < least or ids[-1] >= stop:
        position = 0 if ids[0] < least else int(np.searchsorted(ids, stop))
        raise UsageError(
            f"{who} pushed row {ids[position]} (position {position}) of {key!r}, of which this server has the rows "
            f"{least} to {stop - 1}"
        )


def apart(payloads: Sequence[Sequence[Any]], dtype: str) -> list[list[RowRange]] | None:
    """Return rows of two workers to step with one after the other, and last the sums of the rows that both have.

    That saves a third of the copies; see ``update_parts``. None where the sum of all is better, or the only way.
    """
    if len(payloads) != 2 or len(payloads[0]) != 1 or len(payloads[1]) != 1:
        return None
    (first,), (second,) = payloads
    if first.window != second.window or not first.rows.dtype == second.rows.dtype == as_dtype(dtype):
        return None
    shared = shared_rows(*(RowBatch(each.ids, each.rows.numpy(), [0, len(each.ids)]) for each in (first, second)))
    if shared is None:
        return None
    if not len(shared[0]):
        return [[first], [second]]
    at, again = map(torch.from_numpy, shared)
    both = RowRange(first.start, first.window, first.ids[shared[0]], first.rows[at] + second.rows[again])
    return [[first], [second], [both]]


def summed(payloads: Sequence[Sequence[Any]], key: Key, dtype: str, room: Room | None) -> list[RowRange]:
    """Return the sum of ``payloads``, which all are rows of the same elements, row by row, from first to last.

    Args:
        key: of these elements, for messages.
        room: makes the memory of the sum. None: that of a single payload is returned as it is.

    Raises:
        Mismatch: the rows are not of one width.
    """
    starts = sorted({part.start for payload in payloads for part in payload})
    stops = [*starts[1:], payloads[0][-1].stop]
    return [
        _summed([part for payload in payloads for part in cut(payload, start, stop)], key, start, dtype, room)
        for start, stop in zip(starts, stops, strict=True)
    ]


def _summed(parts: Sequence[Any], key: Key, start: int, dtype: str, room: Room | None) -> RowRange:
    window = parts[0].window
    for part in parts:
        if part.window != window:
            raise Mismatch(
                f"workers push rows of {window.width} and of {part.window.width} elements of {key!r} in one round"
            )
    if len(parts) == 1 and room is None and parts[0].rows.dtype == as_dtype(dtype):
        return RowRange(start, window, parts[0].ids, parts[0].rows)
    rows = [(part.ids, part.rows.to(as_dtype(dtype)).numpy()) for part in parts]
    ids, sums = sum_rows(rows, np.empty if room is None else room)
    return RowRange(start, window, ids, torch.from_numpy(sums))


def described(parts: Sequence[RowRange], sizes: Sequence[int]) -> tuple[list[list[int]], list[wire.Buffer]]:
    """Return the runs and the buffers of a message that brings ``parts`` of segments of ``sizes``."""
    stops = list(itertools.accumulate(sizes))
    ends = [0, *(bisect.bisect_right(stops, part.stop) for part in parts)]
    runs = [
        [end - before, part.window.first, part.window.width]
        for part, (before, end) in zip(parts, itertools.pairwise(ends), strict=True)
    ]
    counts = np.array([len(part.ids) for part in parts], np.int64)
    ids = np.concatenate([part.ids for part in parts])
    rows = parts[0].rows if len(parts) == 1 else torch.cat([part.rows.reshape(-1) for part in parts])
    return runs, [counts.data.cast("B"), ids.data.cast("B") if len(ids) else b"", to_buffer(rows)]
