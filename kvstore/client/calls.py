"""A call's arguments, checked: what its keys mean, which values go out, and where those that come back are written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch

from kvstore.client.entries import Entries
from kvstore.client.pack import OutgoingRows, RowsOfArrays
from kvstore.client.plans import Plan, Plans, RowPlan
from kvstore.client.row_calls import (
    ArrayRowsCall,
    GivenRows,
    RowCall,
    UsualRows,
    copy_shared,
    overlap,
    usual_requests,
    usual_values,
)
from kvstore.client.unpack import IncomingRows, RowReader, UnionRows, Writer
from kvstore.errors import AlreadyInitialized, UsageError
from kvstore.rows.ids import Ids
from kvstore.rows.row_arguments import ArrayOfRows, Wanted, contribution, first_rows, is_table, name_of
from kvstore.rows.row_sparse import ParameterRows, RowSparse, is_row_sparse, require_whole
from kvstore.rows.sums import Rows
from kvstore.rule import Rule
from kvstore.spec import Key, Spec, require_same
from kvstore.store.arguments import ROUND, RowRequest, RowRequests, array_outs, group, one_kind, pairs
from kvstore.store.wanted_rows import described, wanted_rows
from kvstore.table import Capacity, Table, TableSpec
from kvstore.transport.memory import Memory
from kvstore.values import (
    Arrays,
    Layout,
    as_output,
    as_tensors,
    kinds_of,
    reduce_to,
    spec_of,
    summed_in,
    tensors_of,
    values_of,
)
from kvstore.values.any_arrays import Column

ABSENT: Any = object()  # for an argument that a call does not have
CPU = torch.device("cpu")
PAGE = 16 << 20  # bytes of rows in one answer, where a whole table is pulled
_KEYS = frozenset({int, str})  # True and 1.0 would be found as 1


class StoreCall(NamedTuple):
    """A push, a pull, or both at once."""

    plan: Plan | None  # of the keys that have arrays; None if there are none
    # what to push, for each of these an array, contiguous; None to push nothing
    values: Arrays | Sequence[torch.Tensor] | None
    writer: Writer | None  # writes the new values; None if they are not wanted
    rows: Sequence[RowCall] = ()  # what the call has of tables
    some: ArrayRowsCall | None = None  # the arrays of which it pushes some rows

    @property
    def pushes(self) -> bool:
        return (
            self.values is not None
            or self.some is not None
            or (bool(self.rows) and any(call.contribution is not None for call in self.rows))
        )

    @property
    def keys(self) -> tuple[Key, ...]:
        """All keys, by the names that users know; a table of which several parts are wanted is listed once."""
        arrays = () if self.plan is None else self.plan.keys
        if self.some is not None:
            arrays += self.some.plan.keys
        if not self.rows:
            return arrays
        return tuple(dict.fromkeys([*arrays, *(key for call in self.rows for key in call.plan.names)]))

    @property
    def places(self) -> Column:
        if self.plan is not None and not self.rows and self.some is None:
            return self.plan.places
        parts = [call.plan.places for call in self.rows]
        if self.plan is not None:
            parts.append(self.plan.places)
        if self.some is not None:
            parts.append(self.some.plan.places)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


class Arguments:
    """Checks the arguments of one store's calls."""

    def __init__(self, plans: Plans, rule: Rule, rank: int, on_device: bool, memory: Memory) -> None:
        self._plans = plans
        self._memory = memory
        self._rule = rule
        self._rank = rank  # for messages
        self._on_device = on_device  # sum the values of several devices on the first one's device, not on the CPU

    def check(self, key: Any, value: Any = ABSENT, out: Any = ABSENT, copy: bool = True) -> StoreCall:
        """Return the call that pushes ``value`` and pulls into ``out``, as ``KVStore`` takes them."""
        key = self.resolved(key)
        known = self._plans.known(key)
        if known is None and self.has_tables(key):
            return self._mixed(key, value, out, copy)
        return self._arrays(known, key, value, value if out is None else out, copy)

    def check_rows(self, key: Any, requests: RowRequests, value: Any = ABSENT, copy: bool = True) -> StoreCall:
        """Return the call that pulls the rows of ``requests``, and pushes ``value``, if that is given."""
        one_kind(requests.by_key, self._plans.entries.kind)
        moved = self._plans.entries.moved
        by_key = {moved.get(each, each): of for each, of in requests.by_key.items()} if moved else requests.by_key
        if value is ABSENT:
            return StoreCall(None, None, None, self._pull_rows(by_key))
        return self._split(self._grouped(self.resolved(key), value), by_key, copy)

    def resolved(self, key: Any) -> Any:
        """Return ``key``, or a list of keys, with those of arrays whose rows tables have now replaced by the tables'.

        What such an array was is still on the servers, and nothing updates it any more.
        """
        moved = self._plans.entries.moved
        if not moved:
            return key
        if not isinstance(key, list | tuple):
            return moved.get(key, key) if type(key) in _KEYS else key
        if not _KEYS.issuperset(map(type, key)) or moved.keys().isdisjoint(key):
            return key
        return [moved.get(each, each) for each in key]

    def without_tables(self, key: Any, out: Any) -> tuple[dict[Key, Any], list[Key]]:
        """Return those of ``out``, by key, whose keys have no tables; and the keys that do."""
        grouped, tables = self._grouped(key, out), self._plans.entries.tables
        arrays = {each: outs for each, outs in grouped.items() if each not in tables}
        return arrays, [each for each in grouped if each in tables]

    def has_tables(self, key: Any) -> bool:
        tables = self._plans.entries.tables
        if not tables:
            return False
        if isinstance(key, list | tuple):
            return any(isinstance(each, int | str) and each in tables for each in key)
        return isinstance(key, int | str) and key in tables

    def _mixed(self, key: Any, value: Any, out: Any, copy: bool) -> StoreCall:
        """``check``, for keys some of which have tables."""
        tables = self._plans.entries.tables
        if out is ABSENT:
            return self._split(self._grouped(key, value), None, copy)
        if value is ABSENT:
            outs = self._grouped(key, out)
            whole = [call for each, of in outs.items() if each in tables for call in self._pull_whole(each, of)]
            arrays = {each: of for each, of in outs.items() if each not in tables}
            if not arrays:
                return StoreCall(None, None, None, whole)
            return self._arrays(None, list(arrays), out=list(arrays.values()), copy=copy)._replace(rows=whole)
        values = self._grouped(key, value)
        if out is None:
            requests = {each: [RowRequest(None, None) for _ in of] for each, of in values.items()}
        else:
            outs = self._grouped(key, out)
            requests = {each: [RowRequest(None, one) for one in of] for each, of in outs.items()}
        return self._split(values, requests, copy)

    def _split(
        self, values: Mapping[Key, list[Any]], requests: Mapping[Key, list[RowRequest]] | None, copy: bool
    ) -> StoreCall:
        tables = self._plans.entries.tables
        sparse = {key: of for key, of in values.items() if key in tables}
        arrays = {key: of for key, of in values.items() if key not in tables}
        rows: Sequence[RowCall] = ()
        if sparse and requests is None:
            rows = self._push_rows(sparse)
        elif sparse and requests is not None:
            rows = self._pushpull_rows(sparse, {key: requests[key] for key in sparse})
        if not arrays:
            return StoreCall(None, None, None, rows)
        keys, listed = list(arrays), list(arrays.values())
        if requests is None:
            return self._arrays(None, keys, listed)._replace(rows=rows)
        outs = [array_outs(each, requests[each], of) for each, of in arrays.items()]
        return self._arrays(None, keys, listed, outs, copy)._replace(rows=rows)

    def _arrays(
        self, known: Plan | None, key: Any, value: Any = ABSENT, out: Any = ABSENT, copy: bool = True
    ) -> StoreCall:
        plan: Plan
        values: Arrays | Sequence[torch.Tensor]
        if value is ABSENT:
            plan, writer = self._writer(known, key, out, copy)
            return StoreCall(plan, None, writer)
        arrays = None if known is None else known.values(value if isinstance(key, list | tuple) else [value])
        if known is not None and arrays is not None:
            plan, values = known, arrays
        else:
            grouped = self._grouped(key, value)
            some = {each: of for each, of in grouped.items() if any(map(is_row_sparse, of))}
            if some:
                outs = None if out is ABSENT else self._grouped(key, out)
                return self._some_rows(grouped, some, outs, copy)
            plan, values = self._values(grouped)
        if out is ABSENT:
            return StoreCall(plan, values, None)
        _, writer = self._writer(known, key, out, copy)
        # The values of one key may leave when the answer for another has come. If that is written to memory that they
        # share, it would change them, so they are copied first.
        if not (isinstance(values, Arrays) and values.own) and writer.disturbs(tensors_of(values)):
            values = [tensor.clone() for tensor in tensors_of(values)]
        return StoreCall(plan, values, writer)

    def _some_rows(
        self,
        values: Mapping[Key, list[Any]],
        some: Mapping[Key, list[Any]],
        outs: Mapping[Key, list[Any]] | None,
        copy: bool,
    ) -> StoreCall:
        """Return the call that pushes ``values``, of which ``some`` have some rows of their arrays only."""
        plan, call = self._plans.whole(some), "push" if outs is None else "pushpull"
        given: list[GivenRows] = []
        for key, spec, of in zip(plan.keys, plan.specs, some.values(), strict=True):
            what = described(call, key, self._rank)
            given.append(GivenRows(*contribution(what, ArrayOfRows.of(what, spec), of, self._rule.finite)))
        pulled, writer = None, None
        if outs is not None:
            require_whole(outs)
            pulled, writer = self._writer(None, list(some), [outs[key] for key in some], copy)
            given = [GivenRows(ids, rows.copy()) for ids, rows in given]  # the outs may be written before they leave
        others = [key for key in values if key not in some]
        rest = StoreCall(None, None, None)
        if others:
            written = ABSENT if outs is None else [outs[key] for key in others]
            rest = self._arrays(None, others, [values[key] for key in others], written, copy)
        return rest._replace(some=ArrayRowsCall(plan, RowsOfArrays(given, self._memory), pulled, writer))

    def _values(self, grouped: Mapping[Key, Sequence[Any]]) -> tuple[Plan, Sequence[torch.Tensor]]:
        """Return the plan of ``grouped``, and the sum over devices of each key's values, contiguous.

        A sum is on the first value's device or on the CPU. That of half precision is float32: the servers round it.
        """
        plan = self._plans.arrays(grouped)
        by_key = [self._checked(key, as_tensors(values)) for key, values in grouped.items()]
        return plan, [
            tensors[0].contiguous()
            if len(tensors) == 1
            else reduce_to(
                tensors, tensors[0].device if self._on_device else CPU, summed_in(tensors[0].dtype)
            ).contiguous()
            for tensors in by_key
        ]

    def _writer(self, known: Plan | None, key: Any, out: Any, copy: bool) -> tuple[Plan, Writer]:
        """Return the plan of ``key``, and what writes its values into ``out``."""
        arrays = None if known is None else known.outputs(out if isinstance(key, list | tuple) else [out])
        if known is not None and arrays is not None:
            return known, Writer(known, arrays, copy)
        grouped = self._grouped(key, out)
        plan = self._plans.arrays(grouped)
        outs = [self._checked(key, [as_output(array) for array in arrays]) for key, arrays in grouped.items()]
        return plan, Writer(plan, outs, copy)

    def _grouped(self, key: Any, value: Any) -> dict[Key, list[Any]]:
        grouped = group(key, value)
        one_kind(grouped, self._plans.entries.kind)
        return grouped

    def _checked(self, key: Key, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        entry = self._plans.entries[key]
        for tensor in tensors:
            require_same(key, entry.spec, spec_of(tensor), "this call has")
        return tensors

    # ---- tables

    def _push_rows(self, values: Mapping[Key, Sequence[Any]]) -> list[RowCall]:
        plan = self._plans.tables(values)
        usual = self._usual_values(plan, values)
        if usual is not None:
            return [RowCall(plan, usual.outgoing(plan), None)]
        return [self._row_call(list(values), self._given_rows("push", values), None)]

    def _pushpull_rows(
        self, values: Mapping[Key, Sequence[Any]], requests: Mapping[Key, Sequence[RowRequest]]
    ) -> list[RowCall]:
        """Return what is pushed to tables, and what is read back; ``requests`` are of the same keys.

        Tables of which all rows are wanted that the round changes have messages of their own.
        """
        usual = self._usual_pushpull(values, requests)
        if usual is not None:
            return [usual]
        given = self._given_rows("pushpull", values)
        wanted = {key: self._wanted("pushpull", key, requests[key], of) for key, of in values.items()}
        copy_shared(given, wanted.values())
        calls = []
        for united in (False, True):
            keys = [key for key, each in wanted.items() if each.changed == united]
            if keys:
                plan, of = self._plans.tables(keys), [wanted[key] for key in keys]
                calls.append(self._row_call(keys, given, UnionRows(plan, of) if united else IncomingRows.of(plan, of)))
        return calls

    def _pull_rows(self, requests: Mapping[Key, Sequence[RowRequest]]) -> list[RowCall]:
        plan = self._plans.tables(requests)
        usual = usual_requests(plan, list(requests.values()))
        if usual is not None:
            return [RowCall(plan, None, usual.incoming(plan))]
        wanted = [self._wanted("row_sparse_pull", key, of, None) for key, of in requests.items()]
        return [RowCall(plan, None, IncomingRows.of(plan, wanted))]

    def _pull_whole(self, key: Key, outs: Sequence[Any]) -> list[RowCall]:
        """Return what reads all rows of a table with a shape, some of them with each message."""
        table = self._plans.table(key)
        plan, what = self._plans.tables([key]), described("pull", table.name(key), self._rank)
        if table.rows is None:
            raise UsageError(f"{what}: {table} has no last row; use row_sparse_pull, or table_rows")
        whole = Wanted(what, table)
        numbers = np.arange(table.rows)
        targets = [torch.empty((table.rows, *table.row), dtype=getattr(torch, table.dtype), device="cpu") for _ in outs]
        for at, out in enumerate(outs):
            whole.add(numbers, out)  # which checks it
            if isinstance(out, RowSparse):
                out.ids, out.rows, out.shape = torch.from_numpy(numbers.copy()), targets[at], tuple(targets[at].shape)
            else:
                targets[at] = out
        step = max(1, plan.servers * PAGE // table.row_bytes)
        calls = []
        for start in range(0, table.rows, step):
            page = Wanted(what, table)
            for target in targets:
                page.add(numbers[start : start + step], target[start : start + step])
            calls.append(RowCall(plan, None, IncomingRows.of(plan, [page])))
        return calls

    def _usual_values(self, plan: RowPlan, values: Mapping[Key, Sequence[Any]]) -> UsualRows | None:
        return None if self._rule.finite else usual_values(plan, list(values.values()))

    def _usual_pushpull(
        self, values: Mapping[Key, Sequence[Any]], requests: Mapping[Key, Sequence[RowRequest]]
    ) -> RowCall | None:
        plan = self._plans.tables(values)
        given = self._usual_values(plan, values)
        wanted = None if given is None else usual_requests(plan, [requests[key] for key in values], given)
        if given is None or wanted is None or overlap(given, wanted):
            return None
        outgoing = given.outgoing(plan)
        return RowCall(plan, outgoing, wanted.incoming(plan, outgoing.striped if wanted.ids is given.ids else None))

    def _given_rows(self, call: str, values: Mapping[Key, Sequence[Any]]) -> dict[Key, GivenRows]:
        tables = {key: self._plans.table(key) for key in values}
        return {
            key: GivenRows(
                *contribution(described(call, tables[key].name(key), self._rank), tables[key], of, self._rule.finite)
            )
            for key, of in values.items()
        }

    def _wanted(self, call: str, key: Key, requests: Sequence[RowRequest], pushed: Sequence[Any] | None) -> Wanted:
        table = self._plans.table(key)
        wanted = wanted_rows(call, key, self._rank, table, requests, pushed)
        if wanted.changed:
            what = described(call, table.name(key), self._rank)
            if len(wanted.ids):
                raise UsageError(f"{what}: row_ids={ROUND!r} is for all outs of a key, or for none")
            if self._rule.mode != "sync" or self._rule.quorum is not None:
                raise UsageError(
                    f"{what}: row_ids={ROUND!r} needs rounds that have every worker's push, those of dist_sync without "
                    "a quorum; elsewhere pull the rows that the next batch needs, as workers.Embedding does"
                )
        return wanted

    def _row_call(self, keys: Sequence[Key], given: Mapping[Key, GivenRows], reader: RowReader | None) -> RowCall:
        plan = self._plans.tables(keys)
        ids, rows = [given[key].ids for key in keys], [given[key].rows for key in keys]
        return RowCall(plan, OutgoingRows(plan, ids, rows), reader)


# ---- the arguments of init


def new_arrays(key: Any, value: Any, known: Entries, kind: type | None) -> tuple[list[Key], list[Any], type]:
    """Return new keys, all different, the first value of each, and the type of the store's keys."""
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
    """The tables among the values of an ``init``."""

    specs: Mapping[int, TableSpec]  # of the tables, by their positions in the list of values
    # by key, the rows that a table begins with, each id once; others of that table are zeros
    rows: Mapping[Key, tuple[Ids, Rows]]

    def among(self, count: int, kinds: Sequence[int], specs: Sequence[Spec]) -> tuple[list[int], list[Spec]]:
        """Return the kinds of ``count`` values and the specs of kinds: those of arrays, and these tables among them."""
        if not self.specs:
            return list(kinds), list(specs)
        all_specs = list(dict.fromkeys([*specs, *self.specs.values()]))
        arrays = iter(kinds)
        return [
            all_specs.index(self.specs[place]) if place in self.specs else next(arrays) for place in range(count)
        ], all_specs


_LAYOUT = attrgetter("layout")


def tables_among(keys: Sequence[Key], values: Sequence[Any], rank: int, servers: int) -> FirstTables:
    """Return the tables among the first values of ``keys``; of a list of values the first counts."""
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
