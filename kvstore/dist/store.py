"""'dist_*': a worker's side of a store that servers hold. It places, sends and waits; servers sum and update."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from kvstore import states
from kvstore.base import KVStore
from kvstore.dist.compression import Compressing
from kvstore.dist.compression import describe as describe_compression
from kvstore.config import Config
from kvstore.consistency import Rule
from kvstore.errors import AlreadyInitialised, Unsupported, UsageError
from kvstore.dist.pushes import Exchange
from kvstore.dist.join import Joining
from kvstore.optim import require_shapes
from kvstore.dist.optimizer import Optimizing, described
from kvstore.dist.options import parse
from kvstore.placement import WHOLE
from kvstore.dist.plans import Plan
from kvstore.dist.plans import Plans
from kvstore.dist.requests import Remote
from kvstore.member.session import Session, shared
from kvstore.spec import Key, as_shape, require_same
from kvstore.statistics import Statistics
from kvstore.ticket import Ticket, finish
from kvstore.values import Leaving, as_dtype, as_output, as_tensors, reduce_to, spec_of
from kvstore.dist.incoming import Writer

CPU = torch.device("cpu")


class DistStore(KVStore):
    """One worker's end of a store; see ``KVStore``. Workers that make their stores in the same order share them.

    Args:
        session: this process's membership in the job.
        name: what ``create`` was asked for.
        rule: how updates and reads go together.
        on_device: sum the values of several devices on the first one's device, not on the CPU.
        timeout_s: the deadline of every wait; None for the job's.
        bound: arrays of so many elements are cut across all servers; None for the job's.
    """

    def __init__(
        self,
        session: Session,
        name: str = "dist_sync",
        rule: Rule | None = None,
        on_device: bool = False,
        timeout_s: float | None = None,
        bound: int | None = None,
    ) -> None:
        super().__init__(name)
        self._session = session
        self._rule = Rule() if rule is None else rule
        self._rule.require_workers(session.num_workers)
        self._on_device = on_device
        self._timeout_s = session.config.timeout_s if timeout_s is None else timeout_s
        self._bound = session.config.bigarray_bound if bound is None else bound
        self._remote = Remote(session, self._timeout_s)
        self._plans = Plans(session.config.piece_bytes)
        self._entries = self._plans.entries
        self._optimizing = Optimizing(self._remote, name)
        self._barriers = 0
        self._at_barrier: Ticket | None = None
        self._joining = Joining(self._remote)
        self._exchange = Exchange(session, self._remote, self._rule, self._timeout_s, self._optimizing, self._joining)
        self._closed = False
        self._remote.open(self._rule)
        session.flushes.append(self._flush)

    @classmethod
    def create(cls, name: str, canonical: str, options: Mapping[str, Any]) -> KVStore:
        """Make one for ``kvstore.create``, in this process's job."""
        rule, timeout_s, bound = parse(name, canonical, options)
        return cls(shared(Config.from_env()), name, rule, "device" in name, timeout_s, bound)

    # ---- values

    def _init(self, values: dict[Key, list[Any]], listed: list[Key]) -> None:
        self._check()
        if len(values) < len(listed):
            raise UsageError("init with a key listed twice")
        for key in values:
            if key in self._entries:
                raise AlreadyInitialised(f"key {key!r} is initialised already; push a new value instead")
        firsts = {key: as_tensors(its)[0] for key, its in values.items()}
        require_shapes(self._optimizing.optimizer, ((key, spec_of(first)) for key, first in firsts.items()))
        whole = self._optimizing.whole
        entries = self._remote.declare(
            {key: spec_of(first) for key, first in firsts.items()},
            WHOLE if whole else self._bound,
            WHOLE if whole else self._session.config.piece_bytes,
        )
        if self.rank == 0:
            plan = Plan(entries, list(entries), self._session.config.piece_bytes)
            self._remote.put_values(plan, Leaving([first.contiguous() for first in firsts.values()]))
        with self._exchange.lock:
            self._plans.add(entries)

    def push(self, key: Any, value: Any, priority: int = 0) -> Ticket:
        """See ``KVStore``."""
        found = self._plans.plain(key, value)
        if found is None:
            return super().push(key, value, priority)
        self._check()
        plan, (values,) = found
        return self._exchange.push("push", plan, values, None, priority)

    def pull(
        self, key: Any, out: Any, priority: int = 0, ignore_sparse: bool = True, *, wait: bool = True, copy: bool = True
    ) -> Ticket:
        """See ``KVStore``."""
        found = self._plans.plain(key, out)
        if found is None:
            return super().pull(key, out, priority, wait=wait, copy=copy)
        self._check()
        plan, (outs,) = found
        return finish(self._exchange.pull(plan, Writer(plan, outs, True, copy), priority), wait)

    def pushpull(
        self, key: Any, value: Any, out: Any = None, priority: int = 0, *, wait: bool = True, copy: bool = True
    ) -> Ticket:
        """See ``KVStore``."""
        found = self._plans.plain(key, value) if out is None else self._plans.plain(key, value, out)
        if found is None:
            return super().pushpull(key, value, out, priority, wait=wait, copy=copy)
        self._check()
        plan, tensors = found
        writer = Writer(plan, tensors[-1], True, copy)
        return self._exchange.pushpull(plan, tensors[0], writer, priority, wait)

    def _push(self, values: dict[Key, list[Any]], priority: int) -> Ticket:
        self._check()
        return self._exchange.push("push", self._plans.of(values), self._sums(values), None, priority)

    def _pull(self, outs: dict[Key, list[Any]], priority: int, copy: bool) -> Ticket:
        self._check()
        return self._exchange.pull(self._plans.of(outs), self._writer(outs, copy), priority)

    def _pushpull(self, values: dict[Key, list[Any]], outs: dict[Key, list[Any]], priority: int, copy: bool) -> Ticket:
        self._check()
        plan, writer = self._plans.of(values), self._writer(outs, copy)
        return self._exchange.pushpull(plan, self._sums(values), writer, priority, False)

    def empty(self, shape: Any, dtype: Any = None) -> torch.Tensor:
        """See ``KVStore``."""
        return self._remote.packer.empty(as_shape(shape), as_dtype(dtype))

    # ---- updates

    def set_optimizer(self, optimizer: Any, **hyperparameters: Any) -> None:
        """See ``KVStore``."""
        self._check()
        new = described(optimizer, hyperparameters, self._entries)
        self._flush(self._timeout_s)  # what was pushed before is updated as before
        self._optimizing.set(new)

    def set_updater(self, updater: Callable[[Key, Any, Any], None]) -> None:
        """Not here: an updater is code, and nothing on the wire is code."""
        raise Unsupported("servers take no function; use set_optimizer with a name and numbers")

    def set_gradient_compression(self, compression: Mapping[str, object] | None) -> None:
        """See ``KVStore``."""
        self._check()
        wanted = describe_compression(compression)
        with self._exchange.lock:
            if wanted is None:
                self._exchange.compressing = None
            elif self._exchange.compressing is None or self._exchange.compressing.compression != wanted:
                self._exchange.compressing = Compressing(wanted)
            how = self._exchange.compressing
            self._plans.fold(*((1, 0) if how is None else (how.fold, how.small)))

    @property
    def learning_rate(self) -> float:
        """See ``KVStore``."""
        return self._optimizing.learning_rate

    def set_hyperparameters(
        self,
        *,
        learning_rate: float | None = None,
        rescale_grad: float | None = None,
        groups: Sequence[Mapping[str, Any]] = (),
        **others: Any,
    ) -> None:
        """See ``KVStore``."""
        self._check()
        self._optimizing.change(learning_rate, rescale_grad, groups, others)

    def save_optimizer_states(self, path: str | os.PathLike[str], *, note: str | None = None) -> None:
        """See ``KVStore``."""
        self._check()
        self._flush(self._timeout_s)
        squeezed = self._exchange.compressing
        residuals = None if squeezed is None else states.Residuals(self.rank, *squeezed.state())
        self._optimizing.save(path, self._entries, residuals, note)

    def load_optimizer_states(self, path: str | os.PathLike[str]) -> None:
        """See ``KVStore``."""
        self._check()
        if self._exchange.compressing is not None:
            residuals = states.read_residuals(path)
            if residuals is not None and residuals.rank == self.rank:
                shapes = {key: entry.spec.shape for key, entry in self._entries.items()}
                self._exchange.compressing.load_state(residuals.tensors, residuals.plain, shapes)
        if self.rank != 0:
            return
        self._flush(self._timeout_s)
        self._optimizing.load(path, self._entries)

    # ---- the job

    def companion(self) -> KVStore:
        """See ``KVStore``."""
        self._check()
        name = "dist_device_sync" if self._on_device else "dist_sync"
        return type(self)(self._session, name, None, self._on_device, self._timeout_s, self._bound)

    @property
    def rank(self) -> int:
        """See ``KVStore``."""
        return self._session.rank

    @property
    def num_workers(self) -> int:
        """See ``KVStore``."""
        return self._session.num_workers

    def barrier(self) -> None:
        """See ``KVStore``."""
        self._check()
        if self._at_barrier is None:
            self._barriers += 1
            self._at_barrier = self._remote.barrier(self._barriers)
        # Should the others be late, this worker has come all the same: another call waits on at the same barrier.
        try:
            self._at_barrier.wait(self._timeout_s)
        except UsageError:  # somebody has joined: nobody was let through
            self._barriers -= 1
            self._at_barrier = None
            raise
        self._at_barrier = None

    def join(self, timeout: float | None = None) -> int:
        """See ``KVStore``."""
        self._check()
        if not self._joining.under_way:
            if self._rule.mode == "async":  # no round waits for these, so nothing else says that they are in
                self._flush(self._timeout_s if timeout is None else timeout)
            self._joining.announce()
            with self._exchange.lock:
                self._joining.begin(self._entries)
        self._joining.wait(timeout)  # should others be late, this worker has joined: another call waits on
        with self._exchange.lock:
            last = self._joining.end(self._entries)
        self._flush(self._timeout_s)
        return last

    def num_dead_nodes(self) -> int:
        """See ``KVStore``."""
        return self._session.num_dead_nodes()

    def statistics(self) -> Statistics:
        """See ``KVStore``."""
        self._session.client.poll()
        held = [0] * len(self._session.servers)
        for entry in self._entries.values():
            for piece in entry.pieces:
                held[piece.server] += (piece.stop - piece.start) * entry.spec.itemsize
        return Statistics(
            keys=len(self._entries),
            pushes=self._exchange.pushes,
            pulls=self._exchange.pulls,
            bytes_pushed=self._remote.sent,
            bytes_pulled=self._exchange.bytes_pulled,
            outstanding=self._exchange.outstanding,
            staleness=dict(self._exchange.staleness),
            late=self._exchange.late,
            server_bytes=tuple(held),
        )

    def close(self) -> None:
        """See ``KVStore``."""
        if self._closed:
            return
        self._flush(self._timeout_s)
        self._closed = True
        self._session.flushes.remove(self._flush)

    # ---- helpers

    def _check(self) -> None:
        """Raise what has gone wrong since the last call."""
        if self._closed:
            raise UsageError("this store is closed")
        self._exchange.check()

    def _flush(self, timeout_s: float) -> None:
        """Wait until every push has taken effect; raise what has gone wrong."""
        self._exchange.flush(timeout_s)

    def _checked(self, key: Key, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        entry = self._entries[key]
        for tensor in tensors:
            require_same(key, entry.spec, spec_of(tensor), "this call has")
        return tensors

    def _writer(self, outs: dict[Key, list[Any]], copy: bool) -> Writer:
        plan = self._plans.of(outs)
        targets = [self._checked(key, [as_output(out) for out in its]) for key, its in outs.items()]
        return Writer(plan, targets, False, copy)

    def _sums(self, values: dict[Key, list[Any]]) -> list[torch.Tensor]:
        """The sum over devices of each key's values, on the first one's device or on the CPU, contiguous."""
        given = [self._checked(key, as_tensors(its)) for key, its in values.items()]
        return [
            reduce_to(its, its[0].device if self._on_device or len(its) == 1 else CPU).contiguous() for its in given
        ]
