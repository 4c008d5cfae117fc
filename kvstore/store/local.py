"""'local' and 'device': values are summed and updated in this process, on the CPU or on their own devices."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch

from kvstore.errors import AlreadyInitialized, Mismatch, NotFinite, UsageError, WeightsInDoubt, again
from kvstore.lineage import Version, new_lineage
from kvstore.optim import states_file
from kvstore.optim.hyperparameters import finite, require_weight
from kvstore.optim.optimizer import Optimizer, describe, log_replaced, require_shapes
from kvstore.optim.updater import OWN, RowHyperparameters, RowUpdater, Updater, refusals
from kvstore.rows.frozen_rows import FrozenRows, Page
from kvstore.rows.ids import Ids
from kvstore.rows.row_arguments import Wanted, contribution, first_rows, given_rows, is_table, name_of, row_sparse
from kvstore.rows.row_sparse import RowSparse, require_dense
from kvstore.rows.row_table import RowStates, RowTable, split
from kvstore.rows.saving import FrozenReading, OpenSaves, load_table, save_table
from kvstore.rows.sums import Rows
from kvstore.rows.table_files import FrozenState
from kvstore.spec import Key, Spec, check_key, require_floats, require_same, without_value
from kvstore.store.arguments import RowRequest, RowRequests, array_outs, one_kind
from kvstore.store.base import KVStore, TableChanges
from kvstore.store.registry import flag, require_options
from kvstore.store.statistics import Statistics
from kvstore.store.wanted_rows import described, wanted_rows
from kvstore.table import Table
from kvstore.ticket import Ticket
from kvstore.values import all_finite, as_output, as_tensors, reduce_to, spec_of, summed_in

CPU = torch.device("cpu")


PAGE_ROWS = 1 << 14

Function = Callable[[Key, Any, Any], None]


class LocalTables:
    """All tables of one store.

    Args:
        finite: refuse rows that are not finite.
    """

    def __init__(self, finite: bool) -> None:
        self._finite = finite
        self._tables: dict[Key, RowTable] = {}
        self._updaters: dict[Key, RowUpdater] = {}
        self._optimizer: Optimizer | None = None
        self._saves = OpenSaves()
        self.specs: dict[Key, Table] = {}  # what each table is
        self.moved: dict[Key, Key] = {}  # by the key of an array, the key of the table that has its rows now
        self.changes: dict[Key, TableChanges] = {}  # see ``KVStore.table_changes``

    def __contains__(self, key: Key) -> bool:
        return key in self.specs

    def __len__(self) -> int:
        return len(self.specs)

    def add(self, values: Mapping[Key, Any]) -> None:
        """Make tables: all, or none if an exception is raised."""
        firsts = {key: first_rows(described("init", name_of(key, value), 0), value) for key, value in values.items()}
        specs = {key: table for key, (table, _) in firsts.items()}
        updaters = {} if self._optimizer is None else row_updaters(self._optimizer, specs)
        made = {key: RowTable(table, lineage=new_lineage()) for key, table in specs.items()}
        for key, rows in made.items():
            rows.use(updaters.get(key))
            if (first := firsts[key][1]) is not None:
                rows.put(*first, {}, None)
        self.specs |= specs
        self.moved |= {table.parameter: key for key, table in specs.items() if table.parameter is not None}
        self.changes |= dict.fromkeys(specs, TableChanges(0, 0))
        self._tables |= made
        self._updaters |= updaters

    def resolved(self, by_key: dict[Key, Any]) -> dict[Key, Any]:
        moved = self.moved
        return {moved.get(key, key): value for key, value in by_key.items()} if moved else by_key

    def require(self, optimizer: Optimizer) -> None:
        row_updaters(optimizer, self.specs)

    def use(self, optimizer: Optimizer | None) -> None:
        """Update with ``optimizer`` from now on; states of another rule are dropped. None assigns."""
        updaters = {} if optimizer is None else row_updaters(optimizer, self.specs)
        self._optimizer = optimizer
        self._updaters = updaters
        for key, rows in self._tables.items():
            rows.use(updaters.get(key))

    def contribution(self, key: Key, values: list[Any]) -> tuple[Ids, Rows]:
        return contribution(described("push", self.specs[key].name(key), 0), self.specs[key], values, self._finite)

    def update(self, key: Key, ids: Ids, sums: Rows, hyper: RowHyperparameters, function: Function | None) -> Ids:
        """Make one update of a table; return the ids of the rows that have changed."""
        rows = self._tables[key]
        self._changed(key)
        if function is not None:
            return rows.update(ids, self._called(function, key, ids, sums), None)
        updater = self._updaters.get(key)
        if updater is not None and sums.base is not None:  # perhaps the caller's memory
            sums = sums.copy()
        version = rows.version
        try:
            return rows.update(ids, sums, updater, hyper)
        except Exception as exc:
            if rows.version == version and (updater is None or updater.lazy):
                raise
            name = self.specs[key].name(key)
            text = f"an update of {name!r} failed in the middle, and may be half made: {type(exc).__name__}: {exc}"
            raise WeightsInDoubt(text, [key]) from exc

    def pull(self, key: Key, wanted: Wanted, changed: Ids | None = None) -> None:
        """Write the rows that are wanted."""
        wanted.write(self.rows(key, wanted.ids))
        if wanted.changed and changed is not None:
            wanted.write_changed(changed, self.rows(key, changed))

    def rows(self, key: Key, ids: Ids) -> Rows:
        table = self.specs[key]
        out: Rows = np.empty((len(ids), table.width), table.dtype)
        self._tables[key].pull(ids, out)
        return out

    def whole(self, key: Key, targets: list[Any]) -> Callable[[], None]:
        """Return what writes all rows of a table with a shape into each of ``targets``, arrays or ``RowSparse``."""
        table = self.specs[key]
        if table.rows is None:
            raise UsageError(f"key {key!r} is {table}, which has no last row; use row_sparse_pull, or table_rows")
        wanted = Wanted(described("pull", table.name(key), 0), table)
        ids = np.arange(table.rows)
        for target in targets:
            wanted.add(ids, target)
        return lambda: self.pull(key, wanted)

    def put(self, key: Key, value: Any) -> None:
        table = self.specs[key]
        self._changed(key)
        self._tables[key].put(*given_rows(described("put_rows", table.name(key), 0), table, value), {}, None)

    def pages(self, key: Key) -> Iterator[RowSparse]:
        frozen = self._tables[key].freeze()
        pages = self._pages(key, frozen)
        weakref.finalize(pages, frozen.thaw)  # nobody may ever ask for the first page
        return pages

    def states(self) -> dict[tuple[Key, str], torch.Tensor]:
        states: dict[tuple[Key, str], torch.Tensor] = {}
        for key, rows in self._tables.items():
            frozen = rows.freeze()
            pages = list(frozen.pages(PAGE_ROWS))
            frozen.thaw()
            of_key = RowStates.of(pages, frozen.steps).tensors()
            states |= {(key, name): value for name, value in of_key.items()}
        return states

    def require_keys(self, states: Mapping[Key, RowStates], where: object) -> None:
        """Raise ``UsageError`` unless all keys with ``states``, which come from ``where``, have such tables."""
        for key, of_key in states.items():
            if key not in self.specs:
                raise UsageError(f"{where} holds states of table {key!r}, which has not been initialized")
            of_key.require(self._tables[key].parts, key, where)

    def load_states(self, states: Mapping[Key, RowStates]) -> None:
        """Take the states of rows. In tables that grow, only rows that are there take them."""
        for key, of_key in states.items():
            self._load_states(key, of_key)

    def _load_states(self, key: Key, states: RowStates) -> None:
        rows = self._tables[key]
        missing = np.ones(len(states.ids), bool)
        frozen = rows.freeze()
        pages = list(frozen.pages(PAGE_ROWS))
        frozen.thaw()
        for page in pages:
            (ids, values, parts), places = states.replacing(page)
            missing[places] = False
            rows.put(ids, values, parts, None)
        if not self.specs[key].grows:
            ids = states.ids[missing]
            rows.put(ids, self.rows(key, ids), {name: part[missing] for name, part in states.parts.items()}, None)
        rows.put(np.empty(0, np.int64), self.rows(key, np.empty(0, np.int64)), {}, None, states.steps)

    def save(self, key: Key, path: str | os.PathLike[str], state: bool, since: int | None, wait: bool) -> Ticket:
        rows, updater = self._tables[key], self._updaters.get(key)

        def freeze(versions: Sequence[Version] | None) -> tuple[FrozenReading, FrozenState]:
            whole = "" if versions is None else rows.unknown(versions[0])
            frozen = rows.freeze(None if versions is None or whole else versions[0])
            rule = None if updater is None else updater.rule
            return FrozenReading([frozen]), FrozenState([frozen.at], [frozen.steps], rows.parts, rule, whole)

        return save_table(path, self.specs[key].name(key), self.specs[key], 1, since, state, freeze, wait, self._saves)

    def load(self, key: Key, path: str | os.PathLike[str]) -> None:
        rows, updater = self._tables[key], self._updaters.get(key)

        def put(page: Page, version: int, steps: int) -> None:
            rows.put(*page, version, steps)

        self._changed(key, loads=1)
        load_table(path, key, self.specs[key], None if updater is None else updater.rule, put)

    def evict(self, key: Key) -> None:
        self._changed(key)
        self._tables[key].evict()

    def statistics(self, key: Key) -> dict[str, int]:
        return self._tables[key].statistics()

    def _changed(self, key: Key, loads: int = 0) -> None:
        before = self.changes[key]
        self.changes[key] = TableChanges(before.changes + 1, before.loads + loads)

    def _called(self, function: Function, key: Key, ids: Ids, sums: Rows) -> Rows:
        """Return the rows of ``ids`` as the user's updater leaves them."""
        table = self.specs[key]
        shape = None if table.rows is None else (table.rows, *table.row)
        pushed, stored = (
            RowSparse(ids, rows.reshape(len(ids), *table.row), shape) for rows in (sums, self.rows(key, ids))
        )
        function(key, pushed, stored)
        return row_sparse(f"the updater's rows of key {key!r}", stored, table).rows.reshape(sums.shape).numpy()

    def _pages(self, key: Key, frozen: FrozenRows) -> Iterator[RowSparse]:
        table = self.specs[key]
        shape = None if table.rows is None else (table.rows, *table.row)
        try:
            for page in frozen.pages(PAGE_ROWS, state=False):
                yield RowSparse(page.ids, page.rows.reshape(len(page.ids), *table.row), shape)
        finally:
            frozen.thaw()


def row_updaters(optimizer: Optimizer, tables: Mapping[Key, Table]) -> dict[Key, RowUpdater]:
    """Return what updates the rows of each of ``tables`` with ``optimizer``."""
    return {
        key: RowUpdater(optimizer, table.name(key), table.dtype, table.width, table.grows)
        for key, table in tables.items()
    }


class LocalStore(KVStore):
    """Sums and updates on the CPU, whatever devices the values are on."""

    def __init__(self, name: str = "local", check_finite: bool = False) -> None:
        super().__init__(name)
        self._check_finite = check_finite
        self._pushed: dict[Key, int] = {}  # pushes by key, counted where values are checked
        self._stored: dict[Key, torch.Tensor] = {}
        self._specs: dict[Key, Spec] = {}
        self._updater: Updater | None = None
        self._function: Callable[[Key, Any, Any], None] | None = None
        self._factor = 1.0  # of sums that become values
        self._tables = LocalTables(check_finite)
        self._pushes = self._pulls = 0
        self._doubts: dict[Key, WeightsInDoubt] = {}  # what an optimizer may have half updated, and how
        self._closed = False

    @classmethod
    def create(cls, name: str, _canonical: str, options: Mapping[str, Any]) -> KVStore:
        require_options(name, options, ("check_finite",))
        return cls(name, flag("check_finite", options.get("check_finite")))

    def _init(self, values: dict[Key, list[Any]], listed: list[Key]) -> None:
        self._check()
        if len(values) < len(listed):
            raise UsageError("a key is listed twice: pass each key to init once")
        for key in values:
            if key in self._stored or key in self._tables:
                raise AlreadyInitialized(f"key {key!r} is already initialized; push a new value instead")
        tables = {key: arrays[0] for key, arrays in values.items() if is_table(arrays[0])}
        firsts = {key: as_tensors(arrays)[0] for key, arrays in values.items() if key not in tables}
        if self._updater is not None:
            require_shapes(self._updater.optimizer, ((key, spec_of(first)) for key, first in firsts.items()))
        self._tables.add(tables)
        for key, first in firsts.items():
            with torch.inference_mode(False):  # a tensor that is made within it could not be written to outside
                self._stored[key] = first.to(self._home(key, [first]), copy=True).contiguous()
            self._specs[key] = spec_of(first)

    def _push(self, values: dict[Key, list[Any]], priority: int) -> Ticket:
        self._update(values)
        return Ticket("push", list(values))

    def _update(self, values: dict[Key, list[Any]]) -> dict[Key, Ids]:
        """Make one update of each key; return the ids of each table's rows that have changed."""
        self._check()
        values = self._tables.resolved(values)
        self._require_sound(values)
        arrays = {key: its_arrays for key, its_arrays in values.items() if key not in self._tables}
        require_dense(arrays, self._specs)
        given = {key: self._checked(key, as_tensors(its_arrays)) for key, its_arrays in arrays.items()}
        rows = {key: self._tables.contribution(key, each) for key, each in values.items() if key not in arrays}
        if self._updater is not None:
            require_floats((key, self._specs[key]) for key in given)
        merged = {key: self._reduce(key, tensors) for key, tensors in given.items()}
        if self._check_finite:
            self._require_finite(merged)
        self._pushes += len(values)
        try:
            changed = {
                key: self._tables.update(key, ids, sums, self._row_hyperparameters(), self._function)
                for key, (ids, sums) in rows.items()
            }
            if self._updater is not None:
                # The gradient is overwritten, so one that still is the caller's memory is copied first.
                fresh = {k: m.clone() if m.data_ptr() == given[k][0].data_ptr() else m for k, m in merged.items()}
                if fresh:
                    self._updater.update([(key, self._stored[key], grad) for key, grad in fresh.items()])
            elif self._function is not None:
                for key, total in merged.items():
                    self._function(key, total, self._stored[key])
            else:
                for key, total in merged.items():
                    self._stored[key].copy_(total)
        except WeightsInDoubt as exc:
            self._doubts |= dict.fromkeys(exc.keys, exc)
            raise
        return changed

    def _pull(self, outs: dict[Key, list[Any]], priority: int, copy: bool = True) -> Ticket:
        self._check()
        outs = self._tables.resolved(outs)
        self._require_sound(outs)
        tables = [self._tables.whole(key, its_outs) for key, its_outs in outs.items() if key in self._tables]
        targets = {
            key: self._checked(key, [as_output(out) for out in its_outs])
            for key, its_outs in outs.items()
            if key not in self._tables
        }
        self._pulls += len(outs)
        for key, tensors in targets.items():
            for tensor in tensors:
                tensor.copy_(self._stored[key])
        for write in tables:
            write()
        return Ticket("pull", list(outs))

    def _pull_rows(self, requests: RowRequests, priority: int) -> Ticket:
        wanted = {
            self._table(key): wanted_rows("row_sparse_pull", key, 0, self._tables.specs[key], each)
            for key, each in self._tables.resolved(requests.by_key).items()
        }
        self._pulls += len(wanted)
        for key, each in wanted.items():
            self._tables.pull(key, each)
        return Ticket("row_sparse_pull", list(wanted))

    def _pushpull(self, values: dict[Key, list[Any]], outs: dict[Key, list[Any]], priority: int, copy: bool) -> Ticket:
        in_place = outs is values
        by_key = {
            key: [RowRequest(None, None if in_place else out) for out in its_outs] for key, its_outs in outs.items()
        }
        return self._push_and_pull(values, by_key)

    def _pushpull_rows(self, values: dict[Key, list[Any]], requests: RowRequests, priority: int, copy: bool) -> Ticket:
        return self._push_and_pull(values, requests.by_key)

    def _push_and_pull(self, values: dict[Key, list[Any]], requests: dict[Key, list[RowRequest]]) -> Ticket:
        self._check()
        values, requests = self._tables.resolved(values), self._tables.resolved(requests)
        outs: dict[Key, list[Any]] = {}
        wanted: dict[Key, Wanted] = {}
        for key, its_requests in requests.items():
            if key in self._tables:
                wanted[key] = wanted_rows("pushpull", key, 0, self._tables.specs[key], its_requests, values[key])
                continue
            outs[key] = array_outs(key, its_requests, values[key])
            self._checked(key, [as_output(out) for out in outs[key]])
        changed = self._update(values)
        self._pull(outs, 0)
        self._pulls += len(wanted)
        for key, each in wanted.items():
            self._tables.pull(key, each, changed[key])
        return Ticket("pushpull", list(values))

    def put_rows(self, key: Any, value: Any) -> None:
        self._tables.put(self._table(key), value)

    def table_rows(self, key: Any) -> Iterator[RowSparse]:
        return self._tables.pages(self._table(key))

    def save_table(
        self,
        key: Any,
        dir: str | os.PathLike[str],
        state: bool = True,
        since: int | None = None,
        *,
        wait: bool = True,
    ) -> Ticket:
        return self._tables.save(self._table(key), dir, state, since, wait)

    def load_table(self, key: Any, dir: str | os.PathLike[str]) -> None:
        self._tables.load(self._table(key), dir)

    def evict(self, key: Any) -> None:
        for each in [self._table(each) for each in (key if isinstance(key, list | tuple) else [key])]:
            self._tables.evict(each)

    def table_statistics(self, key: Any) -> dict[str, int]:
        return self._tables.statistics(self._table(key))

    def table_changes(self, key: Any) -> TableChanges:
        found = self._tables.changes.get(key)
        return self._tables.changes[self._table(key)] if found is None else found

    def set_optimizer(self, optimizer: Any, **hyperparameters: Any) -> None:
        self._check()
        new = describe(optimizer, hyperparameters)
        require_shapes(new, self._specs.items())
        old = self._updater.optimizer if self._updater is not None else None
        with refusals(new):
            self._tables.require(new)
            if self._updater is not None and new.same_rule(old):
                self._updater.configure(new)
            else:
                self._updater = Updater(new)
                log_replaced(old, new)
        self._tables.use(new)
        self._function = None

    def set_updater(self, updater: Callable[[Key, Any, Any], None]) -> None:
        self._check()
        self._tables.use(None)
        self._function, self._updater = updater, None

    @property
    def learning_rate(self) -> float:
        return self._require_updater().lr

    def set_hyperparameters(
        self,
        *,
        learning_rate: float | None = None,
        rescale_grad: float | None = None,
        groups: Sequence[Mapping[str, Any]] = (),
        **others: Any,
    ) -> None:
        if self._updater is None and self._function is None and learning_rate is None and not groups and not others:
            self._check()
            self._factor = 1.0 if rescale_grad is None else finite("rescale_grad", rescale_grad)
            return
        updater = self._require_updater()
        changes = {**updater.changes, **updater.optimizer.changes(others, groups)}
        lr = updater.lr if learning_rate is None else finite("learning_rate", learning_rate)
        rescale = updater.rescale_grad if rescale_grad is None else finite("rescale_grad", rescale_grad)
        updater.lr, updater.rescale_grad, updater.changes = lr, rescale, changes  # all, or none if one is refused

    @property
    def rescale_grad(self) -> float:
        return self._require_updater().rescale_grad

    @contextmanager
    def rescaled(self, factor: float) -> Iterator[None]:
        updater = self._require_updater()
        before, updater.rescale_grad = updater.rescale_grad, finite("rescale_grad", factor)
        try:
            yield
        finally:
            updater.rescale_grad = before

    def weighted(self, weight: float) -> AbstractContextManager[None]:
        self._check()
        require_weight(weight)
        return nullcontext()  # the mean over one worker is that worker's, whatever its weight

    def save_optimizer_states(self, path: str | os.PathLike[str], *, note: str | None = None) -> None:
        updater = self._require_updater()
        self._require_sound(self._doubts)
        states = updater.states.of(self._stored) | self._tables.states()
        states_file.write(path, updater.optimizer.rule, states, note=note)

    def load_optimizer_states(self, path: str | os.PathLike[str]) -> None:
        updater = self._require_updater()
        optimizer, loaded = states_file.read(path)
        states_file.require_optimizer(optimizer, updater.optimizer.rule, path)
        arrays, tables = split(loaded, path)
        states_file.require_keys(arrays, self._specs, path)
        self._tables.require_keys(tables, path)
        updater.states.load(arrays, self._stored)
        self._tables.load_states(tables)

    def companion(self) -> KVStore:
        return type(self)(self._name)

    @property
    def check_finite(self) -> bool:
        return self._check_finite

    def statistics(self) -> Statistics:
        return Statistics(keys=len(self._stored) + len(self._tables), pushes=self._pushes, pulls=self._pulls)

    def close(self) -> None:
        self._closed = True

    def _check(self) -> None:
        if self._closed:
            raise UsageError("this store is closed")

    def _home(self, key: Key, tensors: list[torch.Tensor]) -> torch.device:
        """Where the sum of ``tensors`` is made, and the value of ``key`` kept."""
        return CPU

    def _reduce(self, key: Key, tensors: list[torch.Tensor]) -> torch.Tensor:
        home = self._home(key, tensors)
        if self._stored[key].device != home:
            self._stored[key] = self._stored[key].to(home)
        wide = summed_in(tensors[0].dtype)
        if self._updater is not None:  # it takes the sum in this dtype; all else takes it rounded
            return reduce_to(tensors, home, wide if len(tensors) > 1 else None)
        if self._function is not None or self._factor == 1 or not wide.is_floating_point:
            return reduce_to(tensors, home)
        return (reduce_to(tensors, home, wide) * self._factor).to(tensors[0].dtype)

    def _require_finite(self, sums: Mapping[Key, torch.Tensor]) -> None:
        for key, total in sums.items():
            self._pushed[key] = self._pushed.get(key, 0) + 1
            if total.is_floating_point() and not all_finite(total):
                raise NotFinite(
                    f"push {self._pushed[key]} of {key!r} has NaN or infinite elements; no value has been updated"
                )

    def _require_sound(self, keys: Iterable[Key]) -> None:
        for key in keys if self._doubts else ():
            if key in self._doubts:
                raise again(self._doubts[key])

    def _checked(self, key: Key, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        self._check()
        spec = self._specs.get(key)
        if spec is None:
            raise without_value(key, [*self._specs, *self._tables.specs])
        for tensor in tensors:
            require_same(key, spec, spec_of(tensor), "this call has")
        return tensors

    def _table(self, key: Any) -> Key:
        self._check()
        known: Key = check_key(key)
        one_kind([known], self._kind)
        known = self._tables.moved.get(known, known)
        self._require_sound([known])
        if known in self._specs:
            raise Mismatch(f"key {key!r} is {self._specs[known]}, an array, and no table: use pull")
        if known not in self._tables:
            raise without_value(known, [*self._specs, *self._tables.specs])
        return known

    def _arrays_of(self, outs: dict[Key, list[Any]]) -> dict[Key, list[Any]]:
        tables = [key for key in outs if key in self._tables]
        if not tables:
            return outs
        self._warn_left_out(tables)
        return {key: its_outs for key, its_outs in outs.items() if key not in self._tables}

    def _row_hyperparameters(self) -> RowHyperparameters:
        updater = self._updater
        return OWN if updater is None else RowHyperparameters(updater.lr, updater.rescale_grad, updater.changes)

    def _require_updater(self) -> Updater:
        self._check()
        if self._updater is None:
            raise UsageError("no optimizer is set; call set_optimizer first")
        return self._updater


class DeviceStore(LocalStore):
    """Sums and updates on the devices where the values live; keys are spread over them by bytes."""

    def __init__(self, name: str = "device", check_finite: bool = False) -> None:
        super().__init__(name, check_finite)
        self._homes: dict[Key, torch.device] = {}
        self._loads: dict[torch.device, int] = {}

    def _home(self, key: Key, tensors: list[torch.Tensor]) -> torch.device:
        """The device of the first value, or the least loaded of several; a key moves there at its first push."""
        devices = list(dict.fromkeys(tensor.device for tensor in tensors))
        home = self._homes.get(key)
        if home not in devices:
            home = min(devices, key=lambda device: self._loads.get(device, 0))
            if key in self._stored:  # init's device says nothing about where gradients will be
                self._homes[key] = home
                self._loads[home] = self._loads.get(home, 0) + self._specs[key].nbytes
        return home
