"""Updates in the worker: every device's parameters in place, each device with an optimizer state of its own."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from kvstore import states
from kvstore.optim import describe, finite
from kvstore.updater import Updater, refusals
from kvstore.values import spec_of
from workers.parameters import Parameter


class LocalUpdates:
    """An optimizer for parameters that live here; devices with the same gradients stay the same.

    Args:
        params: what to update.
        optimizer: by name, class or unused instance.
        options: its hyper-parameters.
    """

    def __init__(self, params: Sequence[Parameter], optimizer: Any, options: Mapping[str, Any]) -> None:
        self._params = params
        described = describe(optimizer, options)
        with refusals(described):
            self._updaters = [Updater(described) for _ in params[0].tensors]

    @property
    def learning_rate(self) -> float:
        """The learning rate now."""
        return self._updaters[0].lr

    def set_learning_rate(self, lr: float) -> None:
        """Use ``lr`` from the next update on."""
        for updater in self._updaters:
            updater.lr = finite("learning_rate", lr)

    def update(self, rescale_grad: float) -> None:
        """Update with the parameters' gradients times ``rescale_grad``; the gradients stay as they are."""
        grads = [param.gradients() for param in self._params]
        for device, updater in enumerate(self._updaters):
            updater.rescale_grad = rescale_grad
            updater.update(
                [
                    (param.key, param.tensors[device].detach(), its[device].clone())
                    for param, its in zip(self._params, grads, strict=True)
                ]
            )

    def save_optimizer_states(self, path: str | os.PathLike[str]) -> None:
        """Write the first device's state to ``path``."""
        updater = self._updaters[0]
        states.write(path, updater.optimizer.name, updater.states(param.key for param in self._params))

    def load_optimizer_states(self, path: str | os.PathLike[str]) -> None:
        """Take the state from ``path``, on all devices."""
        found, loaded = states.read(path)
        states.require_optimizer(found, self._updaters[0].optimizer.name, path)
        states.require_keys(loaded, {param.key: spec_of(param.tensors[0]) for param in self._params}, path)
        for device, updater in enumerate(self._updaters):
            updater.load_states(loaded, {param.key: param.tensors[device].detach() for param in self._params})
