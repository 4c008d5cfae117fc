"""The 'dist_*' stores, the worker's side: it places, sends and waits; servers sum and update."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any

import torch

from kvstore.client.calls import Arguments, distinct, new_arrays, tables_among
from kvstore.client.checkpointing import checkpointing
from kvstore.client.compression import Compressing, compressing
from kvstore.client.entries import Entries, Entry, PushClocks
from kvstore.client.lending import Lending
from kvstore.client.newcomers import Part, newcomers
from kvstore.client.optimizing import Optimizing, StoredStates, advice, described, warn
from kvstore.client.plans import Pieces, Plan, Plans, RowPlan
from kvstore.client.publishing import Publishing
from kvstore.client.push_pull import Pushes
from kvstore.client.requests import Joining, Requests, WorkerBarriers
from kvstore.client.resuming import TrainedStore
from kvstore.client.store_options import parse
from kvstore.client.stored_tables import StoredRows, StoredTables, TableReading
from kvstore.codecs.options import chosen
from kvstore.errors import Unsupported, UsageError
from kvstore.job.config import Config
from kvstore.lineage import Version
from kvstore.member.session import Session
from kvstore.member.shared_session import shared
from kvstore.optim import states_file
from kvstore.optim.hyperparameters import carried
from kvstore.optim.optimizer import require_shapes
from kvstore.placement import WHOLE
from kvstore.rows.frozen_rows import Page
from kvstore.rows.halves import array_of_rows
from kvstore.rows.ids import Ids
from kvstore.rows.row_arguments import given_rows, sparse_of
from kvstore.rows.row_sparse import RowSparse
from kvstore.rows.saving import OpenSaves, load_table, save_table
from kvstore.rows.sums import Rows
from kvstore.rows.table_files import FrozenState
from kvstore.rule import Rule
from kvstore.shares import Share
from kvstore.spec import Key, as_shape, check_key
from kvstore.store.arguments import requests_of
from kvstore.store.base import KVStore, ReservedJoin, TableChanges
from kvstore.store.maker import UNNAMED, made_by, maker, place
from kvstore.store.maker import name as named
from kvstore.store.registry import canonical
from kvstore.store.statistics import Statistics
from kvstore.store.wanted_rows import described as call_of
from kvstore.ticket import Ticket, WaitLimits
from kvstore.values import Leaving, as_dtype, tensors_of

_UNCHANGED = TableChanges(0, 0)


class DistStore(KVStore):
    """One worker's end of a store; see ``KVStore``. Workers that make their stores in the same order share them.

    Args:
        name: what ``create`` was asked for.
        on_device: sum the values of several devices on the first one's device, not on the CPU.
        timeout: the deadline of every wait, in seconds; None for the job's.
        bound: arrays of so many elements are cut across all servers; None for the job's.
        checkpoints: whether the job's checkpoints may have this store.
    """

    _join_advice = ""  # what to call instead of ``join``; empty if nobody has reserved it

    def __init__(
        self,
        session: Session,
        name: str = "dist_sync",
        rule: Rule | None = None,
        on_device: bool = False,
        timeout: float | None = None,
        bound: int | None = None,
        checkpoints: bool = True,
    ) -> None:
        super().__init__(name)
        self._session = session
        self.rule = Rule() if rule is None else rule
        self.rule.require_workers(session.num_workers)
        self._on_device = on_device
        self._timeout = timeout
        limits = session.limits if timeout is None else WaitLimits(timeout, timeout)
        self._bound = session.config.bigarray_bound if bound is None else bound
        self._pieces = Pieces(session.config.piece_bytes, session.config.least_piece_bytes, len(session.servers))
        self._plans = Plans(self._pieces)
        self._entries = self._plans.entries
        self._arguments = Arguments(self._plans, self.rule, session.rank, on_device, session.client)
        self._clocks = PushClocks()
        self._closed = False
        self._checkpoints = checkpointing(session, partial(self._beside, "checkpoints")) if checkpoints else None
        ordinal = session.stores + 1
        made = f"a {canonical(name)!r} store of {maker()}"
        at = place() if checkpoints else ""  # a store beside another is made when it is first needed, wherever that is
        # Set again if an exception ends this and the next store is made in its place, so nothing is counted twice.
        session.store_names[ordinal] = named(session.store_names.get(each, "") for each in range(1, ordinal))
        self._requests = Requests(session, ordinal, self.rule, limits, made, at)
        self._saves = OpenSaves()
        self._table_changes: dict[Key, TableChanges] = {}
        self._stored = StoredTables(self._requests, self._entries.tables)
        self._barriers = WorkerBarriers(self._requests)
        states = StoredStates(self._stored, self._plans, self._clocks, self._row_array)
        self._optimizing = Optimizing(self._requests, states, name)
        self._joining = Joining(self._requests, self._clocks)
        self._pushes = Pushes(self._requests, self.rule, self._clocks, self._optimizing, self._joining)
        if on_device and session.aggregator is not None and session.config.device_sum != "off":
            self._pushes.lending = Lending(
                session.config.device_sum, self._requests, session.client, session.aggregator, self._stored_bytes
            )
        self._trained = TrainedStore(ordinal, self._entries, self._optimizing, self._pushes, self._stored)
        self._publishing = Publishing(self._requests, self._trained)
        if self._checkpoints is not None:
            self._checkpoints.add(self._trained)
            self._pushes.before.append(partial(self._checkpoints.before, self._trained))
        self._publish_every = session.config.publish_every if checkpoints else 0
        if self._publish_every:
            self._pushes.before.append(partial(self._publishing.before, self._publish_every))
        self._newcomers = newcomers(session)
        self._part = Part(
            *(self._requests, self._entries, self._clocks, self._barriers, self._joining),
            *(self._optimizing, self._publishing),
        )
        if self._newcomers is not None:
            self._newcomers.add(self._part, self._checkpoints, self._pushes)
        session.flushes.append(self._pushes.flush)
        session.activity.stores.append(self._pushes.activity)
        session.stores = ordinal  # last: if an exception has ended this before, the next store is made in its place

    @classmethod
    def create(cls, name: str, canonical: str, options: Mapping[str, Any]) -> KVStore:
        rule, timeout, bound = parse(name, canonical, options)
        return cls(shared(Config.from_env()), name, rule, "device" in name, timeout, bound)

    # ---- values

    def init(self, key: Any, value: Any) -> None:
        self._check()
        keys, arrays, kind = new_arrays(key, value, self._entries, self._kind)
        first = tables_among(keys, arrays, self.rank, len(self._session.servers))
        if first.specs and self.rule.compensation:
            raise UsageError(
                "delay_compensation is for arrays: make another store for tables, with kv.create(...) without it"
            )
        places = [place for place in range(len(keys)) if place not in first.specs]
        array_keys = [keys[place] for place in places]
        kinds, specs, values = distinct([arrays[place] for place in places])
        all_kinds, all_specs = first.among(len(keys), kinds, specs)
        firsts = ((keys[all_kinds.index(number)], spec) for number, spec in enumerate(all_specs))
        require_shapes(self._optimizing.optimizer, firsts)
        whole = self._optimizing.whole
        piece_bytes = self._pieces.of(self._entries.nbytes + sum(specs[number].nbytes for number in kinds))
        bounds = (WHOLE, WHOLE) if whole else (self._bound, piece_bytes)
        entries, gives = self._requests.declare(keys, all_kinds, all_specs, *bounds)
        if gives:
            resumed = None if self._checkpoints is None else self._checkpoints.resumed
            if resumed is not None:
                of_arrays = list(map(specs.__getitem__, kinds))
                values = self._trained.first_values(resumed, array_keys, of_arrays, tensors_of(values))
            if array_keys:
                self._requests.put_values(Plan(entries, array_keys, piece_bytes), Leaving(values))
            if first.specs:
                self._stored.make(RowPlan(entries, entries.tables), first.rows)
            if resumed is not None:
                self._trained.tables.put(resumed, entries)
                self._trained.give_states(resumed, entries)
            # Last, for other workers use the keys from then on. They are added with the request: added before it, they
            # would stay if the call failed, and init could not be called again.
            self._requests.ready(keys, partial(self._add, entries))
        else:
            self._session.client.alone(self._add, entries)
        self._kind = kind

    def _add(self, entries: Entries) -> None:
        self._clocks.grow(len(self._entries) + len(entries))
        self._entries.add(entries)
        if self._newcomers is not None:
            self._newcomers.take_clocks(self._part)

    def push(self, key: Any, value: Any, priority: int = 0, *, wait: bool = False) -> Ticket:
        self._check()
        return Ticket(self._pushes.make("push", self._arguments.check(key, value), priority, wait))

    def pull(
        self, key: Any, out: Any, priority: int = 0, ignore_sparse: bool = True, *, wait: bool = True, copy: bool = True
    ) -> Ticket:
        self._check()
        if ignore_sparse and self._arguments.has_tables(key):
            arrays, left_out = self._arguments.without_tables(key, out)
            self._warn_left_out(left_out)
            if not arrays:
                return Ticket("pull")
            key, out = list(arrays), list(arrays.values())
        if self._on_pull is not None:
            self._on_pull(out)
        return Ticket(self._pushes.make("pull", self._arguments.check(key, out=out, copy=copy), priority, wait))

    def pushpull(
        self,
        key: Any,
        value: Any,
        out: Any = None,
        priority: int = 0,
        *,
        wait: bool = True,
        copy: bool = True,
        row_ids: Any = None,
    ) -> Ticket:
        self._check()
        if row_ids is None:
            return Ticket(self._pushes.make("pushpull", self._arguments.check(key, value, out, copy), priority, wait))
        requests = requests_of(key, out, row_ids)
        call = self._arguments.check_rows(key, requests, value, copy)
        operation = self._pushes.make("pushpull", call, priority, wait)
        operation.result = requests.result()
        return Ticket(operation)

    def _check(self) -> None:
        """Raise what has gone wrong since the last call."""
        if self._closed:
            raise UsageError("this store is closed")
        self._pushes.check()

    def empty(self, shape: Any, dtype: Any = None) -> torch.Tensor:
        return self._session.client.alone(self._requests.packer.empty, as_shape(shape), as_dtype(dtype))

    def set_gradient_compression(self, compression: Mapping[str, object] | None) -> None:
        self._check()
        wanted = chosen(compression)
        now = self._pushes.compressing
        if wanted is not None and now is not None and now.compression == wanted:
            how: Compressing | None = now
        else:
            aggregator = self._session.aggregator if self.rule.merges else None
            how = None if wanted is None else compressing(wanted, self._requests, self._entries, aggregator)
        self._session.client.alone(self._compress, how)

    def _compress(self, how: Compressing | None) -> None:
        self._plans.fold(*((1, 0) if how is None else (how.fold, how.small)))
        self._pushes.compressing = how
        if how is not None and self._pushes.lending is not None:
            self._pushes.lending.refusal = "what is pushed is compressed"

    # ---- tables

    def row_sparse_pull(
        self, key: Any, out: Any = None, priority: int = 0, row_ids: Any = None, *, wait: bool = True
    ) -> Any:
        self._check()
        requests = requests_of(key, out, row_ids)
        operation = self._pushes.make("row_sparse_pull", self._arguments.check_rows(key, requests), priority, wait)
        operation.result = requests.result()
        return operation.result if wait and out is None else Ticket(operation)

    def put_rows(self, key: Any, value: Any) -> None:
        key = self._arguments.resolved(key)
        self._table(key)
        ids, rows = given_rows(
            call_of("put_rows", self._plans.table(key).name(key), self.rank),
            self._plans.table(key),
            value,
        )
        self._pushes.flush()
        self._note_change(key)
        if self._session.leads:
            self._stored.put("put_rows", self._plans.tables([key]), key, StoredRows(ids, rows))

    def table_rows(self, key: Any) -> Iterator[RowSparse]:
        key = self._arguments.resolved(key)
        entry = self._table(key)
        return self._rows_of(key, self._stored.freeze(entry.segments, self._clock(entry)))

    def _rows_of(self, key: Any, reading: TableReading) -> Iterator[RowSparse]:
        with reading:
            for page in reading.pages(state=False):
                yield sparse_of(self._plans.table(key), page.ids, page.rows)

    def evict(self, key: Any) -> None:
        key = self._arguments.resolved(key)
        keys = key if isinstance(key, list | tuple) else [key]
        entries = [self._table(each) for each in keys]
        self._pushes.flush()
        for each in keys:
            self._note_change(each)
        for entry in entries if self._session.leads else ():
            self._stored.evict(entry.segments, self._clock(entry))

    def table_statistics(self, key: Any) -> dict[str, int]:
        key = self._arguments.resolved(key)
        return self._stored.statistics(self._table(key).segments)

    def table_changes(self, key: Any) -> TableChanges:
        if key not in self._entries.tables:
            key = self._arguments.resolved(key)
            self._table(key)
        changes, loads = self._table_changes.get(key, _UNCHANGED)
        pushed = self._clocks.pushed[self._entries.places[key]]
        return TableChanges(int(pushed) + changes + self._barriers.passed, loads)

    def save_table(
        self,
        key: Any,
        dir: str | os.PathLike[str],
        state: bool = True,
        since: int | None = None,
        *,
        wait: bool = True,
    ) -> Ticket:
        key = self._arguments.resolved(key)
        entry, table = self._table(key), self._plans.table(key)
        self._pushes.flush()

        def freeze(versions: Sequence[Version] | None) -> tuple[TableReading, FrozenState]:
            reading = self._stored.freeze(entry.segments, self._clock(entry), versions)
            return reading, reading.state(self._optimizing.rule())

        return save_table(dir, table.name(key), table, len(entry.segments), since, state, freeze, wait, self._saves)

    def load_table(self, key: Any, dir: str | os.PathLike[str]) -> None:
        key = self._arguments.resolved(key)
        self._table(key)
        self._pushes.flush()
        self._note_change(key, loads=1)
        if self._session.leads:
            plan = self._plans.tables([key])

            def put(page: Page, version: int, steps: int) -> None:
                self._stored.put("load_table", plan, key, StoredRows(*page, version, steps))

            load_table(dir, key, self._plans.table(key), self._optimizing.rule(), put)

    def _note_change(self, key: Key, loads: int = 0) -> None:
        before = self._table_changes.get(key, _UNCHANGED)
        self._table_changes[key] = TableChanges(before.changes + 1, before.loads + loads)

    def _table(self, key: Any) -> Entry:
        """Return what is known of the table of ``key``; raise what has gone wrong since the last call."""
        self._check()
        self._plans.table(check_key(key))
        return self._entries[key]

    def _row_array(self, key: Key, ids: Ids) -> Rows:
        rows = self.row_sparse_pull(key, row_ids=ids)
        return array_of_rows(rows.view(len(ids), self._plans.table(key).width))

    def _clock(self, entry: Entry) -> int:
        return int(self._clocks.pushed[entry.place])

    # ---- updates

    def set_optimizer(self, optimizer: Any, **hyperparameters: Any) -> None:
        self._check()
        new = described(optimizer, hyperparameters, self._entries)
        self._pushes.flush()  # what was pushed before is updated as before
        self._optimizing.set(new)
        if self._checkpoints is not None:
            self._trained.optimizer_set()
            if self._session.leads and self._checkpoints.resumed is not None:
                self._trained.give_states(self._checkpoints.resumed, self._entries)
        if self.rank == 0 and (text := advice(new, self.rule, self._name, self.num_workers)):
            warn(text)

    def set_updater(self, updater: Callable[[Key, Any, Any], None]) -> None:
        raise Unsupported("servers take no function; use set_optimizer with a name and numbers")

    @property
    def learning_rate(self) -> float:
        return self._optimizing.learning_rate

    def set_hyperparameters(
        self,
        *,
        learning_rate: float | None = None,
        rescale_grad: float | None = None,
        groups: Sequence[Mapping[str, Any]] = (),
        **others: Any,
    ) -> None:
        self._check()
        self._optimizing.change(learning_rate, rescale_grad, groups, others)

    @property
    def rescale_grad(self) -> float:
        return self._optimizing.rescale_grad

    def rescaled(self, factor: float) -> AbstractContextManager[None]:
        self._check()
        return self._optimizing.rescaled(factor)

    def declare(self, text: str | None) -> None:
        if self.rule.mode == "sync" and self.rule.quorum is None:
            self._optimizing.alike = text if text is None else carried(text)

    def weighted(self, weight: float) -> AbstractContextManager[None]:
        self._check()
        if self.rule.mode == "async":
            raise UsageError(f"a {self._name!r} store has no rounds, whose mean a weight could change")
        return self._optimizing.weighted(weight)

    def save_optimizer_states(self, path: str | os.PathLike[str], *, note: str | None = None) -> None:
        self._check()
        self._pushes.flush()
        squeezed = self._pushes.compressing
        residuals = None if squeezed is None else states_file.Residuals(self.rank, *squeezed.state())
        self._optimizing.save(path, self._entries, residuals, note)

    def load_optimizer_states(self, path: str | os.PathLike[str]) -> None:
        self._check()
        if self._pushes.compressing is not None:
            residuals = states_file.read_residuals(path)
            if residuals is not None and residuals.rank == self.rank:
                self._pushes.flush()
                tables = self._entries.tables
                shapes = {key: entry.spec.shape for key, entry in self._entries.items() if key not in tables}
                self._pushes.compressing.load_state(residuals.tensors, residuals.plain, shapes)
        if not self._session.leads:
            return
        self._pushes.flush()
        self._optimizing.restore(*states_file.read(path), self._entries, path)

    # ---- checkpoints

    def save_checkpoint(self, *, if_due: bool = False, wait: bool = False) -> int | None:
        self._check()
        if self._checkpoints is None or self._checkpoints.directory is None:
            if if_due:
                return None
            raise UsageError(
                "this job has no directory for checkpoints: set KVSTORE_CHECKPOINT_DIR for all its processes, or start "
                "it with launch.py --checkpoint-dir DIR"
            )
        number = (self._checkpoints.step_over if if_due else self._checkpoints.save)(self._trained)
        if wait and not self._checkpoints.finish():
            return None
        return number

    def attach(self, name: str, thing: Any, *, shared: bool = False, saved: bool = True) -> bool:
        self._check()
        super().attach(name, thing, shared=shared, saved=saved)
        loaded = saved and self._checkpoints is not None and self._checkpoints.attach(name, thing, shared)
        if shared and self._newcomers is not None:
            # In checkpoints a name is of the job, which another program may resume.
            unique = name if saved else f"{name} in store {self._requests.ordinal}"
            loaded = self._newcomers.attach(unique, thing) or loaded
        return loaded

    def publish(self, keys: Any = None, *, label: str = "", dtype: Any = None) -> int:
        self._check()
        if self.rule.mode == "async":  # no round says which of these a version has
            self._pushes.flush()
        return self._publishing.publish(keys, label, dtype)

    def publish_state(self, state_dict: Mapping[str, Any], *, label: str = "", dtype: Any = None) -> int:
        self._check()
        if not isinstance(state_dict, Mapping):
            raise UsageError(f"state_dict must be arrays by name, not a {type(state_dict).__name__}")
        if not self._session.leads:
            return self._publishing.count()
        state = self._publishing.rounded(state_dict, dtype)
        new = [key for key in state if key not in self._entries]
        self._publishing.put(state)
        if new:
            most = self._pieces.of(self._entries.nbytes + sum(state[key].nbytes for key in new))
            self.init(new, [state[key] for key in new])
            self._publishing.put_first(new, most)
            if self._newcomers is not None:  # of a worker that leads in place of another, init takes no values
                self._publishing.put(state)
        return self._publishing.publish(list(state_dict), label, None)

    def _publish_rest(self, every: int) -> None:
        """Publish what no later push would, where the job publishes every few rounds."""
        if self._publish_every:
            self._publishing.publish_rounds(self._trained.rounds, every)

    # ---- the job

    @property
    def rank(self) -> int:
        return self._session.rank

    def members(self) -> list[int]:
        return self._session.members

    def on_membership(self, callback: Callable[[list[int]], object]) -> None:
        super().on_membership(callback)
        if self._newcomers is not None:
            self._newcomers.call(self._part, callback)

    @property
    def newcomer(self) -> bool:
        return self._session.newcomer

    def boundary(self) -> None:
        if self._newcomers is not None:
            self._check()
            self._newcomers.boundary(self._part, self._checkpoints)

    def end_step(self) -> None:
        if self._newcomers is not None:
            self._newcomers.end_step()

    @property
    def step_ended(self) -> bool:
        return self._newcomers is not None and self._newcomers.step_ended

    @property
    def handing_over(self) -> bool:
        return self._newcomers is not None and self._newcomers.handing_over

    def begin_step(self) -> None:
        if self._newcomers is not None:
            self._check()
            self._newcomers.begin_step(self._part, self._checkpoints)

    def take_share(
        self, size: int, most: int, *, data: str = "train", epoch: int = 0, used: int = 0, passes: int = 0
    ) -> Share:
        self._check()
        return self._requests.take_share(data=data, epoch=epoch, size=size, most=most, used=used, passes=passes)

    @property
    def min_workers(self) -> int:
        return self._session.config.min_workers

    @property
    def max_workers(self) -> int:
        return max(self._session.num_workers, self._session.config.max_workers)

    @property
    def num_workers(self) -> int:
        return self._session.num_workers

    @property
    def barriers(self) -> int:
        """How many barriers this worker has passed: where one that has fallen behind the others stands."""
        return self._barriers.passed

    def barrier(self) -> None:
        self._check()
        if self.rule.mode == "async":  # no round waits for these, so nothing else says that they are in
            self._pushes.flush()
        self._publish_rest(self._publish_every)
        self._barriers.wait()

    def join(self, timeout: float | None = None) -> int:
        self._require_join()
        return self._join(timeout)

    def begin_join(self, timeout: float | None = None) -> None:
        self._require_join()
        self._begin_join(timeout)

    def reserve_join(self, advice: str) -> ReservedJoin:
        self._join_advice = advice
        return ReservedJoin(self._begin_join, self._join)

    def _join(self, timeout: float | None) -> int:
        self._begin_join(timeout)
        self._joining.wait(timeout)  # should others be late, this worker has joined: another call waits on
        self._joining.level(self._entries)
        last = self._session.client.alone(self._joining.end, self._entries)
        self._pushes.flush()
        if self._checkpoints is not None:
            self._checkpoints.end_join()
        return last

    def _begin_join(self, timeout: float | None = None) -> None:
        self._check()
        if self._joining.under_way:
            return
        if self._newcomers is not None:
            self._newcomers.boundary(self._part, self._checkpoints)
        if self.rule.mode == "async":
            self._pushes.flush(timeout)
        if self._checkpoints is not None:
            self._checkpoints.begin_join()
        self._joining.begin(self._entries)

    def _require_join(self) -> None:
        if self._join_advice:
            raise UsageError(self._join_advice)

    def report(self, values: Mapping[str, float] | None = None, *, input_s: float = 0.0) -> None:
        if values:
            self._session.activity.log(values)
        if input_s:
            self._session.activity.read_input(input_s)
            tracer = self._session.tracer
            if tracer is not None and tracer.open:
                tracer.span("input", tracer.clock() - input_s)

    def traced(self, name: str) -> AbstractContextManager[None]:
        tracer = self._session.tracer
        return nullcontext() if tracer is None else tracer.during(name)

    def num_dead_nodes(self) -> int:
        return self._session.num_dead_nodes()

    # ---- the store itself

    def companion(self) -> KVStore:
        self._check()
        name = "dist_device_sync" if self._on_device else "dist_sync"
        given = {"name": name, "on_device": self._on_device, "timeout": self._timeout, "bound": self._bound}
        return self._beside("companion()", **given)

    def _beside(self, what: str, **given: Any) -> DistStore:
        """Return a new store that no checkpoint has, of ``what``; see ``DistStore``."""
        with made_by(what, UNNAMED):
            return type(self)(self._session, checkpoints=False, **given)

    @property
    def limits(self) -> WaitLimits:
        """How long a wait of this store may take. May be set; waits that begin later then have the new limits."""
        return self._requests.limits

    @limits.setter
    def limits(self, limits: WaitLimits) -> None:
        self._requests.limits = limits

    @property
    def check_finite(self) -> bool:
        return self.rule.finite

    def statistics(self) -> Statistics:
        self._session.client.poll()
        counts, lending = self._pushes.counts, self._pushes.lending
        return Statistics(
            keys=len(self._entries),
            pushes=counts.pushes,
            pulls=counts.pulls,
            bytes_pushed=self._pushes.bytes_pushed,
            bytes_pulled=counts.bytes_pulled,
            outstanding=self._pushes.outstanding,
            staleness=dict(counts.staleness),
            late=counts.late,
            takeovers=self._session.takeovers,
            checkpoints=0 if self._checkpoints is None else self._checkpoints.made,
            failed_checkpoints=0 if self._checkpoints is None else self._checkpoints.failed,
            versions=self._publishing.number,
            bytes_lent=0 if lending is None else lending.nbytes,
            not_lent="" if lending is None else lending.refusal,
            server_bytes=tuple(self._entries.bytes_by_server(len(self._session.servers))),
        )

    def _stored_bytes(self) -> int:
        return sum(self._entries.bytes_by_server(len(self._session.servers)))

    def close(self) -> None:
        if self._closed:
            return
        self._pushes.flush()
        self._publish_rest(1)
        if self._checkpoints is not None:
            self._checkpoints.remove(self._trained)
        if self._newcomers is not None:
            self._newcomers.remove(self._part)
        self._requests.close()
        self._closed = True  # not before: after an exception in a line above, close may be called again
        with suppress(ValueError):
            self._session.flushes.remove(self._pushes.flush)
            self._session.activity.stores.remove(self._pushes.activity)
