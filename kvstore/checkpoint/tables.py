"""Tables in the files of a checkpoint: rows page by page, and what decides how each stripe goes on. Names, and reading.

``7/rows/0/ids`` has the ids of the first page of segment 7, ``7/rows/0/values`` their rows, ``7/rows/0/seen`` and the
like what else each row has, and ``7/rest/numbers`` and the like what the stripe has beside its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from kvstore.errors import CheckpointError
from kvstore.rows.frozen_rows import Page
from kvstore.rows.halves import array_of_rows
from kvstore.rows.ids import stripes_of
from kvstore.table import Table

IDS, VALUES = "ids", "values"
COUNTED = (("young.ids", "young.counts"), ("old.ids", "old.counts"))  # parts of ``RowTable.rest``
NUMBERS = "numbers"
MOST_NUMBERS = 5  # version, steps, rows made, rows gone, ids refused

ReadTensor = Callable[[str], torch.Tensor]
Rest = dict[str, Any]


def page_name(segment: int, page: int, part: str) -> str:
    """Return the name in its file of a part of a page of a segment: ``IDS``, ``VALUES``, or of what else rows have."""
    return f"{segment}/rows/{page}/{part}"


def rest_name(segment: int, part: str) -> str:
    """Return the name in its file of a part of what a segment has beside its rows."""
    return f"{segment}/rest/{part}"


class StripeNames(NamedTuple):
    """What a file has of a segment."""

    pages: Mapping[int, list[str]]
    rest: list[str]

    @classmethod
    def of(cls, names: Iterable[str]) -> StripeNames:
        pages: dict[int, list[str]] = {}
        rest = []
        for name in names:
            _, kind, *others = name.split("/", 3)
            if kind == "rows" and len(others) == 2 and others[0].isdecimal():
                pages.setdefault(int(others[0]), []).append(others[1])
            elif kind == "rest" and others:
                rest.append("/".join(others))
        return cls(pages, rest)


def as_array(tensor: torch.Tensor) -> Any:
    """Return ``tensor`` as an array of numpy, as tables have it.

    Raises:
        CheckpointError: numpy has no such dtype.
    """
    try:
        return array_of_rows(tensor)
    except TypeError as exc:
        raise CheckpointError(str(exc)) from None


def read_page(table: Table, segment: int, page: int, parts: Iterable[str], read: ReadTensor) -> Page:
    """Return a page of a segment of ``table``. Raises ``CheckpointError`` if it is not one of this table."""
    tensors = {part: read(page_name(segment, page, part)) for part in parts}
    values = tensors.pop(VALUES, None)
    arrays = {part: as_array(tensor) for part, tensor in tensors.items()}
    ids = arrays.pop(IDS, None)
    if ids is None or values is None or ids.dtype != np.int64 or ids.ndim != 1:
        raise CheckpointError(f"page {page} of segment {segment} has no ids, or no rows")
    found = (tuple(values.shape), str(values.dtype).removeprefix("torch."))
    if found != ((len(ids), table.width), table.dtype) or any(part.shape[:1] != ids.shape for part in arrays.values()):
        raise CheckpointError(f"page {page} of segment {segment} is {found[1]}{found[0]}, not of {table}")
    outside = table.rows is not None and bool(((ids < 0) | (ids >= table.rows)).any())  # one that grows takes any id
    if outside or len(np.unique(ids)) < len(ids):
        raise CheckpointError(f"page {page} of segment {segment} has ids that are not of {table}, or one twice")
    return Page(ids, as_array(values), arrays)


def are_rest(parts: Mapping[str, torch.Tensor]) -> bool:
    """Return whether ``parts`` are what a stripe has beside its rows."""
    if any(part.dtype != torch.int64 or part.ndim != 1 for part in parts.values()):
        return False
    counted = all(
        (ids in parts) == (counts in parts) and (ids not in parts or len(parts[ids]) == len(parts[counts]))
        for ids, counts in COUNTED
    )
    return counted and NUMBERS in parts and len(parts[NUMBERS]) == MOST_NUMBERS


def shared_out(table: Table, rests: Iterable[Rest], rows: Sequence[int]) -> list[Rest]:
    """Return what each new stripe has beside its rows, from what the old ones had.

    All old stripes have had the same updates, but where each push is one: then the highest number counts. What is
    counted of rows that are not there any more is the first stripe's.
    """
    every = list(rests)
    numbers = np.stack([rest[NUMBERS] for rest in every])
    version, steps = numbers[:, :2].max(axis=0).tolist()
    made, _, refused = numbers[:, 2:].sum(axis=0).tolist()
    gone = made - sum(rows)
    own: list[Rest] = [
        {NUMBERS: np.array([version, steps, count, 0, 0] if stripe else [version, steps, count + gone, gone, refused])}
        for stripe, count in enumerate(rows)
    ]
    for ids_name, counts_name in COUNTED:
        if not all(ids_name in rest for rest in every):
            continue
        ids = np.concatenate([rest[ids_name] for rest in every])
        counts = np.concatenate([rest[counts_name] for rest in every])
        where = stripes_of(table, ids, len(rows))
        for stripe, rest in enumerate(own):
            rest[ids_name], rest[counts_name] = ids[where == stripe], counts[where == stripe]
    return own
