"""Trainer: steps of an optimizer over all workers and devices, after MXNet's ``gluon.Trainer``, for torch models."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

import kvstore as kv
from kvstore import KVStore, UsageError
from kvstore.config import Config
from workers.parameters import collect
from workers.updates import LocalUpdates


class Trainer:
    """Sums gradients over devices and workers, and updates the parameters with the result.

    On construction every worker and device gets rank 0's parameters. Where the store updates, it has the weights from
    then on, and a step overwrites what else is written into the parameters; load a checkpoint before.

    Args:
        params: ``model.named_parameters()``, ``model.parameters()``, a dict from name to parameter, or a list with one
            of these for each device of this process.
        optimizer: an optimizer by name, class or unused instance; see ``KVStore.set_optimizer``.
        optimizer_params: its hyper-parameters, by torch's names or MXNet's.
        kvstore: a store, or the name of one; None to update alone.
        update_on_kvstore: update where the store is (on the servers, for a dist one) and pull weights, or pull summed
            gradients and update here. None decides as Gluon does: on the store, if ``MXNET_UPDATE_ON_KVSTORE`` is not 0
            and the store can; always for ``dist_async``; here, if there is one device and no other worker.

    Raises:
        UsageError: no parameters; or ``update_on_kvstore`` is False for an async store.
        UnknownName: no such optimizer or hyper-parameter.
    """

    def __init__(
        self,
        params: Any,
        optimizer: Any = "sgd",
        optimizer_params: Mapping[str, Any] | None = None,
        kvstore: KVStore | str | None = "device",
        update_on_kvstore: bool | None = None,
    ) -> None:
        self._params = collect(params)
        self._keys = [param.key for param in self._params]
        self._weights = [list(param.tensors) for param in self._params]
        self._store, on_store = self._decide(kvstore, update_on_kvstore)
        options = dict(optimizer_params or {})
        self._local: LocalUpdates | None = None
        self._where: LocalUpdates | KVStore
        if self._store is None or not on_store:
            self._where = self._local = LocalUpdates(self._params, optimizer, options)
        else:
            self._where = self._store
            self._store.set_optimizer(optimizer, **options)
        self._rescale = float(options.get("rescale_grad", 1.0))
        if self._store is not None:
            self._store.broadcast(self._keys, self._weights, self._weights)

    def step(self, batch_size: int | None = None) -> None:
        """Make one step: sum the gradients of all devices and workers, and update all parameters.

        Args:
            batch_size: gradients are divided by it; as in Gluon it counts the samples of all workers and devices, and
                goes with a loss that is a sum. None, for a loss that is a mean, divides by the number of workers and
                devices, so that n workers with batches of b do as one with n·b.

        Raises:
            UsageError: a parameter has no gradient.
        """
        if self._local is None and self._store is not None:
            self._store.set_hyperparameters(rescale_grad=self._scale(batch_size))
            self._store.pushpull(self._keys, self._gradients(), self._weights)
        else:
            self.allreduce_grads()
            self.update(batch_size)

    def allreduce_grads(self) -> None:
        """Replace every gradient by the sum over devices and workers; for clipping and the like before ``update``.

        Raises:
            UsageError: updates happen on the store, which sees gradients only in ``step``.
        """
        if self._local is None:
            raise UsageError("allreduce_grads() is for update_on_kvstore=False; here step() does both")
        if self._store is not None:
            grads = self._gradients()
            self._store.pushpull(self._keys, grads, grads)

    def update(self, batch_size: int | None = None) -> None:
        """Update with the gradients that ``allreduce_grads`` has summed; see ``step`` for ``batch_size``.

        Raises:
            UsageError: updates happen on the store.
        """
        if self._local is None:
            raise UsageError("update() is for update_on_kvstore=False; here step() does both")
        self._local.update(self._scale(batch_size))

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for param in self._params:
            for tensor in param.tensors:
                tensor.grad = None

    @property
    def update_on_kvstore(self) -> bool:
        """Whether the store updates; else this process does."""
        return self._local is None

    @property
    def learning_rate(self) -> float:
        """The learning rate now."""
        return self._where.learning_rate

    def set_learning_rate(self, lr: float) -> None:
        """Use ``lr`` from the next step on, wherever the update happens; momentum stays."""
        self._where.set_learning_rate(lr)

    def save_states(self, path: str | os.PathLike[str]) -> None:
        """Write the optimizer's state to ``path``; one worker's call suffices."""
        self._where.save_optimizer_states(path)

    def load_states(self, path: str | os.PathLike[str]) -> None:
        """Take the optimizer's state from ``path``; every worker may call it."""
        self._where.load_optimizer_states(path)

    def _gradients(self) -> list[list[torch.Tensor]]:
        return [param.gradients() for param in self._params]

    def _scale(self, batch_size: int | None) -> float:
        if batch_size is None:
            workers = 1 if self._store is None else self._store.num_workers
            return self._rescale / (workers * len(self._params[0].tensors))
        if batch_size > 0:
            return self._rescale / batch_size
        raise UsageError(f"batch_size={batch_size} must be positive")

    def _decide(self, store: KVStore | str | None, wanted: bool | None) -> tuple[KVStore | None, bool]:
        """Return the store to use, if any, and whether it updates: Gluon's table."""
        made = kv.create(store) if isinstance(store, str) else store
        if made is None and len(self._params[0].tensors) > 1:
            raise UsageError("several devices need a store to sum their gradients; pass kvstore='device'")
        if made is None:
            return None, False
        is_async = "async" in made.type
        if wanted is False and is_async:
            raise UsageError(f"a {made.type!r} store updates for every push; update_on_kvstore=False cannot be")
        if wanted is not None:
            return made, wanted
        if is_async:
            return made, True
        alone = len(self._params[0].tensors) == 1 and made.num_workers == 1
        if alone and not made.type.startswith("dist"):
            return None, False
        return made, Config.from_env().update_on_kvstore and made.is_capable("optimizer")
