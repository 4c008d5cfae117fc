"""Rows that have been asked for, and that a forward pass takes when it needs them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kvstore.table import Table
from kvstore.ticket import Ticket
from kvstore.values import as_dtype
from workers.embedding.lookups import Lookup, contains


class Fetch:
    """The rows of one table for one lookup, on their way or there.

    Below the rows there is one more, of zeros: that of the padding.

    Args:
        lookup: which rows.
        block: memory for them, of shape ``(len(ids) + 1, width)``; the last row is of zeros.

    Attributes:
        lookup: see above.
        out: the rows, to be written into; of shape ``(len(ids), width)``.
        ticket: of the call that brings them; None until it has been made.
        seen: a mark of the changes of the table when they were asked for.
    """

    def __init__(self, lookup: Lookup, block: torch.Tensor) -> None:
        self.lookup = lookup
        self._block = block
        self.out = block[:-1]
        self.ticket: Ticket | None = None
        self.seen: object = None

    def covers(self, lookup: Lookup) -> bool:
        """Whether the rows of ``lookup`` are among these."""
        return lookup is self.lookup or contains(self.lookup.ids, lookup.ids)

    def take(self, lookup: Lookup) -> torch.Tensor:
        """Wait for the rows; return those of ``lookup``, which this covers, and below them the row of zeros.

        Raises:
            KVStoreError: they did not come.
        """
        if self.ticket is not None:
            self.ticket.wait()
        if lookup is self.lookup or torch.equal(lookup.ids, self.lookup.ids):
            return self._block
        positions = torch.searchsorted(self.lookup.ids, lookup.ids)
        return self._block[
            torch.cat((positions, torch.tensor([len(self.lookup.ids)], dtype=torch.int64, device="cpu")))
        ]


def fetches_of(tables: Mapping[Any, Table], lookups: Mapping[Any, Lookup]) -> dict[Any, Fetch]:
    """Return by key a fetch for each of ``lookups``. The rows of tables that are alike lie in one tensor.

    Args:
        tables: by key; those of ``lookups``, and perhaps others.
        lookups: by key, which rows.
    """
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
