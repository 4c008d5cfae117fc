"""Ids of several tables, split over the servers that have their rows: a few steps for all tables together. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvstore.dist.rows.plan import RowPlan
from kvstore.rows.ids import Ids, stripes_of
from kvstore.rows.sums import Positions


class Striped:
    """Ids of the tables of a plan, by server.

    Args:
        plan: of the tables.
        ids: of each table, rising.

    Attributes:
        counts: by server, how many ids of each table it has.
    """

    def __init__(self, plan: RowPlan, ids: Sequence[Ids]) -> None:
        servers, tables = plan.servers, len(ids)
        self._plan = plan
        self._all = ids[0] if tables == 1 else np.concatenate(ids)
        sizes = [len(each) for each in ids]
        self._travelling: dict[int, Ids] = {}
        self._firsts = [0] * tables
        for number in range(1, tables):
            self._firsts[number] = self._firsts[number - 1] + sizes[number - 1]
        self._order: Positions | None = None  # positions in all ids, server by server; None for one server
        if servers == 1:
            self.counts = [sizes]
            self._starts = [0, len(self._all)]
            return
        stripes = self._stripes(ids)
        self._order = np.concatenate([np.flatnonzero(stripes == server) for server in range(servers)])
        cells = stripes if tables == 1 else stripes * tables + np.repeat(np.arange(tables), sizes)
        self.counts = np.bincount(cells, minlength=servers * tables).reshape(servers, tables).tolist()
        self._starts = [0]
        for counts in self.counts:
            self._starts.append(self._starts[-1] + sum(counts))

    def _stripes(self, ids: Sequence[Ids]) -> Positions:
        plan = self._plan
        if not any(table.grows for table in plan.tables):  # the same rule for all of them
            mask = plan.servers - 1
            if not plan.servers & mask:  # a remainder costs ten times as much
                masked: Positions = self._all & mask
                return masked
            return stripes_of(plan.tables[0], self._all, plan.servers)
        parts = [stripes_of(table, each, plan.servers) for table, each in zip(plan.tables, ids, strict=True)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def positions(self, server: int) -> list[Positions]:
        """Return, for each table, where in its ids those are that ``server`` has."""
        if self._order is None:
            return [np.arange(count) for count in self.counts[0]]
        at = self._starts[server]
        parts = []
        for first, count in zip(self._firsts, self.counts[server], strict=True):
            part = self._order[at : at + count]
            parts.append(part - first if first else part)
            at += count
        return parts

    def rows_in(self, firsts: Positions, server: int) -> Positions:
        """Return where the rows of all ids that ``server`` has are in an array.

        Args:
            firsts: where in it those of each table begin, one for each of its ids.
        """
        shifts = firsts - np.array(self._firsts)
        if self._order is None:
            mine: Positions = np.arange(len(self._all))
        else:
            mine = self._order[self._starts[server] : self._starts[server + 1]]
        if shifts.any():
            mine = mine + np.repeat(shifts, self.counts[server])
        return mine

    def ids(self, server: int) -> Ids:
        """Return the ids that ``server`` has, table by table, as they travel."""
        known = self._travelling.get(server)
        if known is not None:
            return known
        mine = self._all
        if self._order is not None:
            mine = mine[self._order[self._starts[server] : self._starts[server + 1]]]
        travelling: Ids = mine.astype(np.int64 if self._plan.wide else np.int32, copy=False)
        self._travelling[server] = travelling
        return travelling

    def total(self, server: int) -> int:
        """Return how many ids ``server`` has of all tables."""
        return self._starts[server + 1] - self._starts[server]
