"""The worker's side of the optimizer: what this worker has set, what its pushes ask for, and the servers' states."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch

from kvstore.client.entries import Entries, Entry, PushClocks, Segment
from kvstore.client.plans import Parcel, Plans, parcels
from kvstore.client.requests import AT_ONCE, Requests, assemble, cut
from kvstore.client.stored_tables import StoredRows, StoredTables
from kvstore.errors import DeadlineExceeded, KVStoreError, UsageError
from kvstore.optim import states_file
from kvstore.optim.hyperparameters import ALIKE, finite, require_weight
from kvstore.optim.optimizer import Changes, Optimizer, describe, log_replaced, require_shapes
from kvstore.optim.param_groups import ParamGroups
from kvstore.optim.states import StateStore, StateTensors
from kvstore.rows.ids import Ids
from kvstore.rows.row_table import RowStates, split
from kvstore.rows.sums import Rows
from kvstore.rule import Rule
from kvstore.spec import Key
from kvstore.table import TableSpec

PullRows: TypeAlias = Callable[[Key, Ids], Rows]  # the rows of these ids


class StoredStates:
    """The states of a store's tables on its servers."""

    def __init__(self, stored: StoredTables, plans: Plans, clocks: PushClocks, pull: PullRows) -> None:
        self._stored, self._entries, self._plans = stored, plans.entries, plans
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
        for key in states:
            if key not in self._entries.tables:
                raise UsageError(f"{where} holds states of table {key!r}, which has not been initialized")

    def replace(self, key: Key, states: RowStates) -> None:
        """Give rows these states. In tables that grow, only rows that are there take them."""
        what, plan, entry = "load_optimizer_states", self._plans.tables([key]), self._entries[key]
        grows = self._entries.tables[key].grows
        with self._stored.freeze(entry.segments, int(self._clocks.pushed[entry.place])) as reading:
            for page in states.replaced(reading.pages(), grows, partial(self._pull, key)):
                self._stored.put(what, plan, key, StoredRows(*page, steps=states.steps))


class PushNumbers(NamedTuple):
    """The numbers that all messages of a push have."""

    lr: float | None = None  # lr, rescale: what this worker has set; None if it has not
    rescale: float | None = None
    # other hyper-parameters that differ from the optimizer's, as messages carry them
    changes: list[list[Any]] = []  # noqa: RUF012 - nobody changes it
    order: int | None = None  # the priority among other messages that leave; None for the order of calls
    weight: float | None = None  # in the mean of a round; None is 1


class _Set(NamedTuple):
    """What this worker has set: in which call of ``set_optimizer``, and what has been changed since."""

    version: int = 0
    optimizer: Optimizer | None = None
    lr: float | None = None
    rescale: float | None = None
    changes: Changes = {}  # noqa: RUF012 - nobody changes it


class Optimizing:
    """One worker's view of the optimizer that servers update with."""

    def __init__(self, requests: Requests, tables: StoredStates, store: str) -> None:
        self._requests = requests
        self._tables = tables
        self._store = store
        self._set = _Set()  # replaced as a whole: an exception leaves the old or the new one
        self._theirs: str | None = None  # the servers' optimizer, if another worker has set it
        self.weight: float | None = None  # of this worker's pushes in the means of their rounds; None is 1
        self.alike: str | None = None  # what its pushes say, on which the workers of a round must agree

    @property
    def optimizer(self) -> Optimizer | None:
        return self._set.optimizer

    @property
    def whole(self) -> bool:
        """Whether arrays must not be cut."""
        return self.optimizer is not None and self.optimizer.whole

    def set(self, new: Optimizer) -> None:
        """Have the servers update with ``new``; earlier changes of hyper-parameters are forgotten.

        It takes effect when the last server has answered, even if the call is interrupted. Until then, calling it again
        repeats the same request.
        """
        # Servers compare the n-th calls of all workers, so a call that has timed out keeps its number for the next try.
        version = self._set.version + 1
        try:
            self._requests.set_optimizer(version, new, partial(self._is_set, version, new))
        except DeadlineExceeded:
            raise
        except KVStoreError:  # it was refused, as the same call of the other workers was
            self._set = self._set._replace(version=version)
            raise

    def _is_set(self, version: int, new: Optimizer) -> None:
        # The effect of the last server's answer, not a line after the wait: the caller may have given up by then.
        if self._set.version < version:
            log_replaced(self.optimizer, new)
            self._set = _Set(version, new)

    @property
    def learning_rate(self) -> float:
        if self._set.lr is not None:
            return self._set.lr
        if self.optimizer is None:
            raise UsageError("this worker has set no optimizer and no learning rate")
        return self.optimizer.lr

    def change(
        self,
        learning_rate: float | None,
        rescale_grad: float | None,
        groups: Sequence[Mapping[str, Any]],
        others: Mapping[str, Any],
    ) -> None:
        changes: Changes = {}
        if groups or others:
            if self.optimizer is None:
                raise UsageError("this worker has set no optimizer, whose hyper-parameters these could be")
            changes = self.optimizer.changes(others, groups)
        lr, rescale = self._set.lr, self._set.rescale
        if learning_rate is not None:
            lr = float(finite("learning_rate", learning_rate))
        if rescale_grad is not None:
            rescale = float(finite("rescale_grad", rescale_grad))
        self._set = self._set._replace(lr=lr, rescale=rescale, changes={**self._set.changes, **changes})

    @property
    def rescale_grad(self) -> float:
        """The factor of gradients that pushes ask for; 1 if this worker has set neither it nor an optimizer."""
        if self._set.rescale is not None:
            return self._set.rescale
        return 1.0 if self.optimizer is None else self.optimizer.rescale_grad

    @contextmanager
    def rescaled(self, factor: float) -> Iterator[None]:
        before = self._set.rescale
        self._set = self._set._replace(rescale=float(finite("rescale_grad", factor)))
        try:
            yield
        finally:
            self._set = self._set._replace(rescale=before)

    @contextmanager
    def weighted(self, weight: float) -> Iterator[None]:
        before, self.weight = self.weight, require_weight(weight)
        try:
            yield
        finally:
            self.weight = before

    def numbers(self, order: int | None) -> PushNumbers:
        _, _, lr, rescale, changes = self._set
        said = [] if self.alike is None else [[0, ALIKE, self.alike]]
        listed = [*([*which, value] for which, value in changes.items()), *said]
        return PushNumbers(lr, rescale, listed, order, self.weight)

    def changed(self) -> list[Any]:
        """Return what this worker has set, for one that is to go on as it does; see ``take_over``."""
        version, _, lr, rescale, changes = self._set
        return [version, lr, rescale, [[*which, value] for which, value in changes.items()]]

    def take_over(self, changed: list[Any]) -> None:
        version, lr, rescale, changes = changed
        numbers = {(group, name): value for group, name, value in changes}
        self._set = self._set._replace(version=max(version, self._set.version), lr=lr, rescale=rescale, changes=numbers)

    def require(self, what: str) -> str:
        """Return the optimizer's rule; a worker that has not set it asks the servers, once.

        Raises:
            UsageError: no optimizer has been set. The message says that ``what`` needs one.
        """
        if self.optimizer is not None:
            return self.optimizer.rule
        if self._theirs is None:
            self._theirs = self._requests.optimizer()
        if self._theirs is None:
            raise UsageError(
                f"{what} on a {self._store!r} store needs an optimizer: call set_optimizer(name, ...) first, "
                "on every worker, or on rank 0 and then barrier() on all"
            )
        return self._theirs

    def rule(self) -> str | None:
        """Return the optimizer's rule; None if no worker has set one."""
        return self._requests.optimizer() if self.optimizer is None else self.optimizer.rule

    def save(
        self,
        path: str | os.PathLike[str],
        entries: Entries,
        residuals: states_file.Residuals | None,
        note: str | None,
    ) -> None:
        self._theirs = None  # it may be another by now
        optimizer = self.require("save_optimizer_states")
        segments: dict[tuple[Segment, str], torch.Tensor] = {}
        for parcel in _parcels(entries):
            segments |= self._requests.get_states(parcel)
        states_file.write(path, optimizer, assemble(segments, entries) | self._tables.read(), residuals, note)

    def restore(self, optimizer: str, loaded: StateTensors, entries: Entries, where: str | os.PathLike[str]) -> None:
        states_file.require_optimizer(optimizer, self.require("load_optimizer_states"), where)
        loaded, tables = split(loaded, where)
        specs = {key: entry.spec for key, entry in entries.items() if key not in entries.tables}
        states_file.require_keys(loaded, specs, where)
        self._tables.require(tables, where)
        if self.optimizer is not None:  # servers look too, but each at its own: others would have taken theirs
            weights = {
                key: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="cpu")
                for key, spec in specs.items()
            }
            StateStore(ParamGroups(self.optimizer)).require(loaded, weights)
        by_segment: dict[Segment, dict[tuple[Segment, str], torch.Tensor]] = {}
        for (segment, state), value in cut(loaded, entries).items():
            by_segment.setdefault(segment, {})[segment, state] = value
        for parcel in _parcels(entries):
            of_parcel: dict[tuple[Segment, str], torch.Tensor] = {}
            for segment in parcel.segments:
                of_parcel |= by_segment.get(segment, {})
            if of_parcel:
                self._requests.put_states(parcel.server, of_parcel)
        for key, of_key in tables.items():
            self._tables.replace(key, of_key)


def _parcels(entries: Entries) -> list[Parcel]:
    arrays = [key for key in entries if key not in entries.tables]
    return parcels(entries, arrays, AT_ONCE) if arrays else []


def described(optimizer: Any, hyperparameters: Mapping[str, Any], entries: Mapping[Key, Entry]) -> Optimizer:
    """Return the description of what ``set_optimizer`` was given, if it can update what there is."""
    new = describe(optimizer, hyperparameters)
    for key, entry in entries.items() if new.whole else ():
        if entry.cut and not isinstance(entry.spec, TableSpec):
            raise UsageError(
                f"{new.name} needs whole tensors, but key {key!r} is cut over {entry.servers} servers, in "
                f"{len(entry.segments)} segments; set the optimizer before init, or raise KVSTORE_BIGARRAY_BOUND "
                "and KVSTORE_PIECE_BYTES"
            )
    require_shapes(new, ((key, entry.spec) for key, entry in entries.items()))
    return new


# ---- late gradients act as additional momentum: a high one is warned of in asynchronous stores

MUCH = 0.5
_AVERAGED = frozenset({"signum"})  # (1 - momentum) of each gradient goes in: more momentum makes no longer steps
_OURS = ("kvstore", "workers")


def advice(optimizer: Optimizer, rule: Rule, store: str, workers: int) -> str:
    """Return what to tell who updates with ``optimizer`` in a store of several workers; empty if there is nothing."""
    momentum = 0.0 if optimizer.name in _AVERAGED else _largest_momentum(optimizer)
    if rule.mode != "async" or workers < 2 or momentum < MUCH:
        return ""
    return (
        f"{optimizer.name} has momentum {momentum:g} in a {store!r} store of {workers} workers: gradients come late "
        "there, which acts as more momentum, so training may become unstable or stop learning. Set momentum=0 and a "
        "higher learning rate, or use a 'dist_sync' store; docs/training.md has figures"
    )


def warn(message: str) -> None:
    """Warn with ``message``, at the line outside of this package and of ``workers`` that has called them."""
    level, frame = 1, sys._getframe(0)
    while frame is not None and str(frame.f_globals.get("__name__")).split(".")[0] in _OURS:
        level, frame = level + 1, frame.f_back  # type: ignore[assignment]
    warnings.warn(message, stacklevel=level)


def _largest_momentum(optimizer: Optimizer) -> float:
    return max(float(optimizer.defaults(number).get("momentum", 0.0)) for number in range(len(optimizer.groups) + 1))
