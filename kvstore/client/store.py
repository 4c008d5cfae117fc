"""The 'dist_*' stores, the worker's side: it places, sends and waits; servers sum and update."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from kvstore.client.barriers import WorkerBarriers
from kvstore.client.calls import ABSENT, Arguments, StoreCall
from kvstore.client.checkpoint_calls import CheckpointCalls
from kvstore.client.checkpointing import checkpointing
from kvstore.client.clocks import PushClocks
from kvstore.client.compression import Compressing
from kvstore.client.compression import describe as describe_compression
from kvstore.client.delegation import Delegated, compressing
from kvstore.client.first_values import distinct, new_arrays, tables_among
from kvstore.client.job_calls import JobCalls
from kvstore.client.join import Joining
from kvstore.client.lending import Lending
from kvstore.client.optimizer import Optimizing
from kvstore.client.options import parse
from kvstore.client.plans.entries import Entries
from kvstore.client.plans.pieces import Pieces
from kvstore.client.plans.plan import Plan, Plans
from kvstore.client.pushes import Pushes
from kvstore.client.requests import Requests
from kvstore.client.rows.arguments import RowArguments
from kvstore.client.rows.plan import RowPlan, RowPlans
from kvstore.client.rows.stored import StoredTables
from kvstore.client.rows.stored_states import StoredStates
from kvstore.client.table_calls import TableCalls
from kvstore.client.trained import TrainedStore
from kvstore.client.update_calls import UpdateCalls
from kvstore.errors import UsageError
from kvstore.job.config import Config
from kvstore.member.session import Session
from kvstore.member.shared_session import shared
from kvstore.optim.optimizer import require_shapes
from kvstore.placement import WHOLE
from kvstore.rows.saving import OpenSaves
from kvstore.rule import Rule
from kvstore.spec import Key, as_shape
from kvstore.store.arguments import requests_of
from kvstore.store.base import KVStore
from kvstore.store.maker import UNNAMED, made_by, maker, place
from kvstore.store.maker import name as named
from kvstore.store.registry import canonical
from kvstore.store.statistics import Statistics
from kvstore.store.table_interface import TableChanges
from kvstore.ticket import Ticket, WaitLimits
from kvstore.values import Leaving, as_dtype, tensors_of


class DistStore(UpdateCalls, TableCalls, CheckpointCalls, JobCalls, KVStore):
    """One worker's end of a store; see ``KVStore``. Workers that make their stores in the same order share them.

    Args:
        session: this process's membership in the job.
        name: what ``create`` was asked for.
        rule: how updates and reads go together.
        on_device: sum the values of several devices on the first one's device, not on the CPU.
        timeout: the deadline of every wait, in seconds; None for the job's.
        bound: arrays of so many elements are cut across all servers; None for the job's.
        checkpoints: whether the job's checkpoints may have this store.

    Attributes:
        rule: how updates and reads go together.
    """

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
        self._row_plans = RowPlans(self._entries)
        tables = RowArguments(self._row_plans, self.rule, session.rank)
        self._arguments = Arguments(self._plans, tables, on_device)
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
        self._stored = StoredTables(session, self._requests, self._entries.tables)
        self._barriers = WorkerBarriers(self._requests)
        states = StoredStates(self._stored, self._entries, self._row_plans, self._clocks, self._row_array)
        self._optimizing = Optimizing(self._requests, states, name)
        self._joining = Joining(self._requests, self._clocks)
        self._pushes = Pushes(session, self._requests, self.rule, self._clocks, self._optimizing, self._joining)
        if on_device and session.aggregator is not None and session.config.device_sum != "off":
            self._pushes.lending = Lending(
                session.config.device_sum, self._requests, session.client, session.aggregator, self._stored_bytes
            )
        self._trained = TrainedStore(
            ordinal,
            self.rule,
            self._requests,
            self._entries,
            self._clocks,
            self._optimizing,
            self._pushes,
            self._stored,
        )
        if self._checkpoints is not None:
            self._checkpoints.add(self._trained)
            self._pushes.before = partial(self._checkpoints.before, self._trained)
        session.flushes.append(self._pushes.flush)
        session.activity.stores.append(self._pushes.activity)
        session.stores = ordinal  # last: if an exception has ended this before, the next store is made in its place

    @classmethod
    def create(cls, name: str, canonical: str, options: Mapping[str, Any]) -> KVStore:
        """Make one for ``kvstore.create``, in this process's job."""
        rule, timeout, bound = parse(name, canonical, options)
        return cls(shared(Config.from_env()), name, rule, "device" in name, timeout, bound)

    # ---- values

    def init(self, key: Any, value: Any) -> None:
        """See ``KVStore``."""
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
        entries = self._requests.declare(keys, all_kinds, all_specs, *bounds)
        if self.rank == 0:
            resumed = None if self._checkpoints is None else self._checkpoints.resumed
            if self._checkpoints is not None and resumed is not None:
                of_arrays = list(map(specs.__getitem__, kinds))
                values = self._checkpoints.values(self._trained, array_keys, of_arrays, tensors_of(values))
            if array_keys:
                self._requests.put_values(Plan(entries, array_keys, piece_bytes), Leaving(values))
            if first.specs:
                self._stored.make(RowPlan(entries, entries.tables), first.rows)
            if self._checkpoints is not None and resumed is not None:
                self._trained.tables.put(resumed, entries)
                self._checkpoints.give_states(self._trained, entries)
            self._requests.ready(keys, partial(self._add, entries))
        else:
            self._session.client.alone(self._add, entries)
        self._kind = kind

    def _add(self, entries: Entries) -> None:
        self._clocks.grow(len(self._entries) + len(entries))
        self._entries.add(entries)

    def push(self, key: Any, value: Any, priority: int = 0, *, wait: bool = False) -> Ticket:
        """See ``KVStore``."""
        return Ticket(self._pushes.make("push", self._prepare(key, value), priority, wait))

    def pull(
        self, key: Any, out: Any, priority: int = 0, ignore_sparse: bool = True, *, wait: bool = True, copy: bool = True
    ) -> Ticket:
        """See ``KVStore``."""
        self._check()
        if ignore_sparse and self._arguments.has_tables(key):
            arrays, left_out = self._arguments.without_tables(key, out)
            self._warn_left_out(left_out)
            if not arrays:
                return Ticket("pull")
            key, out = list(arrays), list(arrays.values())
        if self._on_pull is not None:
            self._on_pull(out)
        return Ticket(self._pushes.make("pull", self._prepare(key, out=out, copy=copy), priority, wait))

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
        """See ``KVStore``."""
        if row_ids is not None:
            self._check()
            requests = requests_of(key, out, row_ids)
            call = self._arguments.check_rows(key, requests, value, copy)
            operation = self._pushes.make("pushpull", call, priority, wait)
            operation.result = requests.result()
            return Ticket(operation)
        return Ticket(self._pushes.make("pushpull", self._prepare(key, value, out, copy), priority, wait))

    def empty(self, shape: Any, dtype: Any = None) -> torch.Tensor:
        """See ``KVStore``."""
        return self._session.client.alone(self._requests.packer.empty, as_shape(shape), as_dtype(dtype))

    # ---- compression

    def set_gradient_compression(self, compression: Mapping[str, object] | None) -> None:
        """See ``KVStore``."""
        self._check()
        wanted = describe_compression(compression)
        now = self._pushes.compressing
        if wanted is not None and now is not None and now.compression == wanted:
            how: Compressing | Delegated | None = now
        else:
            aggregator = self._session.aggregator if self.rule.merges else None
            how = None if wanted is None else compressing(wanted, self._requests, self._entries, aggregator)
        self._session.client.alone(self._compress, how)

    def _compress(self, how: Compressing | Delegated | None) -> None:
        self._plans.fold(*((1, 0) if how is None else (how.fold, how.small)))
        self._pushes.compressing = how
        if how is not None and self._pushes.lending is not None:
            self._pushes.lending.refusal = "what is pushed is compressed"

    # ---- the store itself

    def companion(self) -> KVStore:
        """See ``KVStore``."""
        self._check()
        name = "dist_device_sync" if self._on_device else "dist_sync"
        given = {"name": name, "on_device": self._on_device, "timeout": self._timeout, "bound": self._bound}
        return self._beside("companion()", **given)

    @property
    def limits(self) -> WaitLimits:
        """How long a wait of this store may take. May be set; waits that begin later then have the new limits."""
        return self._requests.limits

    @limits.setter
    def limits(self, limits: WaitLimits) -> None:
        self._requests.limits = limits

    @property
    def check_finite(self) -> bool:
        """See ``KVStore``."""
        return self.rule.finite

    def statistics(self) -> Statistics:
        """See ``KVStore``."""
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
            bytes_lent=0 if lending is None else lending.nbytes,
            not_lent="" if lending is None else lending.refusal,
            server_bytes=tuple(self._entries.bytes_by_server(len(self._session.servers))),
        )

    def close(self) -> None:
        """See ``KVStore``."""
        if self._closed:
            return
        self._pushes.flush()
        if self._checkpoints is not None:
            self._checkpoints.remove(self._trained)
        self._requests.close()
        self._closed = True
        with suppress(ValueError):
            self._session.flushes.remove(self._pushes.flush)
            self._session.activity.stores.remove(self._pushes.activity)

    # ---- helpers

    def _beside(self, what: str, **given: Any) -> DistStore:
        """Return a new store that no checkpoint has, of ``what``; see ``DistStore``."""
        with made_by(what, UNNAMED):
            return type(self)(self._session, checkpoints=False, **given)

    def _stored_bytes(self) -> int:
        return sum(self._entries.bytes_by_server(len(self._session.servers)))

    def _prepare(self, key: Any, value: Any = ABSENT, out: Any = ABSENT, copy: bool = True) -> StoreCall:
        """Return the call that pushes ``value`` and pulls into ``out``; nothing has changed yet."""
        self._check()
        return self._arguments.check(key, value, out, copy)
