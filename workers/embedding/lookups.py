"""Which rows of tables a batch needs: each id once, and where each position of the batch finds its row. Pure.

The order of the ids decides the last bits of a sum of three or more gradients. A job of one worker uses torch's order,
so its sums have the bits of torch's own sparse gradients. A job of several workers adds their sums, which torch alone
does not, so torch's bits cannot be met. It uses the order of the positions, which takes an eighth of the time to find.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from kvstore import UsageError
from kvstore.rows.ids import Ids
from kvstore.rows.row_sparse import integers
from kvstore.table import Table
from kvstore.ticket import Ticket
from kvstore.values import as_dtype
from workers.common.torch_internals import write_count

Sort: TypeAlias = Callable[[Sequence[torch.Tensor]], "tuple[torch.Tensor, torch.Tensor]"]


def sort_for(workers: int) -> Sort:
    return as_torch if workers == 1 else by_position


def as_torch(ids: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids sorted, and where each was; equal ones in the order that they have in a sparse gradient of torch's.

    ``ids`` of several tables are int64, of one dimension, on the CPU. The results have the tables one after the other.
    """
    return _by_torch(ids, stable=False)


def by_position(ids: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids sorted, and where each was; equal ones in the order of their positions."""
    sizes = [len(each) for each in ids]
    bits = max(max(sizes) - 1, 1).bit_length()
    joint = np.concatenate([each.numpy() for each in ids])
    if len(joint) and int(joint.view(np.uint64).max()) >> (63 - bits):  # negative, or without room for a position
        return _by_torch(ids, stable=True)
    # With its position below it, each id is another number, and numbers alone are sorted in a tenth of the time.
    joint <<= bits
    positions = np.arange(max(sizes))
    first = 0
    for size in sizes:
        part = joint[first : first + size]
        part |= positions[:size]
        part.sort()
        first += size
    return torch.from_numpy(joint >> bits), torch.from_numpy(joint & ((1 << bits) - 1))


def _by_torch(ids: Sequence[torch.Tensor], stable: bool) -> tuple[torch.Tensor, torch.Tensor]:
    if len(ids) == 1:
        return torch.sort(ids[0], stable=stable)
    sizes = [len(each) for each in ids]
    ordered, order = (torch.empty(sum(sizes), dtype=torch.int64, device="cpu") for _ in range(2))
    for each, values, places in zip(ids, torch.split(ordered, sizes), torch.split(order, sizes), strict=True):
        torch.sort(each, stable=stable, out=(values, places))
    return ordered, order


class TableIds(NamedTuple):
    """What a batch asks of one table. ``padding`` is the id that needs no row; None if there is none."""

    key: Any
    table: Table
    given: Any
    padding: int | None = None


class Positions(NamedTuple):
    """The positions of the ids of all tables of a batch, by id. Tables follow one another.

    ``order``: all positions, of each table by their ids; the positions of one id are summed in this order. ``starts``:
    where in ``order`` each id begins. ``sizes`` and ``counts``: of each table the numbers of positions and of ids.
    """

    order: torch.Tensor
    starts: torch.Tensor
    sizes: list[int]
    counts: list[int]


@dataclass(eq=False)
class Lookup:
    """The rows of one table that a batch needs.

    Attributes:
        given: the ids as they were given; int64, of any shape.
        ids: each id once, rising, without the padding; int64, on the CPU.
        inverse: for each position of ``given`` that of its id in ``ids``, or ``len(ids)`` for the padding; of the same
            shape and device.
        positions: of the ids of all tables that were looked up with this one.
        number: which of these tables it is.
        padded: whether there is padding.
        writes: how often ``given`` had been written to.
    """

    given: torch.Tensor
    ids: torch.Tensor
    inverse: torch.Tensor
    positions: Positions
    number: int
    padded: bool
    writes: int

    def matches(self, given: torch.Tensor) -> bool:
        """Whether this is for just these ids, in this order."""
        mine = self.given
        if _writes(mine) != self.writes:
            return False
        same = mine.shape == given.shape and mine.device == given.device and mine.dtype == given.dtype
        return mine is given or (same and torch.equal(mine, given))


def look_up_all(wanted: Sequence[TableIds], sort: Sort = as_torch) -> list[Lookup]:
    """Return which rows of several tables a batch needs, in a few steps for all of them.

    What is found is the same as by a look-up of each table alone.
    """
    tensors = [ids_tensor(each.key, each.given) for each in wanted]
    writes = [_writes(tensor) for tensor in tensors]
    flat = [_flat(each.key, tensor) for each, tensor in zip(wanted, tensors, strict=True)]
    sizes = [ids.numel() for ids in flat]
    ordered, order = sort(flat)
    unique, inverse, starts, counts = _unique(ordered.numpy(), order.numpy(), sizes)
    positions = Positions(order, torch.from_numpy(starts), sizes, counts)
    lookups = []
    first = first_id = 0
    for number, (each, tensor) in enumerate(zip(wanted, tensors, strict=True)):
        ids = unique[first_id : first_id + counts[number]]
        places = inverse[first : first + sizes[number]]
        first, first_id = first + sizes[number], first_id + counts[number]
        padded = False
        if each.padding is not None:
            ids, padded = _without(each.padding, ids, places)
        rows = each.table.rows
        if rows is not None and len(ids) and not (ids[0] >= 0 and ids[-1] < rows):
            _refuse(each.key, rows, flat[number].numpy())
        found = torch.from_numpy(places.reshape(tensor.shape))
        if not tensor.is_cpu:
            found = found.to(tensor.device)
        lookups.append(Lookup(tensor, torch.from_numpy(ids), found, positions, number, padded, writes[number]))
    return lookups


def ids_tensor(key: Any, given: Any) -> torch.Tensor:
    """Return ids as a tensor; a copy of what is none, for nobody tells of writes to it."""
    return given if isinstance(given, torch.Tensor) else torch.from_numpy(integers(f"ids of {key!r}", given).copy())


def _flat(key: Any, ids: torch.Tensor) -> torch.Tensor:
    if not (ids.dtype == torch.int64 and ids.is_cpu and ids.layout == torch.strided and not ids.is_nested):
        ids = torch.from_numpy(integers(f"ids of {key!r}", ids))
    return ids.reshape(-1)


def _unique(ordered: Ids, order: Ids, sizes: Sequence[int]) -> tuple[Ids, Ids, Ids, list[int]]:
    """Find the different ids of each of several tables, which follow one another in ``ordered``.

    Returns each id once; for each position where its id is among the ids of its table; where in ``order`` each id
    begins; and of each table the number of different ids. ``order`` becomes the positions among all tables.
    """
    bounds = np.array([0, *itertools.accumulate(sizes)])
    new = np.empty(len(ordered), bool)
    np.not_equal(ordered[1:], ordered[:-1], out=new[1:])
    new[bounds[np.flatnonzero(sizes)]] = True
    starts = np.flatnonzero(new)
    first_ids = np.searchsorted(starts, bounds)
    order += np.repeat(bounds[:-1], sizes)
    inverse = np.empty(len(order), np.int64)
    inverse[order] = np.cumsum(new) - np.repeat(first_ids[:-1] + 1, sizes)
    return ordered.take(starts), inverse, starts, np.diff(first_ids).tolist()


def _without(padding: int, ids: Ids, places: Ids) -> tuple[Ids, bool]:
    """Return ``ids`` without the padding, and whether it is one of them; write into ``places`` where ids are then."""
    at = int(np.searchsorted(ids, padding))
    if at == len(ids) or int(ids[at]) != padding:
        return ids, False
    rest = np.delete(ids, at)
    places[:] = np.where(places == at, len(rest), places - (places > at))
    return rest, True


def joined_positions(lookups: Sequence[Lookup]) -> Positions:
    """Return the positions of several lookups, at least one, one after the other."""
    positions = lookups[0].positions
    together = all(each.positions is positions and each.number == place for place, each in enumerate(lookups))
    if together and len(lookups) == len(positions.sizes):
        return positions
    orders, starts, sizes, counts = zip(*(_positions_of(each) for each in lookups), strict=True)
    firsts = torch.tensor([0, *sizes[:-1]], dtype=torch.int64, device="cpu").cumsum(0)
    order, start = torch.cat(orders), torch.cat(starts)
    order += firsts.repeat_interleave(torch.tensor(sizes, dtype=torch.int64, device="cpu"))
    start += firsts.repeat_interleave(torch.tensor(counts, dtype=torch.int64, device="cpu"))
    return Positions(order, start, list(sizes), list(counts))


def _positions_of(lookup: Lookup) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    order, starts, sizes, counts = lookup.positions
    number = lookup.number
    size, count = sizes[number], counts[number]
    if len(sizes) == 1:
        return order, starts, size, count
    first, first_start = sum(sizes[:number]), sum(counts[:number])
    return order[first : first + size] - first, starts[first_start : first_start + count] - first, size, count


def contains(ids: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether all of ``wanted`` are among ``ids``; both rise."""
    if not len(ids):
        return not len(wanted)
    return torch.equal(ids[torch.searchsorted(ids, wanted).clamp_(max=len(ids) - 1)], wanted)


def _writes(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else write_count(tensor)


def _refuse(key: Any, rows: int, flat: Ids) -> None:
    position = int(np.argmax((flat < 0) | (flat >= rows)))
    raise UsageError(
        f"id {flat[position]} at position {position} is not in table {key!r}, whose ids are from 0 to {rows - 1}"
    )


class Fetch:
    """The rows of one table for one lookup, on their way or there. Below them there is one of zeros, for the padding.

    ``out`` are the rows without it; ``ticket`` is of the call that brings them, ``seen`` a mark of the table's changes.
    """

    def __init__(self, lookup: Lookup, block: torch.Tensor) -> None:
        self.lookup = lookup
        self._block = block
        self.out = block[:-1]
        self.ticket: Ticket | None = None
        self.seen: object = None

    def covers(self, lookup: Lookup) -> bool:
        return lookup is self.lookup or contains(self.lookup.ids, lookup.ids)

    def take(self, lookup: Lookup) -> torch.Tensor:
        """Wait for the rows; return the rows of ``lookup``, which this covers, and the row of zeros."""
        if self.ticket is not None:
            self.ticket.wait()
        if lookup is self.lookup or torch.equal(lookup.ids, self.lookup.ids):
            return self._block
        positions = torch.searchsorted(self.lookup.ids, lookup.ids)
        return self._block[
            torch.cat((positions, torch.tensor([len(self.lookup.ids)], dtype=torch.int64, device="cpu")))
        ]


def fetches_of(tables: Mapping[Any, Table], lookups: Mapping[Any, Lookup]) -> dict[Any, Fetch]:
    """Return by key a fetch for each of ``lookups``. The rows of tables that are alike lie in one tensor."""
    alike: dict[tuple[int, str], list[Any]] = {}
    for key in lookups:
        alike.setdefault((tables[key].width, tables[key].dtype), []).append(key)
    blocks: dict[Any, torch.Tensor] = {}
    for (width, dtype), keys in alike.items():
        blocks.update(zip(keys, _blocks([len(lookups[key].ids) for key in keys], width, dtype), strict=True))
    return {key: Fetch(lookup, blocks[key]) for key, lookup in lookups.items()}


def _blocks(counts: Sequence[int], width: int, dtype: str) -> Sequence[torch.Tensor]:
    """Return memory for so many rows, and a row of zeros below each of these."""
    sizes = [count + 1 for count in counts]
    whole = torch.empty((sum(sizes), width), dtype=as_dtype(dtype), device="cpu")
    whole[torch.tensor(sizes, dtype=torch.int64, device="cpu").cumsum(0) - 1] = 0
    return torch.split(whole, sizes)
