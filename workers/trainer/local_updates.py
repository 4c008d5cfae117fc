"""What a trainer does in this process: it updates weights that workers have, and hands over to workers that come back.

Updates are of whole parameters, and of rows where gradients are sparse.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kvstore import NotFinite, UsageError
from kvstore.optim import states_file
from kvstore.optim.hyperparameters import finite
from kvstore.optim.optimizer import Optimizer, require_shapes
from kvstore.optim.states import StateTensors
from kvstore.optim.updater import RowHyperparameters, RowUpdater, Updater, refusals
from kvstore.spec import shorten
from kvstore.values import all_finite, spec_of, summed_in
from workers.common.hand_over import take_values, values_state
from workers.common.sparse_gradients import table_key
from workers.common.tensors import has_parts
from workers.trainer.gradient_sync import GradientSync
from workers.trainer.parameters import Key, Parameter, not_trained, require_order
from workers.trainer.peers import Likeness
from workers.trainer.rates import TrainerRates

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
        return key in self._updated

    def begin(self, key: Key, weight: torch.Tensor, states: StateTensors) -> None:
        """Begin to update rows of a parameter; ``states`` are what the optimizer has of it already."""
        dtype = str(weight.dtype).removeprefix("torch.")
        updater = RowUpdater(self._optimizer, key, dtype, weight[0].numel(), grows=False)
        rows = RowsOfParameter(updater)
        for name, state in updater.states.items():
            columns = weight[0].numel() if state.columns is None else state.columns
            known, of_state = states.get((key, name)), getattr(torch, state.dtype)
            if known is not None:
                begun = known.detach().cpu().reshape(len(weight), columns).clone()
            elif state.initial is None:
                begun = weight.detach().to("cpu", of_state).reshape(len(weight), columns)
            else:
                begun = torch.full((len(weight), columns), state.initial, dtype=of_state, device="cpu")
            rows.states[name] = begun
        if (count := states.get((key, STEP))) is not None:
            rows.count = int(count)
        self._updated[key] = rows

    @torch.no_grad()
    def update(self, key: Key, weight: torch.Tensor, grad: torch.Tensor, hyper: RowHyperparameters) -> None:
        """Update the rows of ``weight`` that the sparse ``grad`` has; all rows, if the optimizer is not lazy."""
        rows = self._updated[key]
        rows.count += 1
        grad = grad.to(summed_in(grad.dtype))
        if rows.updater.lazy:
            summed = grad.coalesce()
            ids, grads = summed.indices()[0].cpu(), summed.values().cpu()
            # ``cpu`` of a CPU tensor is the tensor itself, and the rule writes into what it is given.
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
            # Copies: optimizers scale and decay a gradient in place, and programs read gradients after the step.
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

    def states(self) -> StateTensors:
        return self._updaters[0].states.of(param.key for param in self._params) | self._rows[0].of()

    def load(self, states: StateTensors) -> None:
        for device, updater in enumerate(self._updaters):
            updater.states.load(states, {param.key: param.tensors[device].detach() for param in self._params})
        self._rows = [LocalRows(updater.optimizer) for updater in self._updaters]  # they begin with what was loaded

    def save_optimizer_states(self, path: str | os.PathLike[str], *, note: str | None = None) -> None:
        states_file.write(path, self._updaters[0].optimizer.rule, self.states(), note=note)

    def load_optimizer_states(self, path: str | os.PathLike[str]) -> None:
        name, loaded = states_file.read(path)
        states_file.require_optimizer(name, self._updaters[0].optimizer.rule, path)
        states_file.require_keys(loaded, {param.key: spec_of(param.tensors[0]) for param in self._params}, path)
        self.load(loaded)


def require_states(
    params: Sequence[Parameter], keys: Collection[Key], order: Sequence[Any] | None, path: str | os.PathLike[str]
) -> None:
    """Raise ``UsageError`` unless the states of ``keys`` in the file ``path`` can be those of ``params``.

    ``order``: of the parameters that had no names when it was written; None if it is known to be the same.
    """
    if not keys:
        return

    def alike(one: Key, other: Key) -> bool:
        pairs = (one, other), (table_key(one), table_key(other))
        return all(states_file.alike(path, *pair) for pair in pairs)

    if order is not None:
        try:
            require_order(order, params, alike, path)
        except (LookupError, TypeError, ValueError) as exc:
            raise UsageError(f"{path} is damaged: what it says of parameters: {exc}") from None
    new = [param.key for param in params if not {param.key, table_key(param.key)} & set(keys)]
    if new:
        log.warning("%s has no states of %s: what there is of them stays, nothing in a new Trainer", path, shorten(new))


class TrainerWeights:
    """What a worker that comes back takes over; see ``HandOver``.

    Where servers update, they have the weights and states, and another worker gives what is not trained. Else it gives
    everything.

    Args:
        params, sync, local, rates, likeness: the trainer's; ``local`` is None where servers update.
        frozen: the positions of parameters that are not trained, now and later.
        buffers: those that the trainer knows, by name, for each device.
    """

    def __init__(
        self,
        params: Sequence[Parameter],
        frozen: Collection[int],
        buffers: Sequence[Mapping[str, torch.Tensor]],
        rates: TrainerRates,
        likeness: Likeness,
        sync: GradientSync,
        local: LocalUpdates | None,
    ) -> None:
        self._params, self._frozen, self._buffers = params, frozen, buffers
        self._rates, self._likeness, self._sync, self._local = rates, likeness, sync, local

    def state(self) -> dict[str, Any]:
        """Return what there is between two steps."""
        values = {"values": values_state(self._here()[0])}
        if self._local is None:
            return values
        return values | {
            "rates": self._rates.save(),
            "likeness": self._likeness.state(),
            "tables": self._sync.tables,
            "states": [[*which, state] for which, state in self._local.states().items()],
        }

    def take_over(self, state: Mapping[str, Any]) -> None:
        if self._local is None:
            self._sync.thaw(self._rates.trained)
            self._sync.pull()
            self._take(state["values"])
            self._likeness.say()
            return
        rates = self._rates.read(state["rates"], "what another worker has handed over")
        self._take(state["values"])
        self._sync.thaw(rates.trained)
        self._sync.make_tables(state["tables"])
        self._local.load({(key, name): value for key, name, value in state["states"]})
        self._rates.take(rates)
        self._likeness.take_over(state["likeness"])

    def buffers(self) -> list[torch.Tensor]:
        return [buffer for buffers in self._buffers for buffer in buffers.values()]

    def _take(self, values: Any) -> None:
        for mine in self._here():
            take_values(mine, values)

    def _here(self) -> list[dict[str, torch.Tensor]]:
        """Return, for each device, what only workers have, by name."""
        positions = self._frozen if self._local is None else range(len(self._params))
        return [
            {name: tensor for name, tensor in each.items() if has_parts(tensor)}
            for each in not_trained(self._params, positions, self._buffers)
        ]
