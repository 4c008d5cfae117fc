"""Rows that have been asked for, and that a forward pass takes when it needs them."""

from __future__ import annotations

import torch

from kvstore.table import Table
from kvstore.ticket import Ticket
from kvstore.values import as_dtype
from workers.embedding.lookups import Lookup, contains


class Fetch:
    """The rows of one table for one lookup, on their way or there.

    Below the rows there is one more, of zeros: that of the padding.

    Args:
        table: the table.
        lookup: which rows.

    Attributes:
        lookup: see above.
        out: the rows, to be written into; of shape ``(len(ids), width)``.
        ticket: of the call that brings them; None until it has been made.
    """

    def __init__(self, table: Table, lookup: Lookup) -> None:
        count = len(lookup.ids)
        self.lookup = lookup
        self._block = torch.empty((count + 1, table.width), dtype=as_dtype(table.dtype))
        self._block[count] = 0
        self.out = self._block[:count]
        self.ticket: Ticket | None = None

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
        return self._block[torch.cat((positions, torch.tensor([len(self.lookup.ids)])))]
