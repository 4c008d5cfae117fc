"""``DiLoCoTrainer``: what ``fit`` trains with where workers synchronize weights by DiLoCo, not gradients."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kvstore import CheckpointError, KVStore, UsageError
from workers.averaging import DiLoCo
from workers.fitting.checkpoint import Checkpoint, reading
from workers.trainer import Trainer

_OWN = "diloco/"  # names of tensors in a worker's file begin with it


class DiLoCoTrainer:
    """A ``Trainer`` that updates alone, for the inner steps, and a ``DiLoCo`` over all workers.

    It has the methods of ``Trainer`` that a run of ``fit`` and its callbacks use.
    """

    update_on_kvstore = True  # and a worker that has run out of batches may join

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        optimizer_params: Mapping[str, Any] | None,
        store: KVStore | None,
        options: Mapping[str, Any],
        check_finite: bool,
    ) -> None:
        if store is None:
            raise UsageError("diloco needs a store for the global weights: leave kvstore=None out")
        self._inner = Trainer(
            model.named_parameters(), optimizer, optimizer_params, kvstore=None, check_finite=check_finite
        )
        # ``fit`` averages buffers itself.
        self._outer = DiLoCo(model, self._inner.optimizer, store, buffers=False, **options)
        self._outer.marks_steps = False  # ``fit`` counts a step after it, and says then that it is over
        if store.min_workers:
            self._inner.attach_rates(store, "rates of fit")
        self.store = store

    def come_back(self) -> bool:
        return self._outer.come_back()

    def zero_grad(self) -> None:
        self._inner.zero_grad()

    def step(self, samples: int) -> None:
        self._inner.step()
        self._outer.after_step(samples)

    def join(self, timeout: float | None = None) -> None:
        self._outer.finish(timeout)

    @property
    def num_update(self) -> int:
        return self._inner.num_update

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._inner.optimizer

    @property
    def learning_rate(self) -> float:
        return self._inner.learning_rate

    def set_learning_rate(self, lr: float) -> None:
        self._inner.set_learning_rate(lr)

    def save_states(self, path: Path) -> None:
        """Write the state of the outer optimizer; that of the inner one is each worker's own."""
        self._outer.save_states(path)

    def load_states(self, path: Path) -> None:
        self._outer.load_states(path)

    def save_weights(self, checkpoint: Checkpoint, model: nn.Module, about: Mapping[str, Any]) -> None:
        """Write the global weights, from which a run is resumed."""
        with self._outer.global_weights():
            checkpoint.save_weights(model, about)

    def save_own(self, checkpoint: Checkpoint, rank: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Write the inner optimizer's state; return what else this worker needs: tensors, and numbers by name."""
        path = checkpoint.inner(rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._inner.save_states(path)
        state = self._outer.state_dict()
        tensors = {_OWN + name: tensor for name, tensor in state.pop("weights").items()}
        return tensors, state

    def load_own(
        self, checkpoint: Checkpoint, rank: int, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]
    ) -> None:
        path = checkpoint.inner(rank)
        if not path.exists():
            raise CheckpointError(f"{path}: missing; without it the inner optimizer cannot continue")
        self._inner.load_states(path)
        weights = {name.removeprefix(_OWN): tensor for name, tensor in tensors.items() if name.startswith(_OWN)}
        with reading(checkpoint.worker(rank)):
            self._outer.load_state_dict({**state, "weights": weights})

    def close(self) -> None:
        self._outer.close()
        self._inner.close()
