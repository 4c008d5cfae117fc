"""How a trainer's gradients get to its store, and how weights or sums come back: in the step, or during backward.

Whether a gradient is sparse, as of ``nn.Embedding(sparse=True)``, shows at the first step, so a parameter's table is
made then. What comes back of a round is the rows that any worker has pushed: so all workers' weights stay the same.
Where updates are not of all workers together, other rows may have changed, too. There a parameter stays an array, of
which rows are pushed, and all comes back.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from kvstore import AlreadyInitialized, KVStore, RowSparse, Table, Unsupported, UsageError
from kvstore.job.config import Config
from kvstore.rows.row_sparse import ParameterRows
from kvstore.ticket import Ticket, explained
from workers.common.checks import thawed
from workers.common.hand_over import HandOver
from workers.common.row_steps import row_steps
from workers.common.sparse_gradients import RoundRows, as_gradient, as_rows, is_sparse, push_rows, table_key
from workers.common.stores import updates_each_push
from workers.common.tensors import has_parts, overwrite
from workers.reducer import Reducer
from workers.trainer.outside_writes import OutsideWrites
from workers.trainer.overlap import Overlap, overlapping
from workers.trainer.parameters import Key, Parameter, clear
from workers.trainer.rates import TrainerRates

log = logging.getLogger(__name__)

T = TypeVar("T")

_updating: weakref.WeakSet[KVStore] = weakref.WeakSet()  # stores that have a Trainer's optimizer
_summing: weakref.WeakSet[KVStore] = weakref.WeakSet()  # stores that sum for Trainers


class SparseParameters:
    """The parameters of a trainer whose gradients are sparse.

    Attributes:
        positions: of those that have tables, in the order in which these were made.
        arrays: of those that stay arrays.
    """

    def __init__(self, params: Sequence[Parameter], store: KVStore, *, updates: bool) -> None:
        self.positions: list[int] = []
        self.arrays: list[int] = []
        self._params = params
        self._store = store
        self._updates = updates

    def find(self) -> list[int]:
        """Note the parameters whose gradients are sparse for the first time, make tables; return their positions."""
        found = [position for position, param in enumerate(self._params) if any(map(is_sparse, param.tensors))]
        if not self._updates or self.in_rounds:
            return self.make(found)
        new = [position for position in found if position not in self.arrays]
        self.arrays += new
        return new

    @property
    def all(self) -> list[int]:
        return [*self.positions, *self.arrays]

    def make(self, positions: Sequence[int]) -> list[int]:
        new = [position for position in positions if position not in self.positions]
        for position in new:
            self._require_rounds(self._params[position].key)
        if new:
            self._store.init(
                [table_key(self._params[position].key) for position in new],
                [self._first(self._params[position]) for position in new],
            )
            self.positions += new
        return new

    def push(self, left_out: Collection[int] = ()) -> RoundRows | None:
        """Push the gradients, and ask for what becomes of the rows; return at once. None if there are none."""
        positions = [position for position in self.positions if position not in left_out]
        if not positions:
            return None
        pushed = [self._params[position] for position in positions]
        values = [[as_rows(grad) for grad in param.gradients()] for param in pushed]
        keys = [table_key(param.key) for param in pushed]
        return push_rows(self._store, positions, keys, values, [param.tensors[0] for param in pushed])

    def push_arrays(self, left_out: Collection[int] = ()) -> Ticket | None:
        """Push the gradients of those that stay arrays, and ask for the weights; return at once."""
        pushed = [self._params[position] for position in self.arrays if position not in left_out]
        if not pushed:
            return None
        values = [[as_rows(grad) for grad in param.gradients()] for param in pushed]
        return self._store.pushpull(
            [param.key for param in pushed], values, [list(param.tensors) for param in pushed], wait=False
        )

    @torch.no_grad()
    def write(self, came: RoundRows, *, weights: bool) -> None:
        """Wait for rows. Write them into the weights; or else let them be the gradients."""
        came.ticket.wait()
        for position, rows in zip(came.positions, came.rows, strict=True):
            for tensor in self._params[position].tensors:
                if weights:
                    tensor.detach().index_copy_(0, rows.ids.to(tensor.device), rows.rows.to(tensor.device))
                else:
                    tensor.grad = as_gradient(rows, tensor)

    def refresh(self, positions: Collection[int]) -> None:
        for position in positions:
            param = self._params[position]
            weight = param.tensors[0].detach()
            whole = weight if weight.is_cpu and weight.is_contiguous() else torch.empty_like(weight, device="cpu")
            self._store.pull(table_key(param.key), whole, ignore_sparse=False)
            for tensor in param.tensors:
                if tensor.data_ptr() != whole.data_ptr():
                    tensor.detach().copy_(whole)

    def _first(self, param: Parameter) -> Table | RowSparse:
        """Return what a table begins with: rank 0's weight; zeros, where the store sums."""
        weight, shape = param.tensors[0], tuple(param.tensors[0].shape)
        if not self._updates:
            return Table(shape=shape, dtype=weight.dtype, parameter=param.key)
        of_rank_0 = weight.detach().cpu()
        rows = of_rank_0 if self._store.rank == 0 else of_rank_0[:0]
        return ParameterRows(torch.arange(len(rows), dtype=torch.int64, device="cpu"), rows, shape, param.key)

    @property
    def in_rounds(self) -> bool:
        """Whether each update has the pushes of all workers."""
        quorum = getattr(getattr(self._store, "rule", None), "quorum", None)
        return not updates_each_push(self._store.type) and quorum is None

    def _require_rounds(self, key: Key) -> None:
        if not self.in_rounds:
            raise UsageError(
                f"the gradient of {key!r} is sparse, and in a {self._store.type!r} store, whose updates are not all "
                "workers' together, their weights would not stay the same: use workers.Embedding, whose rows are the "
                "store's, or make the layer with sparse=False"
            )


class ParameterLists:
    """Lists of equal length, in the order of the parameters.

    The memory of ``memory`` holds gradients of CPU parameters.
    """

    def __init__(self, params: list[Parameter], memory: KVStore | None) -> None:
        self._params = params
        self._keys = [param.key for param in params]
        self._weights = self._by_key([list(param.tensors) for param in params])
        self._shared: dict[torch.Tensor, torch.Tensor] = {}
        if memory is not None:
            self._shared = {
                tensor: memory.empty(tuple(tensor.shape), tensor.dtype)
                for param in params
                for tensor in param.tensors
                if tensor.is_cpu and tensor.requires_grad
            }

    def keys(self, left_out: Sequence[int] = ()) -> list[Any]:
        return _without(self._keys, left_out)

    def weights(self, left_out: Sequence[int] = ()) -> list[Any]:
        return _without(self._weights, left_out)

    def gradients(self, left_out: Sequence[int] = ()) -> list[Any]:
        return self._by_key([param.gradients() for param in _without(self._params, left_out)])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set gradients in the store's memory to zero, and drop all others, unless ``set_to_none`` is False."""
        for param in self._params:
            for tensor in param.tensors:
                if tensor.requires_grad and tensor in self._shared:
                    tensor.grad = self._shared[tensor].zero_()
                else:  # of a parameter that has been frozen, too: momentum would move it where there are zeros
                    clear(tensor, set_to_none)

    def _by_key(self, tensors: list[list[torch.Tensor]]) -> list[Any]:
        """One value per key: a tensor if there is one device, which the store checks faster, else a list of tensors."""
        return [per_device[0] for per_device in tensors] if len(self._params[0].tensors) == 1 else tensors


def _without(items: list[T], left_out: Sequence[int]) -> list[T]:
    without = set(left_out)
    return [item for position, item in enumerate(items) if position not in without] if without else items


class GradientSync:
    """What is between a trainer and its store. On construction every worker and device gets rank 0's parameters.

    Args:
        rates: the hyper-parameters, if the store updates; None if it sums.
        frozen: positions of parameters that require no gradient so far. The store does not have them. ``thaw`` takes
            positions out of this set.
        handed: is told of the first push of a step.
    """

    def __init__(
        self,
        params: list[Parameter],
        store: KVStore,
        rates: TrainerRates | None,
        *,
        share_weights: bool,
        share_gradients: bool,
        overlap: bool | None,
        forward: nn.Module | None,
        frozen: set[int],
        handed: HandOver | None = None,
    ) -> None:
        self._store = store
        self._rates = rates
        self._share = {"copy": False} if share_weights else {}
        self._params = params
        self._frozen = frozen
        self._closed = False
        self._lists = ParameterLists(params, store if share_gradients else None)
        self._sparse = SparseParameters(params, store, updates=rates is not None)
        # Frozen parameters are not sent: servers would hold, and checkpoints save, what never changes.
        out = list(frozen)
        take(store, self._lists.keys(out), self._lists.weights(out), updates=rates is not None)
        self._tables = row_steps(store)  # of modules whose tables this store has
        if rates is not None:  # they belong to the states that a resumed job's servers have
            self._attach(rates)
            self._tables.rates = rates.apply
            self._take_up(rates.trained)
            self._sparse.refresh(self._sparse.make(rates.tables))
        writes = self._writes = None if rates is None else OutsideWrites(params, frozen, _advice(store))
        if writes is not None:
            store.watch_pulls(writes.pulled)
        updates = rates is not None

        def new_overlap() -> Overlap | None:  # of ``frozen`` as it is then; without ``self``, which would keep itself
            buckets = overlapping(
                params, store, frozen, overlap, updates=updates, share_gradients=share_gradients, forward=forward
            )
            if buckets is None:
                return None
            return Overlap(
                *(params, buckets, store),
                rates=rates,
                share=share_weights,
                asked=bool(overlap),
                forward=forward,
                frozen=frozen,
                writes=writes,
                handed=handed,
            )

        self._new_overlap = new_overlap
        self._renew = False
        self._overlap = self._new_overlap()
        self._note(self._sparse.positions)
        if self._writes is not None:
            self._writes.note()
        if share_gradients:
            self._lists.zero_grad()

    def _attach(self, rates: TrainerRates) -> None:
        """Have checkpoints of the job save ``rates``, and take the saved ones if the job continues from one.

        The name that they have there does not depend on the order of the parameters, which a resumed job may change.
        """
        keys: list[Any] = self._lists.keys(list(self._frozen))
        loaded = self._store.attach(f"trainer of {min(keys)}", rates, shared=True)
        if not loaded and min(keys) != keys[0]:
            self._store.attach(f"trainer of {keys[0]}", rates, shared=True)  # its name in older checkpoints

    @property
    def overlaps(self) -> bool:
        return self._overlap is not None and self._overlap.begun

    def zero_grad(self, set_to_none: bool) -> None:
        self._lists.zero_grad(set_to_none)

    def step(self, scale: float, *, lasting: bool, left_out: Sequence[int]) -> None:
        """Push the gradients; return when the parameters have their new values, or are to wait for them in forward.

        Args:
            lasting: whether the next step has the same factor.
            left_out: positions of parameters that no worker has a gradient of. They are not updated.
        """
        skipped = self._find(left_out)
        self._tables.scale = scale
        self._tables.pushes.step_over()
        with self._written():
            # An overlap has sent the rates with its first push. Rows go beside it, in a push of their own.
            if self._sparse.all or self._overlap is None:
                self._apply(scale)
            rows, arrays = self._sparse.push(left_out), self._sparse.push_arrays(left_out)
            if self._overlap is not None:
                self._overlap.finish(scale, lasting=lasting, left_out=skipped)
            else:
                self._pushpull(skipped, self._lists.weights(skipped), **self._share)
            if rows is not None:
                self._sparse.write(rows, weights=True)
            if arrays is not None:
                arrays.wait()
            self._renew_overlap()

    def sum(self, left_out: Sequence[int]) -> None:
        require_sums(self._store)  # at each step: nothing else would tell sums from what an optimizer made of them
        skipped = self._find(left_out)
        rows = self._sparse.push(left_out)
        if self._overlap is not None:
            self._overlap.finish(left_out=skipped)
        else:
            self._pushpull(skipped)
        if rows is not None:
            self._sparse.write(rows, weights=False)
        self._renew_overlap()

    def thaw(self, positions: Sequence[int]) -> None:
        """Train the frozen parameters at ``positions`` from now on. Every worker calls this at the same step."""
        if self._take_up(positions):
            # Not at once: gradients of this step may be on their way by the present hooks.
            self._renew = True

    def meet(self, positions: Sequence[int]) -> None:
        """Wait until all workers train the parameters at ``positions``, which have been thawed here.

        In a store whose rounds need all workers this does nothing, because the next round waits for all.
        """
        # A worker gets a parameter's value from the store only if it trains the parameter: one that does not would keep
        # the old value. A worker that has come back thaws later than the others did, so jobs with these do not wait.
        if self._sparse.in_rounds or self._store.num_workers == 1 or self._store.min_workers:
            return
        keys = [self._params[position].key for position in positions]
        with self._store.companion() as beside, explained(thawed(keys)):
            beside.barrier()

    @property
    def tables(self) -> list[int]:
        """The positions of the parameters that have tables, in the order in which these were made."""
        return self._sparse.positions

    def make_tables(self, positions: Sequence[int]) -> None:
        self._note(self._sparse.make(positions))

    def pull(self, positions: Collection[int] | None = None) -> None:
        wanted = range(len(self._params)) if positions is None else positions
        without = {*self._sparse.positions, *self._frozen}
        skipped = [p for p in range(len(self._params)) if p not in wanted or p in without]
        with self._written():
            if keys := self._lists.keys(skipped):
                self._store.pull(keys, self._lists.weights(skipped), **self._share)
            self._sparse.refresh([position for position in self._sparse.positions if position in wanted])

    @contextmanager
    def paused(self) -> Iterator[None]:
        with self._tables.pushes.paused():
            if self._overlap is None:
                yield
                return
            with self._overlap.paused():
                yield

    def require_between_steps(self, what: str) -> None:
        """Wait for values on their way; raise ``UsageError`` if only some of a step's gradients have been pushed."""
        if self._overlap is not None:
            self._overlap.require_between_steps(what)
            self._overlap.synchronize()

    def synchronize(self) -> None:
        if self._overlap is not None:
            self._overlap.synchronize()

    def close(self) -> None:
        self._closed = True
        if self._overlap is not None:
            self._overlap.close()

    def _find(self, left_out: Sequence[int]) -> list[int]:
        """Return which positions are not pushed as arrays: tables' positions and ``left_out``."""
        out = {*left_out, *self._frozen}
        try:
            for position, param in enumerate(self._params):
                if position not in out:
                    # A push cannot be taken back, and workers must push equally often: so look at all before the first
                    # leaves.
                    param.gradients()  # raises, before anything is pushed
            new = self._sparse.find()
        except Exception:
            if self._overlap is not None:
                self._overlap.restart()
            raise
        self._note(new)
        return [*out, *self._sparse.all]

    @contextmanager
    def _written(self) -> Iterator[None]:
        """The parameters are written to in this block, and by nobody else between two such blocks."""
        if self._writes is None:
            yield
            return
        self._writes.require_none()
        try:
            yield
        finally:
            self._writes.note()

    def _take_up(self, positions: Sequence[int]) -> bool:
        """Give the store the parameters at ``positions`` that are frozen; return whether there are any."""
        new = [position for position in positions if position in self._frozen]
        if new:
            out = [position for position in range(len(self._params)) if position not in new]
            keys = self._lists.keys(out)
            with explained(thawed(keys)):
                take(self._store, keys, self._lists.weights(out), updates=self._rates is not None)
            self._frozen.difference_update(new)
        return bool(new)

    def _renew_overlap(self) -> None:
        """After a step that has begun to train more parameters, watch and push all of them, unless that was ended."""
        if not self._renew:
            return
        self._renew = False
        if self._overlap is not None:
            self._overlap.close()
        if not self._closed:
            self._overlap = self._new_overlap()
            self._note(self._sparse.all)

    def _note(self, new: Sequence[int]) -> None:
        if self._rates is not None:
            self._rates.tables = list(self._sparse.positions)
        if new and self._overlap is not None:
            self._overlap.exclude(new)

    def _apply(self, scale: float) -> None:
        if self._rates is not None:
            self._rates.apply()
        self._store.set_hyperparameters(rescale_grad=scale)

    def _pushpull(self, skipped: Sequence[int], outs: list[Any] | None = None, **share: bool) -> None:
        if grads := self._lists.gradients(skipped):
            self._store.pushpull(self._lists.keys(skipped), grads, grads if outs is None else outs, **share)


def _advice(store: KVStore) -> str:
    """What a program can do in place of writing into weights that ``store`` holds."""
    anew = (
        "make a new Trainer with a new store after such a write, on all workers (its save_states and load_states carry "
        "the optimizer's state over)"
    )
    if updates_each_push(store.type):
        return anew
    return (
        f"pass update_on_kvstore=False, which updates these very tensors, and write the same on all workers; or {anew}"
    )


def decide(made: KVStore | None, wanted: bool | None, one_device: bool) -> tuple[KVStore | None, bool]:
    """Return the store to use, or None, and whether it updates. ``wanted``: the argument ``update_on_kvstore``."""
    if made is None and not one_device:
        raise UsageError(
            "several devices need a store to sum their gradients, and kvstore=None is none: pass kvstore='device'"
        )
    if made is None:
        return None, False
    is_async = updates_each_push(made.type)
    if wanted is False and is_async:
        raise UsageError(
            f"update_on_kvstore=False does not work with a {made.type!r} store, which updates for every push: use "
            "'dist_sync'"
        )
    if wanted is not None:
        return made, wanted
    if is_async:
        return made, True
    if one_device and made.num_workers == 1 and not made.type.startswith("dist"):
        return None, False
    return made, Config.from_env().update_on_kvstore and made.is_capable("optimizer")


def require_free(store: KVStore, *, updates: bool) -> None:
    """Raise ``UsageError`` unless a further Trainer may have ``store``. Those for which it sums may share it."""
    if store in _updating:
        raise UsageError("this store already updates for another Trainer; make a second store with kvstore.create")
    if not updates:
        require_sums(store)
    elif store in _summing:
        raise UsageError("this store already sums for another Trainer; make a second store with kvstore.create")


def require_sums(store: KVStore) -> None:
    try:
        _ = store.learning_rate
    except UsageError:  # it has no optimizer
        return
    raise UsageError(
        "this store updates with the optimizer of set_optimizer, and a Trainer with update_on_kvstore=False needs "
        "sums: give each a store of its own"
    )


def take(store: KVStore, keys: Sequence[Any], weights: Any, *, updates: bool) -> None:
    """Make rank 0's ``weights`` the values of ``store`` and of all workers.

    ``updates``: it updates them from now on.
    """
    try:
        # A store of the user's own may copy into the weights as they are, which autograd refuses otherwise.
        with torch.no_grad():
            if store.newcomer and not updates:  # the store has sums: the weights come from a worker
                store.init(keys, weights)
            else:
                store.broadcast(keys, weights, weights)
    except AlreadyInitialized as exc:
        raise UsageError(
            f"this store has another model's values: {exc.args[0].partition(';')[0]}; make a second one with "
            "kvstore.create"
        ) from None
    (_updating if updates else _summing).add(store)


def give_first(store: KVStore, replicas: Sequence[Mapping[str, torch.Tensor]], *, wanted: bool) -> None:
    """Give every worker and device rank 0's values of what is not trained: frozen parameters, and buffers.

    The trainer's store does not have them: its servers would hold, and its checkpoints save, what never changes. If
    they are not ``wanted``, this makes the store that the other workers have made here.
    """
    first, *others = replicas
    named = {name: tensor for name, tensor in first.items() if has_parts(tensor)}
    if not named:
        return
    if store.num_workers > 1:
        try:
            beside = store.companion()
        except Unsupported:  # a class of somebody else's, which needs to have no more than pushes and pulls
            log.warning("a %r store has no companion: frozen parameters and buffers stay each worker's own", store.type)
            return
        with beside:
            if wanted:
                Reducer.over(beside).broadcast(named)
    for other in others:
        for name in named.keys() & other.keys():
            overwrite(other[name], named[name].detach().to(other[name].device))
