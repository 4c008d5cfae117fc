"""The optimizer's states of tables' rows, as files of optimizer states have them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import numpy as np

from kvstore.client.clocks import PushClocks
from kvstore.client.plans.entries import Entries
from kvstore.client.rows.plan import RowPlans
from kvstore.client.rows.stored import StoredRows, StoredTables
from kvstore.errors import UsageError
from kvstore.optim.states import StateTensors
from kvstore.rows.ids import Ids
from kvstore.rows.row_states import RowStates
from kvstore.rows.sums import Rows
from kvstore.spec import Key

PullRows: TypeAlias = Callable[[Key, Ids], Rows]  # the rows of these ids


class StoredStates:
    """The states of a store's tables on its servers.

    Args:
        stored: the tables.
        entries: the store's keys.
        plans: of its tables.
        clocks: of this worker's keys.
        pull: returns rows of a table.
    """

    def __init__(
        self, stored: StoredTables, entries: Entries, plans: RowPlans, clocks: PushClocks, pull: PullRows
    ) -> None:
        self._stored, self._entries, self._plans = stored, entries, plans
        self._clocks, self._pull = clocks, pull

    def read(self) -> StateTensors:
        """Return the states of all rows of all tables, after this worker's pushes so far."""
        states: StateTensors = {}
        for key in self._entries.tables:
            entry = self._entries[key]
            with self._stored.freeze(entry.segments, int(self._clocks.pushed[entry.place])) as reading:
                of_key = RowStates.of(reading.pages(), reading.steps).tensors()
            states |= {(key, name): value for name, value in of_key.items()}
        return states

    def require(self, states: Mapping[Key, RowStates], where: object) -> None:
        """Raise ``UsageError`` unless all keys with ``states``, which come from ``where``, have tables."""
        for key in states:
            if key not in self._entries.tables:
                raise UsageError(f"{where} holds states of table {key!r}, which has not been initialized")

    def replace(self, states: Mapping[Key, RowStates]) -> None:
        """Give rows these states. In tables that grow, only rows that are there take them."""
        for key, of_key in states.items():
            self._replace(key, of_key)

    def _replace(self, key: Key, states: RowStates) -> None:
        what, plan, entry = "load_optimizer_states", self._plans.of([key]), self._entries[key]
        missing = np.ones(len(states.ids), bool)
        with self._stored.freeze(entry.segments, int(self._clocks.pushed[entry.place])) as reading:
            for page in reading.pages():
                (ids, rows, parts), places = states.replacing(page)
                missing[places] = False
                self._stored.put(what, plan, key, StoredRows(ids, rows, parts, steps=states.steps))
        grows = self._entries.tables[key].grows
        ids = states.ids[missing] if not grows else states.ids[:0]
        parts = {name: part[missing] if not grows else part[:0] for name, part in states.parts.items()}
        self._stored.put(what, plan, key, StoredRows(ids, self._pull(key, ids), parts, steps=states.steps))
