"""'local' and 'device': values are summed and updated in this process, on the CPU or on their own devices."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from kvstore.codecs.options import chosen
from kvstore.errors import AlreadyInitialized, Mismatch, NotFinite, UsageError, WeightsInDoubt, again
from kvstore.optim import states_file
from kvstore.optim.hyperparameters import finite, require_weight
from kvstore.optim.optimizer import describe, log_replaced, require_shapes
from kvstore.optim.updater import OWN, RowHyperparameters, Updater, refusals
from kvstore.rows.ids import Ids
from kvstore.rows.row_arguments import ArrayOfRows, Wanted, contribution, is_table
from kvstore.rows.row_sparse import RowSparse, is_row_sparse, require_uncompressed, require_whole
from kvstore.rows.row_table import split
from kvstore.spec import Key, Spec, check_key, require_floats, require_same, without_value
from kvstore.store.arguments import RowRequest, RowRequests, array_outs, one_kind
from kvstore.store.base import KVStore, TableChanges
from kvstore.store.device_compression import DeviceCompression
from kvstore.store.local_tables import LocalTables
from kvstore.store.registry import flag, require_options
from kvstore.store.statistics import Statistics
from kvstore.store.wanted_rows import described, wanted_rows
from kvstore.ticket import Ticket
from kvstore.values import RowRange, RowWindow, all_finite, as_output, as_tensors, reduce_to, spec_of, summed_in

CPU = torch.device("cpu")


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
        self._compressing: DeviceCompression | None = None
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
        sparse = [key for key, its_arrays in arrays.items() if any(map(is_row_sparse, its_arrays))]
        given = {key: self._checked(key, as_tensors(of)) for key, of in arrays.items() if key not in sparse}
        some = {key: self._some_rows(key, arrays[key]) for key in sparse}
        rows = {key: self._tables.contribution(key, each) for key, each in values.items() if key not in arrays}
        if self._updater is not None:
            require_floats((key, self._specs[key]) for key in arrays)
        if self._compressing is not None:
            require_uncompressed(some)
            given = self._compressing.decoded(given)
        merged = {key: self._reduce(key, tensors) for key, tensors in given.items()}
        if self._check_finite:
            self._require_finite(merged | {key: part.rows for key, part in some.items()})
        self._pushes += len(values)
        try:
            changed = {
                key: self._tables.update(key, ids, sums, self._row_hyperparameters(), self._function)
                for key, (ids, sums) in rows.items()
            }
            if self._updater is not None:
                # The gradient is overwritten, so one that still is the caller's memory is copied first.
                fresh = {k: m.clone() if m.data_ptr() == given[k][0].data_ptr() else m for k, m in merged.items()}
                fresh |= self._step_rows(self._updater, some)
                if fresh:
                    self._updater.update([(key, self._stored[key], grad) for key, grad in fresh.items()])
            elif self._function is not None:
                for key, total in merged.items():
                    self._function(key, total, self._stored[key])
                for key, part in some.items():
                    pushed = part.rows.to(self._stored[key].dtype).view(len(part.ids), *self._specs[key].shape[1:])
                    self._function(key, RowSparse(part.ids, pushed, self._specs[key].shape), self._stored[key])
            else:
                for key, total in merged.items():
                    self._stored[key].copy_(total)
                for key, part in some.items():
                    whole = part.rows * self._factor if part.rows.is_floating_point() else part.rows
                    part._replace(rows=whole).write(self._stored[key].view(-1), add=False)
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
            require_whole({key: outs[key]})
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

    def set_gradient_compression(self, compression: Mapping[str, object] | None) -> None:
        self._check()
        wanted, now = chosen(compression), self._compressing
        if wanted is None or now is None or now.compression != wanted:
            self._compressing = None if wanted is None else DeviceCompression(wanted)

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

    def _some_rows(self, key: Key, values: list[Any]) -> RowRange:
        """Return the sum of what is pushed of an array of which only some rows are."""
        if key not in self._specs:
            raise without_value(key, [*self._specs, *self._tables.specs])
        what = described("push", key, 0)
        array = ArrayOfRows.of(what, self._specs[key])
        ids, rows = contribution(what, array, values, self._check_finite)
        home = self._home(key, [RowSparse.of(value).rows for value in values])
        if self._stored[key].device != home:
            self._stored[key] = self._stored[key].to(home)
        return RowRange(0, RowWindow(0, self._specs[key].size, array.width), ids, torch.from_numpy(rows))

    def _step_rows(self, updater: Updater, some: Mapping[Key, RowRange]) -> dict[Key, torch.Tensor]:
        """Update the rows of arrays; return the gradients of those whose other rows are to be updated, too."""
        whole: dict[Key, torch.Tensor] = {}
        for key, part in some.items():
            stored = self._stored[key]
            group = updater.alone(key, stored)
            if updater.lazy(group):
                updater.step_rows(group, [[part]], keep=True)  # perhaps it is the caller's memory
            else:
                whole[key] = part.values.to(stored.device).view(stored.shape)
        return whole

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
