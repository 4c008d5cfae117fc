"""The gradients of a step's rows, from the backward passes that make them until they are pushed.

A sparse gradient has a row for each position of a batch. Those of one id are summed when all have come, for all tables
at once, in the order of the look-up: with one worker the bits are those of ``coalesce``, which would sort the positions
again.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from kvstore import RowSparse
from kvstore.table import Table
from workers.embedding.lookups import Lookup, joined_positions


@dataclass(eq=False)
class RowUse:
    """One forward pass through a table: the rows that it took. Their gradient comes once in each backward pass.

    Attributes:
        key: of the table.
        lookup: which rows.
        course: a number that is another one after the table was loaded: what the rows were part of.
    """

    key: Any
    lookup: Lookup
    course: int = 0


class Part(NamedTuple):
    """The gradient of the rows ``ids``.

    Attributes:
        ids: of the rows, each once.
        rows: a row for each of ``ids``; or, where ``lookup`` is given, one for each position.
        lookup: says which positions each id has.
        course: see ``RowUse``.
    """

    ids: torch.Tensor
    rows: torch.Tensor
    lookup: Lookup | None = None
    course: int = 0


@dataclass
class RowGradients:
    """What has come so far.

    Attributes:
        parts: by key the gradients of its rows, in the order in which they came.
        awaited: uses whose gradient has not come since the last push, as long as their graphs live.
        backward: the number of the backward pass that runs; None between two.
        kept: how many parts of each key are from backward passes that have ended.
    """

    parts: dict[Any, list[Part]] = field(default_factory=dict)
    awaited: weakref.WeakSet[RowUse] = field(default_factory=weakref.WeakSet)
    backward: int | None = None
    kept: dict[Any, int] = field(default_factory=dict)

    def begin(self, backward: int) -> bool:
        """Note that backward pass ``backward`` makes gradients; return whether that is new."""
        if self.backward == backward:
            return False
        self.forget_unfinished()
        self.backward = backward
        return True

    def end(self) -> None:
        """Note that the backward pass has ended, so that what came in it counts."""
        self.backward = None
        if self.parts:  # what stays is to take no more memory than it must
            _sum_positions(self.parts.values())
        self.kept = {key: len(parts) for key, parts in self.parts.items()}

    def forget_unfinished(self) -> None:
        """Drop what has come from a backward pass that has failed."""
        if self.backward is None:
            return
        self.backward = None
        for key, parts in self.parts.items():
            del parts[self.kept.get(key, 0) :]

    def add(self, use: RowUse, grad: torch.Tensor) -> None:
        """Note the gradient of the rows that ``use`` took."""
        self.awaited.discard(use)
        lookup = use.lookup
        ids, count = lookup.ids, len(lookup.ids)
        if grad.layout == torch.strided:
            part = Part(ids, grad[:count].cpu(), None, use.course)
        elif grad.is_cpu and not lookup.padded and torch.equal(grad._indices()[0], lookup.inverse.reshape(-1)):
            part = Part(ids, grad._values(), lookup, use.course)
        else:
            summed = grad.coalesce()
            touched = summed.indices()[0].cpu()
            part = Part(ids if len(touched) == count else ids[touched], summed.values().cpu(), None, use.course)
        self.parts.setdefault(use.key, []).append(part)

    def add_bags(self, use: RowUse, grad: torch.Tensor) -> None:
        """Note the gradient of the sums of bags that have the same number of ids.

        Args:
            use: of their rows.
            grad: a row for each bag. What backward does with it afterwards changes nothing here.
        """
        self.awaited.discard(use)
        lookup = use.lookup
        rows = grad.repeat_interleave(lookup.inverse.shape[1], 0)
        self.parts.setdefault(use.key, []).append(Part(lookup.ids, rows, lookup, use.course))

    def drop(self) -> None:
        """Drop all that has come."""
        self.parts, self.kept = {}, {}

    def drop_earlier(self, courses: Mapping[Any, int]) -> list[Any]:
        """Drop the gradients of rows that are part of another course now; return the keys of which there were some."""
        earlier = [key for key, parts in self.parts.items() if any(part.course != courses[key] for part in parts)]
        for key in earlier:
            self.parts[key] = [part for part in self.parts[key] if part.course == courses[key]]
        return earlier

    def take(self, tables: dict[Any, Table]) -> list[RowSparse]:
        """Return the gradient of each of ``tables``, perhaps of no rows, and begin anew."""
        parts, self.parts, self.kept = self.parts, {}, {}
        self.awaited.clear()
        _sum_positions(parts.values())
        return [_joined(parts.get(key, []), table) for key, table in tables.items()]

    def __bool__(self) -> bool:
        return any(self.parts.values())


def _sum_positions(parts: Iterable[list[Part]]) -> None:
    """Replace each part that has rows of positions by one with their sums."""
    alike: dict[tuple[int, torch.dtype], list[tuple[int, list[Part], int]]] = {}
    for of_key in parts:
        for place, part in enumerate(of_key):
            if part.lookup is not None:
                group = alike.setdefault((part.rows.shape[1], part.rows.dtype), [])
                group.append((part.lookup.number, of_key, place))
    for group in alike.values():
        group.sort(key=itemgetter(0))  # backward comes to them in another order than the look-up
        unsummed = [of_key[place] for _, of_key, place in group]
        for (_, of_key, place), rows in zip(group, _sums(unsummed), strict=True):
            of_key[place] = of_key[place]._replace(rows=rows, lookup=None)


def _sums(parts: Sequence[Part]) -> Sequence[torch.Tensor]:
    """Return the sums of several parts' rows, which are as wide. A bag sums one row after the other."""
    positions = joined_positions([part.lookup for part in parts if part.lookup is not None])
    rows = parts[0].rows if len(parts) == 1 else torch.cat([part.rows for part in parts])
    return torch.split(functional.embedding_bag(positions.order, rows, positions.starts, mode="sum"), positions.counts)


def _joined(parts: list[Part], table: Table) -> RowSparse:
    if not parts:
        return RowSparse.zeros((0, table.width), table.dtype)
    if len(parts) == 1:
        return RowSparse.over(parts[0].ids, parts[0].rows)
    return RowSparse.over(torch.cat([part.ids for part in parts]), torch.cat([part.rows for part in parts]))
