"""Ids of several tables, split over the servers that have their rows: a few steps for all tables together. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from kvstore.client.rows.plan import RowPlan
from kvstore.rows.ids import Ids, stripes_of
from kvstore.rows.joint_ids import joined
from kvstore.rows.sums import Positions


class Striped:
    """Ids of the tables of a plan, by server.

    Args:
        plan: of the tables.
        ids: of each table, rising.
        whole: those of all tables, one after the other, if somebody has them.

    Attributes:
        counts: by server, how many ids of each table it has.
    """

    def __init__(self, plan: RowPlan, ids: Sequence[Ids], whole: Ids | None = None) -> None:
        servers, tables = plan.servers, len(ids)
        self._plan = plan
        self._all = joined(ids) if whole is None else whole
        sizes = [len(each) for each in ids]
        self._firsts = list(itertools.accumulate(sizes, initial=0))[:-1]  # where in all ids those of each table begin
        self._travelling: dict[int, Ids] = {}
        self._within: dict[int, Positions] = {}  # by server, where those are in the ids of each table
        self._mine: list[Positions]  # by server, where in all ids those are that it has
        if servers == 1:
            self._mine = [np.arange(len(self._all))]
            self.counts = [sizes]
            return
        stripes = self._stripes(ids)
        self._mine = [(stripes == server).nonzero()[0] for server in range(servers)]
        if tables == 1:
            self.counts = [[len(mine)] for mine in self._mine]
        else:
            stops = [*self._firsts, len(self._all)]
            self.counts = [np.diff(mine.searchsorted(stops)).tolist() for mine in self._mine]

    def _stripes(self, ids: Sequence[Ids]) -> Positions:
        plan = self._plan
        if not plan.grow:  # the same rule for all of them
            mask = plan.servers - 1
            if not plan.servers & mask:  # a remainder costs ten times as much
                masked: Positions = self._all & mask
                return masked
            return stripes_of(plan.tables[0], self._all, plan.servers)
        parts = [stripes_of(table, each, plan.servers) for table, each in zip(plan.tables, ids, strict=True)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def positions(self, server: int) -> list[Positions]:
        """Return, for each table, where in its ids those are that ``server`` has."""
        where = self._mine[server]
        if len(self._firsts) == 1:
            return [where]
        counts = self.counts[server]
        if server not in self._within:
            self._within[server] = where - np.repeat(self._firsts, counts)
        where = self._within[server]
        ranges = itertools.pairwise(itertools.accumulate(counts, initial=0))
        return [where[start:stop] for start, stop in ranges]

    def rows_in(self, firsts: Positions, server: int) -> Positions:
        """Return where the rows of all ids that ``server`` has are in an array.

        Args:
            firsts: where in it those of each table begin, one for each of its ids.
        """
        mine = self._mine[server]
        if len(firsts) == 1 and not firsts[0]:  # the array has the rows of one table, and no others
            return mine
        shifts = firsts - np.array(self._firsts)
        return mine + np.repeat(shifts, self.counts[server]) if shifts.any() else mine

    def ids(self, server: int) -> Ids:
        """Return the ids that ``server`` has, table by table, as they travel."""
        known = self._travelling.get(server)
        if known is not None:
            return known
        mine = self._all if self._plan.servers == 1 else self._all.take(self._mine[server])
        travelling: Ids = mine.astype(np.int64 if self._plan.wide else np.int32, copy=False)
        self._travelling[server] = travelling
        return travelling

    def total(self, server: int) -> int:
        """Return how many ids ``server`` has of all tables."""
        return len(self._mine[server])
