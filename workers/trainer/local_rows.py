"""Updates in the worker of parameters with sparse gradients: of those rows that have one."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from kvstore.optim.optimizer import Optimizer
from kvstore.optim.row_updater import RowHyperparameters, RowUpdater
from kvstore.optim.states import StateTensors
from workers.trainer.parameters import Key

STEP = "step"


@dataclass
class RowsOfParameter:
    """One parameter: what updates its rows, how often it has, and the states of all rows by name."""

    updater: RowUpdater
    count: int = 0
    states: dict[str, torch.Tensor] = field(default_factory=dict)


class LocalRows:
    """Updates rows of parameters, in place. States are of the whole parameter, by the names that torch has for them.

    Args:
        optimizer: the description of the optimizer.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._updated: dict[Key, RowsOfParameter] = {}

    def __contains__(self, key: Key) -> bool:
        """Whether rows of parameter ``key`` have been updated."""
        return key in self._updated

    def begin(self, key: Key, weight: torch.Tensor, states: StateTensors) -> None:
        """Begin to update rows of a parameter.

        Args:
            key: the parameter's.
            weight: of shape (rows, columns).
            states: those that the optimizer has of it already, if any.

        Raises:
            UsageError: the optimizer has no rule for rows.
        """
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
        """Return the states of all parameters whose rows have been updated."""
        tensors: StateTensors = {}
        for key, rows in self._updated.items():
            tensors |= {(key, name): state for name, state in rows.states.items()}
            tensors[key, STEP] = torch.tensor(float(rows.count), dtype=torch.float32, device="cpu")
        return tensors
