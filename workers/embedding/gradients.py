"""The gradients of a step's rows, from the backward passes that make them until they are pushed."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch

from kvstore import RowSparse
from kvstore.table import Table
from workers.embedding.lookups import Lookup


@dataclass(eq=False)
class RowUse:
    """One forward pass through a table: the rows that it took. Their gradient comes once in each backward pass."""

    key: Any
    lookup: Lookup


@dataclass
class RowGradients:
    """What has come so far.

    Attributes:
        parts: by key the ids and the gradients of their rows, in the order in which they came.
        awaited: uses whose gradient has not come since the last push, as long as their graphs live.
        backward: the number of the backward pass that runs; None between two.
        kept: how many parts of each key are from backward passes that have ended.
    """

    parts: dict[Any, list[tuple[torch.Tensor, torch.Tensor]]] = field(default_factory=dict)
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
        ids, count = use.lookup.ids, len(use.lookup.ids)
        if grad.layout == torch.strided:
            rows = grad[:count]
        else:
            summed = grad.coalesce()
            touched, rows = summed.indices()[0].cpu(), summed.values()
            ids = ids if len(touched) == count else ids[touched]
        self.parts.setdefault(use.key, []).append((ids, rows.cpu()))

    def take(self, tables: dict[Any, Table]) -> list[RowSparse]:
        """Return the gradient of each of ``tables``, perhaps of no rows, and begin anew."""
        parts, self.parts, self.kept = self.parts, {}, {}
        self.awaited.clear()
        return [_joined(parts.get(key, []), table) for key, table in tables.items()]

    def __bool__(self) -> bool:
        return any(self.parts.values())


def _joined(parts: list[tuple[torch.Tensor, torch.Tensor]], table: Table) -> RowSparse:
    if not parts:
        return RowSparse.zeros((0, table.width), table.dtype)
    if len(parts) == 1:
        return RowSparse(*parts[0])
    return RowSparse(torch.cat([ids for ids, _ in parts]), torch.cat([rows for _, rows in parts]))
