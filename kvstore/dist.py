"""'dist_*': a worker's side of a store that servers hold. It places, sends and waits; servers sum and update."""

from __future__ import annotations

import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from kvstore import states
from kvstore.base import KVStore, Statistics, finish
from kvstore.compression import Compressing
from kvstore.compression import describe as describe_compression
from kvstore.config import Config
from kvstore.consistency import Rule
from kvstore.errors import (
    AlreadyInitialised,
    DeadlineExceeded,
    KeyNotInitialised,
    KVStoreError,
    Unsupported,
    UsageError,
)
from kvstore.joining import Joining
from kvstore.optim import Changes, Optimizer, describe, finite, log_replaced, require_shapes
from kvstore.options import parse
from kvstore.packer import Load, Plain
from kvstore.placement import WHOLE
from kvstore.plan import Plan
from kvstore.remote import Back, Hyper, Remote
from kvstore.session import Session, shared
from kvstore.shares import Entry, Parcel, Piece, parcels
from kvstore.spec import Key, require_floats, require_same
from kvstore.tickets import Ticket
from kvstore.values import Leaving, as_dtype, as_output, as_tensors, reduce_to, spec_of
from kvstore.wire import Ack, Values
from kvstore.writer import Writer

CPU = torch.device("cpu")
MAX_PLANS = 1024
_KEYS = {int, str}


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
        self._piece = session.config.piece_bytes
        self._remote = Remote(session, self._timeout_s)
        self._lock = threading.RLock()  # of all below: clocks must be sent in the order in which they are taken
        self._entries: dict[Key, Entry] = {}
        self._plans: dict[tuple[Key, ...], Plan] = {}
        self._pushed: deque[Ticket] = deque()
        self._failed: deque[Ticket] = deque()
        self._optimizer: Optimizer | None = None
        self._theirs: str | None = None  # the servers' optimizer, if another worker has set it
        self._lr: float | None = None
        self._rescale: float | None = None
        self._changes: Changes = {}
        self._versions = self._barriers = 0
        self._at_barrier: Ticket | None = None
        self._joins = 0
        self._joining: Joining | None = None
        self._pushes = self._pulls = self._bytes_pulled = self._late = 0
        self._compressing: Compressing | None = None
        self._staleness: Counter[int] = Counter()
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
        require_shapes(self._optimizer, ((key, spec_of(first)) for key, first in firsts.items()))
        whole = self._optimizer is not None and self._optimizer.whole
        entries = self._remote.declare(
            {key: spec_of(first) for key, first in firsts.items()},
            WHOLE if whole else self._bound,
            WHOLE if whole else self._piece,
        )
        if self.rank == 0:
            plan = Plan(entries, list(entries), self._piece)
            self._remote.put_values(plan, Leaving([first.contiguous() for first in firsts.values()]))
        with self._lock:
            self._entries.update(entries)
            self._plans.clear()

    def push(self, key: Any, value: Any, priority: int = 0) -> Ticket:
        """See ``KVStore``."""
        found = self._plain(key, value)
        if found is None:
            return super().push(key, value, priority)
        self._check()
        plan, (values,) = found
        return self._contribute("push", plan, values, None)

    def pull(self, key: Any, out: Any, priority: int = 0, *, wait: bool = True, copy: bool = True) -> Ticket:
        """See ``KVStore``."""
        found = self._plain(key, out)
        if found is None:
            return super().pull(key, out, priority, wait=wait, copy=copy)
        self._check()
        plan, (outs,) = found
        return finish(self._ask(plan, Writer(plan.entries, outs, True, copy), priority), wait)

    def pushpull(
        self, key: Any, value: Any, out: Any = None, priority: int = 0, *, wait: bool = True, copy: bool = True
    ) -> Ticket:
        """See ``KVStore``."""
        found = self._plain(key, value) if out is None else self._plain(key, value, out)
        if found is None:
            return super().pushpull(key, value, out, priority, wait=wait, copy=copy)
        self._check()
        plan, tensors = found
        values, writer = tensors[0], Writer(plan.entries, tensors[-1], True, copy)
        return finish(self._contribute("pushpull", plan, values, writer, priority if wait else None), wait)

    def _push(self, values: dict[Key, list[Any]], priority: int) -> Ticket:
        self._check()
        return self._contribute("push", self._plan(values), self._sums(values), None)

    def _pull(self, outs: dict[Key, list[Any]], priority: int, copy: bool) -> Ticket:
        self._check()
        return self._ask(self._plan(outs), self._writer(outs, copy), priority)

    def _pushpull(self, values: dict[Key, list[Any]], outs: dict[Key, list[Any]], priority: int, copy: bool) -> Ticket:
        self._check()
        plan, writer = self._plan(values), self._writer(outs, copy)
        return self._contribute("pushpull", plan, self._sums(values), writer)

    def _contribute(
        self,
        what: str,
        plan: Plan,
        values: Sequence[torch.Tensor],
        writer: Writer | None,
        in_turn: int | None = None,
    ) -> Ticket:
        """Send ``values``, contiguous tensors, as this worker's next contribution.

        Args:
            in_turn: the priority of messages that may wait for their turn, for a caller that waits for them and leaves
                the values as they are until then; None sends all at once.
        """
        if self._rule.mode == "async":
            self._require_optimizer("push")
        if self._optimizer is not None and not plan.floats:
            require_floats((key, self._entries[key].spec) for key in plan.keys)
        ticket = self._ticket(what, plan)
        with self._lock:
            if self._joining is not None:
                raise UsageError("this worker has joined, and others have not yet: call join() again, which waits on")
            load: Load
            if self._compressing is None:
                load = Plain(self._remote.packer, Leaving(values))
            else:
                load = self._compressing.load(plan, values, self._remote.packer)
            self._pushes += len(plan.keys)
            if writer is not None:
                self._pulls += len(plan.keys)
            for entry in plan.entries:
                entry.clock += 1
            note = None if self._rule.quorum is None else self._note
            changes = [[number, name, value] for (number, name), value in self._changes.items()]
            hyper = Hyper(self._lr, self._rescale, changes)
            for parcel in plan.parcels:
                back = None if writer is None else self._back(parcel, writer)
                self._remote.push(ticket, parcel, load, hyper, back, note, in_turn)
            self._pushed.append(ticket)
            while self._pushed and not self._pushed[0].open:
                self._pushed.popleft()
        return ticket

    def _ask(self, plan: Plan, writer: Writer, priority: int) -> Ticket:
        ticket = self._ticket("pull", plan)
        with self._lock:
            self._pulls += len(plan.keys)
            for parcel in plan.parcels:
                self._remote.pull(ticket, parcel, priority, self._back(parcel, writer))
        return ticket

    def empty(self, shape: Any, dtype: Any = None) -> torch.Tensor:
        """See ``KVStore``."""
        return self._remote.packer.empty((shape,) if isinstance(shape, int) else tuple(shape), as_dtype(dtype))

    # ---- updates

    def set_optimizer(self, optimizer: Any, **hyperparameters: Any) -> None:
        """See ``KVStore``."""
        self._check()
        new = describe(optimizer, hyperparameters)
        for key, entry in self._entries.items():
            if new.whole and entry.cut:
                raise UsageError(
                    f"{new.name} needs whole tensors, but key {key!r} is cut over {entry.servers} servers, in "
                    f"{len(entry.pieces)} pieces; set the optimizer before init, or raise KVSTORE_BIGARRAY_BOUND "
                    "and KVSTORE_PIECE_BYTES"
                )
        require_shapes(new, ((key, entry.spec) for key, entry in self._entries.items()))
        self._flush(self._timeout_s)  # what was pushed before is updated as before
        self._versions += 1
        try:
            self._remote.set_optimizer(self._versions, new)
        except DeadlineExceeded:
            self._versions -= 1  # so that another try is the same call
            raise
        log_replaced(self._optimizer, new)
        self._optimizer = new
        self._lr = self._rescale = None
        self._changes = {}

    def set_updater(self, updater: Callable[[Key, Any, Any], None]) -> None:
        """Not here: an updater is code, and nothing on the wire is code."""
        raise Unsupported("servers take no function; use set_optimizer with a name and numbers")

    def set_gradient_compression(self, compression: Mapping[str, object] | None) -> None:
        """See ``KVStore``."""
        self._check()
        wanted = describe_compression(compression)
        with self._lock:
            if wanted is None:
                self._compressing = None
            elif self._compressing is None or self._compressing.compression != wanted:
                self._compressing = Compressing(wanted)
            self._plans.clear()

    @property
    def learning_rate(self) -> float:
        """See ``KVStore``."""
        if self._lr is not None:
            return self._lr
        if self._optimizer is None:
            raise UsageError("this worker has set no optimizer and no learning rate")
        return self._optimizer.lr

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
        changes: Changes = {}
        if groups or others:
            if self._optimizer is None:
                raise UsageError("this worker has set no optimizer, whose hyper-parameters these could be")
            changes = self._optimizer.changes(others, groups)
        if learning_rate is not None:
            self._lr = float(finite("learning_rate", learning_rate))
        if rescale_grad is not None:
            self._rescale = float(finite("rescale_grad", rescale_grad))
        self._changes = {**self._changes, **changes}

    def save_optimizer_states(self, path: str | os.PathLike[str], *, note: str | None = None) -> None:
        """See ``KVStore``."""
        self._check()
        self._flush(self._timeout_s)
        self._theirs = None  # it may be another by now
        optimizer = self._require_optimizer("save_optimizer_states")
        pieces: dict[tuple[Piece, str], torch.Tensor] = {}
        for parcel in parcels(self._entries, list(self._entries), WHOLE):
            pieces |= self._remote.get_states(parcel)
        squeezed = self._compressing
        residuals = None if squeezed is None else states.Residuals(self.rank, *squeezed.state())
        states.write(path, optimizer, states.assemble(pieces, self._entries), residuals, note)

    def load_optimizer_states(self, path: str | os.PathLike[str]) -> None:
        """See ``KVStore``."""
        self._check()
        if self._compressing is not None:
            residuals = states.read_residuals(path)
            if residuals is not None and residuals.rank == self.rank:
                self._compressing.load_state(residuals.tensors, residuals.plain)
        if self.rank != 0:
            return
        self._flush(self._timeout_s)
        found, loaded = states.read(path)
        states.require_optimizer(found, self._require_optimizer("load_optimizer_states"), path)
        states.require_keys(loaded, {key: entry.spec for key, entry in self._entries.items()}, path)
        by_server: dict[int, dict[tuple[Piece, str], torch.Tensor]] = {}
        for (piece, name), value in states.cut(loaded, self._entries).items():
            by_server.setdefault(piece.server, {})[piece, name] = value
        for server, its in by_server.items():
            self._remote.put_states(server, its)

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
        if self._joining is None:
            if self._rule.mode == "async":  # no round waits for these, so nothing else says that they are in
                self._flush(self._timeout_s)
            self._remote.announce_pause(self._joins + 1)
            with self._lock:
                self._joins += 1
                self._joining = Joining()
                self._joining.ticket = self._remote.pause(self._joins, self._entries, self._joining.take)
        joining = self._joining
        try:
            joining.ticket.wait(timeout)
        except DeadlineExceeded:
            raise  # this worker has joined all the same: another call waits on
        except KVStoreError:
            self._joining = None
            raise
        with self._lock:
            joining.advance(self._entries.values())
            self._joining = None
        self._flush(self._timeout_s)
        return joining.last

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
            pushes=self._pushes,
            pulls=self._pulls,
            bytes_pushed=self._remote.sent,
            bytes_pulled=self._bytes_pulled,
            outstanding=sum(1 for ticket in self._pushed if ticket.open),
            staleness=dict(self._staleness),
            late=self._late,
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
        self._session.check(self._remote.number)
        while self._failed:
            ticket = self._failed.popleft()
            if not ticket.raised:
                ticket.wait()

    def _flush(self, timeout_s: float) -> None:
        """Wait until every push has taken effect; raise what has gone wrong."""
        self._session.client.wait_all(list(self._pushed), timeout_s)
        self._pushed.clear()
        self._check()

    def _back(self, parcel: Parcel, writer: Writer) -> Back:
        """How the values of ``parcel`` come back, and into what."""
        how = self._compressing
        write = writer.taker(parcel, None if how is None else how.decoder(parcel))

        def take(reply: Values) -> None:
            self._bytes_pulled += sum(reply.lengths) or parcel.nbytes
            write(reply)
            self._note(reply)
            if reply.clocks:
                parcel.advance(reply.clocks)
            if self._rule.mode == "async":
                self._staleness[reply.ahead] += 1

        if how is None:
            return Back(take, None, parcel.nbytes)
        return Back(take, how.asked(parcel), parcel.nbytes // how.fold)

    def _note(self, reply: Ack | Values) -> None:
        self._late += reply.missed

    def _ticket(self, what: str, plan: Plan) -> Ticket:
        return Ticket(what, plan.keys, self._session.client, self._failed.append, self._timeout_s)

    def _plain(self, key: Any, *arrays: Any) -> tuple[Plan, list[Sequence[torch.Tensor]]] | None:
        """The plan for ``key``, or a list of them, and ``arrays``; if it has been used before and they are plain."""
        several = isinstance(key, list | tuple)
        listed = tuple(key) if several else (key,)
        plan = self._plans.get(listed) if _KEYS.issuperset(map(type, listed)) else None
        if plan is None:
            return None
        found: list[Sequence[torch.Tensor]] = []
        for its in arrays:
            tensors = plan.plain(its if several else [its])
            if tensors is None:
                return None
            found.append(tensors)
        return plan, found

    def _plan(self, keys: Iterable[Key]) -> Plan:
        listed = tuple(keys)
        plan = self._plans.get(listed)
        if plan is None:
            for key in listed:
                if key not in self._entries:
                    raise KeyNotInitialised(f"key {key!r} has no value on this worker; call init first")
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            fold = 1 if self._compressing is None else self._compressing.fold
            plan = self._plans[listed] = Plan(self._entries, listed, self._piece * fold)
        return plan

    def _checked(self, key: Key, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        entry = self._entries[key]
        for tensor in tensors:
            require_same(key, entry.spec, spec_of(tensor), "this call has")
        return tensors

    def _writer(self, outs: dict[Key, list[Any]], copy: bool) -> Writer:
        plan = self._plan(outs)
        targets = [self._checked(key, [as_output(out) for out in its]) for key, its in outs.items()]
        return Writer(plan.entries, targets, False, copy)

    def _sums(self, values: dict[Key, list[Any]]) -> list[torch.Tensor]:
        """The sum over devices of each key's values, on the first one's device or on the CPU, contiguous."""
        given = [self._checked(key, as_tensors(its)) for key, its in values.items()]
        return [
            reduce_to(its, its[0].device if self._on_device or len(its) == 1 else CPU).contiguous() for its in given
        ]

    def _require_optimizer(self, what: str) -> str:
        """Return the optimizer's name; a worker that has not set it asks the servers, once."""
        if self._optimizer is not None:
            return self._optimizer.name
        if self._theirs is None:
            self._theirs = self._remote.optimizer()
        if self._theirs is None:
            raise UsageError(
                f"{what} on a {self._name!r} store needs an optimizer: call set_optimizer(name, ...) first, "
                "on every worker, or on rank 0 and then barrier() on all"
            )
        return self._theirs
