"""The parameters that a trainer trains: what sums their gradients, and what updates them, with which rates and states.

``Trainer`` makes the steps. Here is what there is between two of them.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kvstore import KVStore, NotFinite, Unsupported, UsageError
from kvstore.optim import states_file
from kvstore.optim.hyperparameters import finite
from kvstore.optim.optimizer import Optimizer, describe, require_shapes
from kvstore.optim.states import StateTensors
from kvstore.optim.updater import RowHyperparameters, RowUpdater, Updater, refusals
from kvstore.spec import shorten
from kvstore.values import all_finite, spec_of
from workers.common.checks import on_off_auto
from workers.common.row_steps import row_steps
from workers.common.sparse_gradients import table_key
from workers.trainer.arrivals import unshare_for_state_dict
from workers.trainer.gradient_sync import GradientSync
from workers.trainer.overlap import decide, give_first, opened, require_alone, require_free
from workers.trainer.parameters import (
    Key,
    Parameter,
    buffers_beside,
    collect,
    grouped,
    modules_beside,
    order_of,
    require_order,
)
from workers.trainer.rates import TrainerRates, param_groups, rates_given, settings

log = logging.getLogger(__name__)


STEP = "step"


@dataclass
class RowsOfParameter:
    """One parameter: what updates its rows, how often it has, and the states of all rows by name."""

    updater: RowUpdater
    count: int = 0
    states: dict[str, torch.Tensor] = field(default_factory=dict)


class LocalRows:
    """Updates rows of parameters, in place. States are of the whole parameter, by the names that torch has for them."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._updated: dict[Key, RowsOfParameter] = {}

    def __contains__(self, key: Key) -> bool:
        """Whether rows of parameter ``key`` have been updated."""
        return key in self._updated

    def begin(self, key: Key, weight: torch.Tensor, states: StateTensors) -> None:
        """Begin to update rows of a parameter; ``states`` are those that the optimizer has of it already."""
        dtype = str(weight.dtype).removeprefix("torch.")
        updater = RowUpdater(self._optimizer, key, dtype, weight[0].numel(), grows=False)
        rows = RowsOfParameter(updater)
        for name, state in updater.states.items():
            columns = weight[0].numel() if state.columns is None else state.columns
            known = states.get((key, name))
            rows.states[name] = (
                torch.full((len(weight), columns), state.initial, dtype=getattr(torch, state.dtype), device="cpu")
                if known is None
                else known.detach().cpu().reshape(len(weight), columns).clone()
            )
        if (count := states.get((key, STEP))) is not None:
            rows.count = int(count)
        self._updated[key] = rows

    @torch.no_grad()
    def update(self, key: Key, weight: torch.Tensor, grad: torch.Tensor, hyper: RowHyperparameters) -> None:
        """Update the rows of ``weight`` that the sparse ``grad`` has; all rows, if the optimizer is not lazy."""
        rows = self._updated[key]
        rows.count += 1
        if rows.updater.lazy:
            summed = grad.coalesce()
            ids, grads = summed.indices()[0].cpu(), summed.values().cpu()
            grads = grads.clone() if grads.data_ptr() == summed.values().data_ptr() else grads
        else:
            ids, grads = torch.arange(len(weight), dtype=torch.int64, device="cpu"), grad.to_dense().cpu()
        flat = weight.detach().view(len(weight), -1)
        gathered = flat[ids.to(weight.device)].cpu()
        states = {name: state[ids] for name, state in rows.states.items()}
        rows.updater.step(rows.count, gathered, grads.view(gathered.shape), states, hyper)
        flat.index_copy_(0, ids.to(weight.device), gathered.to(weight.device))
        for name, state in states.items():
            rows.states[name].index_copy_(0, ids, state)

    def of(self) -> StateTensors:
        tensors: StateTensors = {}
        for key, rows in self._updated.items():
            tensors |= {(key, name): state for name, state in rows.states.items()}
            tensors[key, STEP] = torch.tensor(float(rows.count), dtype=torch.float32, device="cpu")
        return tensors


class LocalUpdates:
    """Updates the parameters of this process. Devices with equal gradients keep equal parameters.

    Args:
        frozen: positions of parameters that are not trained; others may take positions out of this set.
    """

    def __init__(
        self,
        params: Sequence[Parameter],
        optimizer: Optimizer,
        check_finite: bool = False,
        frozen: Collection[int] = (),
    ) -> None:
        self._params, self._optimizer, self._frozen = params, optimizer, frozen
        self._check_finite = check_finite
        self._made = 0  # updates
        self.require_shapes([position for position in range(len(params)) if position not in frozen])
        with refusals(optimizer):
            self._updaters = [Updater(optimizer) for _ in params[0].tensors]
            self._rows = [LocalRows(optimizer) for _ in params[0].tensors]

    def require_shapes(self, positions: Collection[int]) -> None:
        params = [self._params[position] for position in positions]
        require_shapes(self._optimizer, [(param.key, spec_of(param.tensors[0])) for param in params])

    def set_hyperparameters(
        self,
        *,
        learning_rate: float | None = None,
        rescale_grad: float | None = None,
        groups: Sequence[Mapping[str, Any]] = (),
        **others: Any,
    ) -> None:
        changes = self._updaters[0].optimizer.changes(others, groups)
        learning_rate = None if learning_rate is None else finite("learning_rate", learning_rate)
        rescale_grad = None if rescale_grad is None else finite("rescale_grad", rescale_grad)
        for updater in self._updaters:
            updater.lr = updater.lr if learning_rate is None else learning_rate
            updater.rescale_grad = updater.rescale_grad if rescale_grad is None else rescale_grad
            updater.changes = {**updater.changes, **changes}

    def update(self, rescale_grad: float, left_out: Collection[int] = ()) -> None:
        """Update with the gradients times ``rescale_grad``. The gradients do not change."""
        self._made += 1
        out = {*left_out, *self._frozen}
        params = [param for position, param in enumerate(self._params) if position not in out]
        grads = [param.gradients() for param in params]
        if self._check_finite:
            self._require_finite(params, grads)
        for device, updater in enumerate(self._updaters):
            updater.rescale_grad = rescale_grad
            given = [
                (param.key, param.tensors[device].detach(), per_device[device])
                for param, per_device in zip(params, grads, strict=True)
            ]
            dense = [(key, weight, grad.clone()) for key, weight, grad in given if grad.layout == torch.strided]
            if dense:
                updater.update(dense)
            for key, weight, grad in given:
                if grad.layout != torch.strided:
                    self._update_rows(device, key, weight, grad)

    def _update_rows(self, device: int, key: Key, weight: torch.Tensor, grad: torch.Tensor) -> None:
        updater, rows = self._updaters[device], self._rows[device]
        if key not in rows:
            rows.begin(key, weight, updater.states.of([key]))
        rows.update(key, weight, grad, RowHyperparameters(updater.lr, updater.rescale_grad, updater.changes))

    def _require_finite(self, params: Sequence[Parameter], grads: Sequence[Sequence[torch.Tensor]]) -> None:
        for param, per_device in zip(params, grads, strict=True):
            if not all(all_finite(grad if grad.layout == torch.strided else grad._values()) for grad in per_device):
                raise NotFinite(
                    f"the gradient of {param.key!r} has NaN or infinite elements in update {self._made}, "
                    "which has not been made"
                )

    def save_optimizer_states(self, path: str | os.PathLike[str], *, note: str | None = None) -> None:
        updater = self._updaters[0]
        saved = updater.states.of(param.key for param in self._params) | self._rows[0].of()
        states_file.write(path, updater.optimizer.rule, saved, note=note)

    def load_optimizer_states(self, path: str | os.PathLike[str]) -> None:
        name, loaded = states_file.read(path)
        states_file.require_optimizer(name, self._updaters[0].optimizer.rule, path)
        states_file.require_keys(loaded, {param.key: spec_of(param.tensors[0]) for param in self._params}, path)
        for device, updater in enumerate(self._updaters):
            updater.states.load(loaded, {param.key: param.tensors[device].detach() for param in self._params})
        self._rows = [LocalRows(updater.optimizer) for updater in self._updaters]  # they begin with what was loaded


class TrainedParameters:
    """The parameters of a model, in a store or alone. They have the values of rank 0 on every worker and device.

    Either the store updates them, and ``_local`` is None; or this process does, and the store, if there is one, sums.

    Args:
        params, optimizer, optimizer_params, kvstore, update_on_kvstore, compression_params: see ``Trainer``.
        overlap, share_gradients, share_weights, wait_in_forward, check_finite: likewise.

    Raises:
        UsageError, Unsupported, UnknownName: see ``Trainer``.
    """

    def __init__(
        self,
        params: Any,
        optimizer: Any,
        optimizer_params: Mapping[str, Any] | None,
        *,
        kvstore: KVStore | str | None,
        update_on_kvstore: bool | str | None,
        compression_params: Mapping[str, object] | None,
        overlap: bool | str | None,
        share_gradients: bool,
        share_weights: bool,
        wait_in_forward: nn.Module | None,
        check_finite: bool,
    ) -> None:
        store = opened(kvstore, check_finite)
        self._tables = None if store is None else row_steps(store)  # those that modules have in this store
        if store is not None and check_finite and not store.check_finite:
            raise UsageError(
                f"check_finite=True, but this {store.type!r} store does not check; make it with "
                "kvstore.create(..., check_finite=True)"
            )
        check_finite = check_finite or (store is not None and store.check_finite)
        buffers, models = buffers_beside(params), modules_beside(params)
        if isinstance(wait_in_forward, nn.Module):
            models.append(wait_in_forward)
            buffers[0] |= dict(wait_in_forward.named_buffers())
        collected = collect(params)
        if isinstance(optimizer, torch.optim.Optimizer) and len(optimizer.param_groups) > 1:
            collected = grouped(collected, optimizer)
        self._params: list[Parameter] = collected.everything
        self._frozen = {position for position, param in enumerate(self._params) if not param.trains}
        update_wanted = on_off_auto("update_on_kvstore", update_on_kvstore)
        self._store, on_store = decide(store, update_wanted, one_device=len(self._params[0].tensors) == 1)
        if compression_params is not None:
            if self._store is None:
                raise UsageError("compression_params need a store, which compresses: pass kvstore=, or leave them out")
            self._store.set_gradient_compression(compression_params)
        options, schedule, begun = settings(collected, optimizer_params or {})
        described = describe(optimizer, options)
        self._token = secrets.token_hex(8)
        self._local: LocalUpdates | None = None
        self._where: LocalUpdates | KVStore
        if self._store is None or not on_store:
            check_finite = check_finite and self._store is None
            self._where = self._local = LocalUpdates(self._params, described, check_finite, self._frozen)
        else:
            self._where = self._store
            require_free(self._store)
            self._store.set_optimizer(optimizer, **options)
        # A schedule of MXNet's writes its own numbers, so no tensor of anybody's is kept beside it.
        rates = rates_given(optimizer, options) if schedule is None else ()
        self._rates = TrainerRates(
            param_groups(described, self._params, rates),
            described,
            self._where,
            schedule,
            begun,
            [param.key for param in self._params],
            self._frozen,
        )
        overlap_wanted = on_off_auto("overlap", overlap)
        self._sync: GradientSync | None = None
        if self._store is None:
            require_alone(overlap_wanted, wait_in_forward)
        else:
            self._sync = GradientSync(
                self._params,
                self._store,
                self._rates if on_store else None,
                share_weights=share_weights,
                share_gradients=share_gradients,
                overlap=overlap_wanted,
                forward=wait_in_forward,
                frozen=self._frozen,
            )
            give_first(self._store, self._not_trained(buffers))

        if self._tables is not None:
            self._tables.begin(self)
        if share_weights:
            tensors = [tensor for param in self._params for tensor in param.tensors]
            for model in {id(model): model for model in models}.values():
                unshare_for_state_dict(model, tensors)

    def has_gradients(self) -> bool:
        """Whether a parameter has a gradient."""
        return any(tensor.grad is not None for param in self._params for tensor in param.tensors)

    @property
    def num_update(self) -> int:
        """How many updates have been made, ``begin_num_update`` included; after ``join``, by the worker with most."""
        return self._rates.num_update

    @property
    def store(self) -> KVStore | None:
        """The store that sums or updates; None if this process updates alone."""
        return self._store

    @property
    def update_on_kvstore(self) -> bool:
        """Whether the store updates; otherwise this process does."""
        return self._local is None

    @property
    def overlaps(self) -> bool:
        """Whether gradients are pushed during backward now; ``overlap="auto"`` begins after ten steps or never."""
        return self._sync is not None and self._sync.overlaps

    @property
    def learning_rate(self) -> float:
        """The current learning rate of the groups without a rate of their own."""
        return self._rates.learning_rate

    def set_learning_rate(self, lr: float) -> None:
        """Use ``lr`` from the next step on, wherever updates happen. Momentum and groups' own rates stay.

        Raises:
            UsageError: every group has its own rate, or an ``lr_scheduler`` sets the rate.
        """
        self._rates.set_learning_rate(lr)

    def __reduce__(self) -> Any:
        raise Unsupported(
            "a Trainer and its optimizer cannot be copied or pickled: they belong to this process and its store. Copy "
            "the model and save_states(path) or trainer.optimizer.state_dict(), or make another Trainer"
        )

    def save_states(self, path: str | os.PathLike[str]) -> None:
        """Write the optimizer's state, its hyper-parameters and ``num_update`` to ``path``.

        One worker's call suffices. Not between backward and step.
        """
        self._between_steps("save_states()")
        note = self._rates.save(trainer=self._token, unnamed=order_of(self._trained()))
        self._where.save_optimizer_states(path, note=note)

    def load_states(self, path: str | os.PathLike[str]) -> None:
        """Read what ``save_states`` wrote. Every worker calls this, not between backward and step.

        If the store updates, the state comes from rank 0's file. Each worker reads the hyper-parameters from its own
        ``path``, which may be the same file; a worker without a file must set them like the others.

        States belong to parameters by name. Parameters without names (``model.parameters()``) have positions: where
        several are of one shape, their values must be those of the moment of ``save_states``, which shows that their
        order is the same.

        Raises:
            UsageError: the file is damaged, or of another optimizer or other parameters; or the order of parameters
                without names is another one, or cannot be known.
        """
        self._between_steps("load_states()")
        is_here = self._local is not None or Path(path).exists()
        note = states_file.read_note(path) if is_here else None
        rates = None if note is None else self._rates.read(note, str(path))
        if is_here and (self._local is not None or self._store is None or self._store.rank == 0):
            known = self._trained(() if rates is None else rates.trained)
            self._compare(known, states_file.read_keys(path), {} if rates is None else rates.more, path)
        if rates is not None and self._sync is not None:
            self._sync.thaw(rates.trained)
            self._sync.make_tables(rates.tables)
        self._where.load_optimizer_states(path)
        if rates is not None:
            self._rates.take(rates)

    def _trained(self, more: Collection[int] = ()) -> list[Parameter]:
        """Return the parameters that are trained so far, and those at the positions ``more``."""
        out = self._frozen.difference(more)
        return [param for position, param in enumerate(self._params) if position not in out]

    def _compare(
        self, params: list[Parameter], keys: list[Key], note: Mapping[str, Any], path: str | os.PathLike[str]
    ) -> None:
        if not keys:
            return

        def alike(one: Key, other: Key) -> bool:
            pairs = (one, other), (table_key(one), table_key(other))
            return all(states_file.alike(path, *pair) for pair in pairs)

        if note.get("trainer") != self._token:  # of this trainer itself the order is known
            try:
                require_order(note.get("unnamed", ()), params, alike, path)
            except (LookupError, TypeError, ValueError) as exc:
                raise UsageError(f"{path} is damaged: what it says of parameters: {exc}") from None
        new = [param.key for param in params if not {param.key, table_key(param.key)} & set(keys)]
        if new:
            log.warning(
                "%s has no states of %s: what there is of them stays, nothing in a new Trainer", path, shorten(new)
            )

    def synchronize(self) -> None:
        """Return when the parameters have the values of the last step. Only needed with ``wait_in_forward``.

        Raises:
            KVStoreError: the push or pull of a parameter failed.
        """
        if self._sync is not None:
            self._sync.synchronize()

    def close(self) -> None:
        """Remove the hooks: backward pushes nothing more. ``step`` still works, and the store stays open."""
        if self._sync is not None:
            self._sync.close()

    def _thaw(self) -> None:
        """Train those parameters that were frozen, and require a gradient now."""
        new = [position for position in sorted(self._frozen) if self._params[position].trains]
        if not new:
            return
        if self._local is not None:
            self._local.require_shapes(new)
        if self._sync is None:
            self._frozen.difference_update(new)
        else:
            self._sync.thaw(new)

    def _not_trained(self, buffers: Sequence[Mapping[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
        """Return, for each device, the frozen parameters and these ``buffers``, by name."""
        found = [
            {f"{self._params[position].key}": self._params[position].tensors[device] for position in self._frozen}
            for device in range(len(self._params[0].tensors))
        ]
        return [
            mine | {f"buffer {name}": buffer for name, buffer in theirs.items()}
            for mine, theirs in zip_longest(found, buffers, fillvalue=dict[str, torch.Tensor]())
        ]

    def _between_steps(self, what: str) -> None:
        if self._sync is not None:
            self._sync.require_between_steps(what)
