"""Which rows of a growing table go. Pure, and without a clock: only updates are counted, so equal pushes, equal rows.

A row that no push has touched for more than ``Unseen.rounds`` updates counts as gone from that update on; its memory is
freed when a sweep passes. A table that has grown beyond its ``Capacity`` loses rows until it has a sixteenth less, so
that the search for them is seldom. Those of equal age or count go by their ids.
"""

from __future__ import annotations

import numpy as np

from kvstore.rows.ids import Ids, mixed
from kvstore.rows.slabs import Array
from kvstore.table import Capacity, Table, Unseen

SLACK = 16  # a full table makes room for this part of its rows at once


class EvictionRule:
    """The rules of one stripe of ``table``, number ``stripe`` of ``stripes``.

    Attributes:
        rounds: see ``Unseen``: the least of the table's; None if there is none.
        capacity: how many rows this stripe may have; None if there is no limit.
        by_count: whether those go that were touched least often, not longest ago.
    """

    def __init__(self, table: Table, stripe: int, stripes: int) -> None:
        self.rounds = min((rule.rounds for rule in table.evict if isinstance(rule, Unseen)), default=None)
        capacities = [rule for rule in table.evict if isinstance(rule, Capacity)]
        tightest = min(capacities, key=lambda rule: rule.rows, default=None)
        # The stripes' parts add up to the limit: each rounded up, they would be more than the table may have.
        self.capacity = None if tightest is None else (tightest.rows + stripe) // stripes
        self.by_count = tightest is not None and tightest.by == "count"

    def oldest(self, version: int) -> int:
        """Return the update before which a row must have been touched last to be gone after update ``version``."""
        return -1 if self.rounds is None else version - self.rounds

    def surplus(self, rows: int) -> int:
        """Return how many of ``rows`` rows must go for the table's capacity."""
        if self.capacity is None or rows <= self.capacity:
            return 0
        return rows - self.capacity + self.capacity // SLACK

    def chosen(self, count: int, ids: Ids, seen: Array, counts: Array | None) -> Array:
        """Return the positions of the ``count`` rows that go first.

        Args:
            count: how many, at most all.
            ids: of all rows.
            seen: the update that touched each last, or 1 more for all.
            counts: how often each was touched; None where rows go by age.
        """
        ranks = [seen] if counts is None else [counts, seen]
        among = np.arange(len(ids))
        gone: list[Array] = []
        for rank in [*ranks, None]:
            # A hash: by their ids themselves, rows of large ids would stay for ever.
            keys = mixed(ids[among]) if rank is None else rank[among]
            if count >= len(among):
                gone.append(among)
                break
            last = np.partition(keys, count)[count]
            before = keys < last
            gone.append(among[before])
            count -= int(np.count_nonzero(before))
            among = among[keys == last]
            if not count:
                break
        return np.concatenate(gone)
