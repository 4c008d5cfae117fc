"""The arguments of ``init``, checked: new keys, and the arrays that are their first values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from kvstore.client.plans.entries import Entries
from kvstore.errors import AlreadyInitialized, UsageError
from kvstore.rows.first_rows import first_rows, is_table, name_of
from kvstore.rows.ids import Ids
from kvstore.rows.row_sparse import ParameterRows, RowSparse
from kvstore.rows.sums import Rows
from kvstore.spec import Key, Spec
from kvstore.store.arguments import group, one_kind, pairs
from kvstore.store.wanted_rows import described
from kvstore.table import Capacity, Table, TableSpec
from kvstore.values import Arrays, Layout, as_tensors, kinds_of, spec_of, values_of


def new_arrays(key: Any, value: Any, known: Entries, kind: type | None) -> tuple[list[Key], list[Any], type]:
    """Return new keys, all different, the first value of each, and the type of the store's keys.

    Args:
        key, value: see ``KVStore.init``.
        known: the store's keys.
        kind: their type; None while there are none.

    Raises:
        AlreadyInitialized: the store has one of the keys.
        UsageError: a key is listed twice, or is not of the type of the others.
    """
    listed = pairs(key, value, kind)
    if listed is None:
        grouped = group(key, value)
        kind = one_kind(grouped, kind)
        if isinstance(key, list | tuple) and len(grouped) < len(key):
            raise UsageError("init was given a key twice; list each key once")
        listed = list(grouped), list(grouped.values()), kind
    for each in listed[0]:
        if each in known.places:
            raise AlreadyInitialized(f"key {each!r} is already initialized; push a new value instead")
    return listed


def distinct(arrays: Sequence[Any]) -> tuple[list[int], list[Spec], Arrays | list[torch.Tensor]]:
    """Return the index of each array's spec, the specs, and contiguous arrays. Of several devices the first counts."""
    if not arrays:
        return [], [], []
    known = kinds_of(arrays)
    if known is not None:
        values = values_of(arrays, Layout(*known))
        if values is not None:
            return known[0].tolist(), known[1], values
    firsts = [as_tensors(array)[0] for array in arrays]
    kinds: dict[Spec, int] = {}
    numbers = [kinds.setdefault(spec_of(first), len(kinds)) for first in firsts]
    return numbers, list(kinds), [first.contiguous() for first in firsts]


class FirstTables(NamedTuple):
    """The tables among the values of an ``init``.

    Attributes:
        specs: of the tables, by their positions in the list of values.
        rows: by key, the rows that a table begins with, each id once; others of that table are zeros.
    """

    specs: Mapping[int, TableSpec]
    rows: Mapping[Key, tuple[Ids, Rows]]

    def among(self, count: int, kinds: Sequence[int], specs: Sequence[Spec]) -> tuple[list[int], list[Spec]]:
        """Return the kinds of ``count`` values and the specs of kinds: those of arrays, and these tables among them.

        Args:
            count: of values.
            kinds, specs: of the arrays, in their order.
        """
        if not self.specs:
            return list(kinds), list(specs)
        all_specs = list(dict.fromkeys([*specs, *self.specs.values()]))
        arrays = iter(kinds)
        return [
            all_specs.index(self.specs[place]) if place in self.specs else next(arrays) for place in range(count)
        ], all_specs


_LAYOUT = attrgetter("layout")


def tables_among(keys: Sequence[Key], values: Sequence[Any], rank: int, servers: int) -> FirstTables:
    """Return the tables among the first values of ``keys``; of a list of values the first counts.

    Args:
        keys, values: see ``new_arrays``.
        rank: of this worker, for messages.
        servers: how many there are.

    Raises:
        UsageError: a table cannot be stored, or the rows that it is to begin with.
    """
    types = set(map(type, values))
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    sparse = torch.sparse_coo in set(map(_LAYOUT, tensors))
    if not sparse and types.isdisjoint((Table, RowSparse, ParameterRows, list, tuple)):
        return FirstTables({}, {})
    specs: dict[int, TableSpec] = {}
    rows: dict[Key, tuple[Ids, Rows]] = {}
    for position, (key, given) in enumerate(zip(keys, values, strict=True)):
        value = given[0] if isinstance(given, list | tuple) and given else given
        if not is_table(value):
            continue
        where = described("init", name_of(key, value), rank)
        table, first = first_rows(where, value)
        _require_room(where, table, servers)
        specs[position] = TableSpec.of(table)
        if first is not None:
            rows[key] = first
    return FirstTables(specs, rows)


def _require_room(where: str, table: Table, servers: int) -> None:
    """Raise ``UsageError`` if a server would have room for no row at all: each has its part of a ``Capacity``."""
    rows = min((rule.rows for rule in table.evict if isinstance(rule, Capacity)), default=servers)
    if rows < servers:
        raise UsageError(
            f"{where}: Capacity({rows}) is less than one row for each of {servers} servers: "
            f"give it at least {servers} rows"
        )
