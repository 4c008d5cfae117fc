"""'dist_*': a worker's side of a store that servers hold. It places, sends and waits; servers sum and update."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch

from kvstore import states
from kvstore.base import KVStore, Statistics, require_options
from kvstore.config import Config
from kvstore.errors import AlreadyInitialised, DeadlineExceeded, KeyNotInitialised, Unsupported, UsageError
from kvstore.optim import Optimizer, describe, finite, log_replaced
from kvstore.remote import Remote
from kvstore.session import Session, shared
from kvstore.shares import Entry, Piece, Share, plan
from kvstore.spec import Key, require_floats, require_same
from kvstore.tickets import Ticket
from kvstore.values import as_output, as_tensors, reduce_to, spec_of, to_buffer, to_host
from kvstore.wire import join
from kvstore.writer import Writer

CPU = torch.device("cpu")
NEVER_CUT = 2**62
MAX_PLANS = 1024

T = TypeVar("T", int, float)


class DistStore(KVStore):
    """One worker's end of a store; see ``KVStore``. Workers that make their stores in the same order share them.

    Args:
        session: this process's membership in the job.
        name: what ``create`` was asked for.
        mode: ``sync``: one update a round, from the sum over all workers; ``async``: an update for every push.
        on_device: sum the values of several devices on the first one's device, not on the CPU.
        timeout_s: the deadline of every wait; None for the job's.
        bound: arrays of so many elements are cut across all servers; None for the job's.
    """

    def __init__(
        self,
        session: Session,
        name: str = "dist_sync",
        mode: str = "sync",
        on_device: bool = False,
        timeout_s: float | None = None,
        bound: int | None = None,
    ) -> None:
        super().__init__(name)
        self._session = session
        self._mode = mode
        self._on_device = on_device
        self._timeout_s = session.config.timeout_s if timeout_s is None else timeout_s
        self._bound = session.config.bigarray_bound if bound is None else bound
        self._remote = Remote(session, self._timeout_s)
        self._lock = threading.RLock()  # of all below: clocks must be sent in the order in which they are taken
        self._entries: dict[Key, Entry] = {}
        self._plans: dict[tuple[Key, ...], list[Share]] = {}
        self._pushed: deque[Ticket] = deque()
        self._failed: deque[Ticket] = deque()
        self._optimizer: Optimizer | None = None
        self._theirs: str | None = None  # the servers' optimizer, if another worker has set it
        self._lr: float | None = None
        self._rescale: float | None = None
        self._versions = self._barriers = 0
        self._at_barrier: Ticket | None = None
        self._pushes = self._pulls = self._bytes_pushed = self._bytes_pulled = 0
        self._closed = False
        self._remote.open(mode)
        session.flushes.append(self._flush)

    @classmethod
    def create(cls, name: str, canonical: str, options: Mapping[str, Any]) -> KVStore:
        """Make one for ``kvstore.create``, in this process's job."""
        require_options(name, options, ("timeout_s", "bigarray_bound"))
        mode = "async" if canonical == "dist_async" else "sync"
        limits = _least(options, "timeout_s", 0.001), _least(options, "bigarray_bound", 1)
        return cls(shared(Config.from_env()), name, mode, "device" in name, *limits)

    # ---- values

    def _init(self, values: dict[Key, list[Any]], listed: list[Key]) -> None:
        self._check()
        if len(values) < len(listed):
            raise UsageError("init with a key listed twice")
        for key in values:
            if key in self._entries:
                raise AlreadyInitialised(f"key {key!r} is initialised already; push a new value instead")
        firsts = {key: as_tensors(its)[0] for key, its in values.items()}
        whole = self._optimizer is not None and self._optimizer.whole
        entries = self._remote.declare(
            {key: spec_of(first) for key, first in firsts.items()}, NEVER_CUT if whole else self._bound
        )
        if self.rank == 0:
            flats = {key: to_host(first) for key, first in firsts.items()}
            self._remote.put_values(plan(entries, entries), entries, flats)
        with self._lock:
            self._entries.update(entries)
            self._plans.clear()

    def _push(self, values: dict[Key, list[Any]], priority: int) -> Ticket:
        return self._contribute("push", values, None)

    def _pushpull(self, values: dict[Key, list[Any]], outs: dict[Key, list[Any]], priority: int) -> Ticket:
        return self._contribute("pushpull", values, self._writer(outs))

    def _pull(self, outs: dict[Key, list[Any]], priority: int) -> Ticket:
        self._check()
        writer, ticket = self._writer(outs), self._ticket("pull", outs)
        with self._lock:
            self._pulls += len(outs)
            for share in self._plan(outs):
                self._bytes_pulled += sum(share.sizes)
                self._remote.pull(ticket, share, self._clocks(share), writer.taker(share))
        return ticket

    def _contribute(self, what: str, values: dict[Key, list[Any]], writer: Writer | None) -> Ticket:
        self._check()
        given = {key: self._checked(key, as_tensors(its)) for key, its in values.items()}
        self._require_updatable(given)
        flats = {key: self._reduced(tensors) for key, tensors in given.items()}
        ticket = self._ticket(what, values)
        with self._lock:
            self._pushes += len(flats)
            self._pulls += len(flats) if writer is not None else 0
            for key in flats:
                self._entries[key].clock += 1
            for share in self._plan(values):
                self._bytes_pushed += sum(share.sizes)
                self._bytes_pulled += sum(share.sizes) if writer is not None else 0
                buffers = join([to_buffer(flats[piece.key][piece.start : piece.stop]) for piece in share.pieces])
                take = None if writer is None else writer.taker(share)
                self._remote.push(ticket, share, self._clocks(share), buffers, self._lr, self._rescale, take)
            self._pushed.append(ticket)
            while self._pushed and not self._pushed[0].open:
                self._pushed.popleft()
        return ticket

    # ---- updates

    def set_optimizer(self, optimizer: Any, **hyperparameters: Any) -> None:
        """See ``KVStore``."""
        self._check()
        new = describe(optimizer, hyperparameters)
        for key, entry in self._entries.items():
            if new.whole and entry.cut:
                raise UsageError(
                    f"{new.name} needs whole tensors, but key {key!r} is cut over {len(entry.pieces)} servers; "
                    "set the optimizer before init, or raise KVSTORE_BIGARRAY_BOUND"
                )
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

    def set_updater(self, updater: Callable[[Key, Any, Any], None]) -> None:
        """Not here: an updater is code, and nothing on the wire is code."""
        raise Unsupported("servers take no function; use set_optimizer with a name and numbers")

    @property
    def learning_rate(self) -> float:
        """See ``KVStore``."""
        if self._lr is not None:
            return self._lr
        if self._optimizer is None:
            raise UsageError("this worker has set no optimizer and no learning rate")
        return self._optimizer.lr

    def set_hyperparameters(self, *, learning_rate: float | None = None, rescale_grad: float | None = None) -> None:
        """See ``KVStore``."""
        self._check()
        if learning_rate is not None:
            self._lr = float(finite("learning_rate", learning_rate))
        if rescale_grad is not None:
            self._rescale = float(finite("rescale_grad", rescale_grad))

    def save_optimizer_states(self, path: str | os.PathLike[str]) -> None:
        """See ``KVStore``."""
        self._check()
        self._flush(self._timeout_s)
        self._theirs = None  # it may be another by now
        optimizer = self._require_optimizer("save_optimizer_states")
        pieces: dict[tuple[Piece, str], torch.Tensor] = {}
        for share in self._plan(self._entries):
            pieces |= self._remote.get_states(share)
        states.write(path, optimizer, states.assemble(pieces, self._entries))

    def load_optimizer_states(self, path: str | os.PathLike[str]) -> None:
        """See ``KVStore``."""
        self._check()
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
        self._at_barrier.wait(self._timeout_s)
        self._at_barrier = None

    def num_dead_nodes(self) -> int:
        """See ``KVStore``."""
        return self._session.num_dead_nodes()

    def statistics(self) -> Statistics:
        """See ``KVStore``."""
        held = [0] * len(self._session.servers)
        for share in self._plan(self._entries):
            held[share.server] = sum(share.sizes)
        return Statistics(
            keys=len(self._entries),
            pushes=self._pushes,
            pulls=self._pulls,
            bytes_pushed=self._bytes_pushed,
            bytes_pulled=self._bytes_pulled,
            outstanding=sum(1 for ticket in self._pushed if ticket.open),
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

    def _ticket(self, what: str, keys: Iterable[Key]) -> Ticket:
        return Ticket(what, list(keys), self._session.client, self._failed.append, self._timeout_s)

    def _plan(self, keys: Iterable[Key]) -> list[Share]:
        listed = tuple(keys)
        if listed not in self._plans:
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            self._plans[listed] = plan(self._entries, listed)
        return self._plans[listed]

    def _clocks(self, share: Share) -> list[int]:
        return [self._entries[piece.key].clock for piece in share.pieces]

    def _checked(self, key: Key, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        entry = self._entries.get(key)
        if entry is None:
            raise KeyNotInitialised(f"key {key!r} has no value on this worker; call init first")
        for tensor in tensors:
            require_same(key, entry.spec, spec_of(tensor), "this call has")
        return tensors

    def _writer(self, outs: dict[Key, list[Any]]) -> Writer:
        return Writer(
            {key: self._checked(key, [as_output(o) for o in its]) for key, its in outs.items()}, self._entries
        )

    def _reduced(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """The sum of one key's values as a flat host tensor that is nobody else's."""
        total = reduce_to(tensors, tensors[0].device if self._on_device else CPU)
        fresh = total.device == CPU and total.is_contiguous() and all(total.data_ptr() != t.data_ptr() for t in tensors)
        return total.view(-1) if fresh else to_host(total)

    def _require_updatable(self, keys: Iterable[Key]) -> None:
        if self._mode == "async":
            self._require_optimizer("push")
        if self._optimizer is not None:
            require_floats((key, self._entries[key].spec) for key in keys)

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


def _least(options: Mapping[str, Any], name: str, least: T) -> T | None:
    """Return option ``name``, a number of the kind of ``least`` and no smaller; None if it is not given."""
    value = options.get(name)
    if value is None:
        return None
    number = finite(name, value)
    if number < least or type(least)(number) != number:
        raise UsageError(f"{name}={value!r} must be {'an integer, ' * isinstance(least, int)}at least {least}")
    return type(least)(number)
