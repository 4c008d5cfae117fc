"""The tables of a checkpoint, given to the servers of a job that continues from it, however many these are now."""

from __future__ import annotations

import logging

import numpy as np

from kvstore.checkpoint.tables import NUMBERS, shared_out
from kvstore.client.optimizer import Optimizing
from kvstore.client.plans.entries import Entries
from kvstore.client.resuming import Resumed
from kvstore.client.rows.plan import RowPlan
from kvstore.client.rows.stored import StoredRows, StoredTables
from kvstore.optim.states_file import require_optimizer
from kvstore.rows.ids import stripes_of
from kvstore.rows.stripe import STATE
from kvstore.spec import Key, shorten

log = logging.getLogger(__name__)


class RestoredTables:
    """See the module.

    Args:
        ordinal: of the store: it is the n-th that each worker has made.
        stored: the tables on the servers.
        optimizing: of the store.
    """

    def __init__(self, ordinal: int, stored: StoredTables, optimizing: Optimizing) -> None:
        self._ordinal, self._stored, self._optimizing = ordinal, stored, optimizing
        self._without_states: dict[Key, None] = {}

    def put(self, resumed: Resumed, entries: Entries) -> None:
        """Give the servers the rows of new tables, and their states if there is an optimizer already.

        Raises:
            Mismatch: a table is another one than the checkpoint's.
            UsageError: the states are of another optimizer.
        """
        with_states = self._optimizing.optimizer is not None
        new = [table.name(key) for key, table in entries.tables.items() if not resumed.has(self._ordinal, key)]
        if new and resumed.has_store(self._ordinal):
            log.warning("%s has no rows of %s: what init was given is used", resumed, shorten(new))
        for key in [key for key in entries.tables if resumed.has(self._ordinal, key)]:
            resumed.require(self._ordinal, key, entries[key].spec)
            self._put(resumed, key, RowPlan(entries, [key]), with_states)
            if not with_states:
                self._without_states[key] = None

    def put_states(self, resumed: Resumed, entries: Entries) -> None:
        """Give the servers, once there is an optimizer, what was without states until then; nobody has pushed yet."""
        for key in [key for key in self._without_states if key in entries]:
            self._put(resumed, key, RowPlan(entries, [key]), with_states=True)
            del self._without_states[key]

    def _put(self, resumed: Resumed, key: Key, plan: RowPlan, with_states: bool) -> None:
        if with_states and (saved := resumed.optimizer(self._ordinal)) is not None:
            require_optimizer(saved, self._optimizing.require("a checkpoint's tables"), str(resumed))
        (table,) = plan.tables
        rests = resumed.rests(self._ordinal, key)
        version, steps = (max(int(rest[NUMBERS][place]) for rest in rests) for place in (0, 1))
        rows_of = np.zeros(plan.servers, np.int64)
        for ids, rows, parts in resumed.pages(self._ordinal, key):
            rows_of += np.bincount(stripes_of(table, ids, plan.servers), minlength=plan.servers)
            kept = {name: part for name, part in parts.items() if with_states or not name.startswith(STATE)}
            self._stored.put("init", plan, key, StoredRows(ids, rows, kept, version, steps if with_states else None))
        self._stored.put_rest("init", plan, key, shared_out(table, rests, rows_of.tolist()))
