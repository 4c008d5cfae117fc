"""Trainer: steps of an optimizer over all workers and devices, after MXNet's ``gluon.Trainer``, for torch models."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

import kvstore as kv
from kvstore import KVStore, UsageError
from kvstore.config import Config
from workers.buckets import divide
from workers.overlap import Overlap
from workers.parameters import collect
from workers.updates import LocalUpdates


class Trainer:
    """Sums gradients over devices and workers, and updates the parameters with the result.

    On construction every worker and device gets rank 0's parameters. Where the store updates, it has the weights from
    then on, and a step overwrites what else is written into the parameters; load a checkpoint before.

    With a dist store, gradients are pushed while backward still runs (overlap), if the first ten steps have shown that
    they are final then: one backward a step, nobody changes its gradients (clipping), and ``step`` is given no batch
    size, which could vary. The weights are the same to the bit as without. A later step that differs raises
    ``UsageError``; it needs ``no_sync``, or ``overlap=False``. What had been pushed when a step raised stays pushed.

    Args:
        params: ``model.named_parameters()``, ``model.parameters()``, a dict from name to parameter, or a list with one
            of these for each device of this process.
        optimizer: an optimizer by name, class or unused instance; see ``KVStore.set_optimizer``.
        optimizer_params: its hyper-parameters, by torch's names or MXNet's.
        kvstore: a store, or the name of one; None to update alone.
        update_on_kvstore: update where the store is (on the servers, for a dist one) and pull weights, or pull summed
            gradients and update here. None decides as Gluon does: on the store, if ``MXNET_UPDATE_ON_KVSTORE`` is not 0
            and the store can; always for ``dist_async`` and ``dist_ssp``; here, if there is one device and no other
            worker.
        compression_params: how to compress what is sent; see ``KVStore.set_gradient_compression``.
        overlap: push during backward. None decides by the first steps, for dist stores and models of more than one
            bucket (``workers/buckets.py``); True does it from the second step on, whatever the first was like, also
            with ``step(batch_size)``, which must then always be given the same.
        share_gradients: keep the gradients of parameters on the CPU in memory from ``KVStore.empty``, whose push copies
            nothing. ``zero_grad`` then sets them to zero, where it otherwise drops them, so a parameter that the loss
            does not depend on has a gradient of zeros; a gradient that something else has replaced is copied as usual.
        share_weights: let the ``data`` of parameters on the CPU become the values that a dist store brings, where it
            updates: that saves copying them. It is then new memory after each step, to be read only: nobody may write
            into the parameters in place, nor keep views of them. See ``copy`` of ``KVStore.pull``.

    Raises:
        UsageError: no parameters; ``update_on_kvstore`` is False for an async store; or ``overlap`` is True for several
            devices, or without a store; or ``compression_params`` without a store.
        Unsupported: ``compression_params`` for a store in one process, which sends nothing.
        UnknownName: no such optimizer or hyper-parameter.
    """

    def __init__(
        self,
        params: Any,
        optimizer: Any = "sgd",
        optimizer_params: Mapping[str, Any] | None = None,
        kvstore: KVStore | str | None = "device",
        update_on_kvstore: bool | None = None,
        compression_params: Mapping[str, object] | None = None,
        overlap: bool | None = None,
        share_gradients: bool = False,
        share_weights: bool = False,
    ) -> None:
        self._params = collect(params)
        self._one_device = len(self._params[0].tensors) == 1
        self._keys = [param.key for param in self._params]
        self._weights = self._by_key([list(param.tensors) for param in self._params])
        self._share = {"copy": False} if share_weights else {}
        self._store, on_store = self._decide(kvstore, update_on_kvstore)
        if compression_params is not None:
            if self._store is None:
                raise UsageError("compression_params without a store, which is what compresses; leave them out")
            self._store.set_gradient_compression(compression_params)
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
        self._overlap = self._overlapping(overlap)
        self._grads: dict[torch.Tensor, torch.Tensor] = {}
        if share_gradients and self._store is not None:
            self._grads = {
                tensor: self._store.empty(tuple(tensor.shape), tensor.dtype).zero_()
                for param in self._params
                for tensor in param.tensors
                if tensor.is_cpu
            }
            self.zero_grad()

    def step(self, batch_size: int | None = None) -> None:
        """Make one step: sum the gradients of all devices and workers, and update all parameters.

        Args:
            batch_size: gradients are divided by it; as in Gluon it counts the samples of all workers and devices, and
                goes with a loss that is a sum. None, for a loss that is a mean, divides by the number of workers and
                devices, so that n workers with batches of b do as one with n·b.

        Raises:
            UsageError: a parameter has no gradient; or one that was pushed during backward was not final.
        """
        if self._local is None and self._store is not None:
            scale = self._scale(batch_size)
            if self._overlap is not None:
                self._overlap.finish(scale, lasting=batch_size is None)
            else:
                self._store.set_hyperparameters(rescale_grad=scale)
                self._store.pushpull(self._keys, self._gradients(), self._weights, **self._share)
        else:
            self.allreduce_grads()
            self.update(batch_size)

    def allreduce_grads(self) -> None:
        """Replace every gradient by the sum over devices and workers; for clipping and the like before ``update``.

        Raises:
            UsageError: updates happen on the store, in ``step``; otherwise as for ``step``.
        """
        if self._local is None:
            raise UsageError("allreduce_grads() is for update_on_kvstore=False; here step() does both")
        if self._overlap is not None:
            self._overlap.finish()
        elif self._store is not None:
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
        """Drop all gradients; set those that are in the store's memory to zero."""
        for param in self._params:
            for tensor in param.tensors:
                tensor.grad = self._grads.get(tensor)
                if tensor.grad is not None:
                    tensor.grad.zero_()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Push nothing during the backward passes in this block; ``step``, or the next backward after it, does.

        For gradients that are not final: of all but the last of several backward passes that add up, of one whose
        gradients will be clipped, of a batch whose size differs from the others'::

            with trainer.no_sync():
                loss_of(first_half).backward()
            loss_of(second_half).backward()
            trainer.step()
        """
        if self._overlap is None:
            yield
            return
        with self._overlap.paused():
            yield

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
        """Write the optimizer's state to ``path``; one worker's call suffices. Not between backward and step."""
        if self._overlap is not None:
            self._overlap.require_between_steps("save_states()")
        self._where.save_optimizer_states(path)

    def load_states(self, path: str | os.PathLike[str]) -> None:
        """Take the optimizer's state from ``path``; every worker may call it. Not between backward and step."""
        if self._overlap is not None:
            self._overlap.require_between_steps("load_states()")
        self._where.load_optimizer_states(path)

    def close(self) -> None:
        """Let go of the parameters: backward pushes nothing more. The store stays open; ``step`` still works."""
        if self._overlap is not None:
            self._overlap.close()

    def _gradients(self) -> list[Any]:
        return self._by_key([param.gradients() for param in self._params])

    def _by_key(self, tensors: list[list[torch.Tensor]]) -> list[Any]:
        """What a store takes for the keys; of one device, just the tensors, which it can check all at once."""
        return [its[0] for its in tensors] if self._one_device else tensors

    def _scale(self, batch_size: int | None) -> float:
        if batch_size is None:
            workers = 1 if self._store is None else self._store.num_workers
            return self._rescale / (workers * len(self._params[0].tensors))
        if batch_size > 0:
            return self._rescale / batch_size
        raise UsageError(f"batch_size={batch_size} must be positive")

    def _overlapping(self, wanted: bool | None) -> Overlap | None:
        """Return what pushes during backward, if anything is to."""
        if wanted and (self._store is None or not self._one_device):
            raise UsageError("overlap=True needs a store, and one device a process")
        firsts = [param.tensors[0] for param in self._params]
        buckets = divide([first.numel() * first.element_size() for first in firsts])
        if self._store is None or not self._one_device or len(buckets) == 1:
            return None
        fits = self._store.type.startswith("dist") and all(first.is_leaf for first in firsts)
        if not (fits if wanted is None else wanted):
            return None
        how = {"updates": self._local is None, "share": bool(self._share), "asked": bool(wanted)}
        return Overlap(self._params, buckets, self._store, **how)

    def _decide(self, store: KVStore | str | None, wanted: bool | None) -> tuple[KVStore | None, bool]:
        """Return the store to use, if any, and whether it updates: Gluon's table."""
        made = kv.create(store) if isinstance(store, str) else store
        if made is None and not self._one_device:
            raise UsageError("several devices need a store to sum their gradients; pass kvstore='device'")
        if made is None:
            return None, False
        is_async = any(word in made.type for word in ("async", "ssp"))
        if wanted is False and is_async:
            raise UsageError(f"a {made.type!r} store updates for every push; update_on_kvstore=False cannot be")
        if wanted is not None:
            return made, wanted
        if is_async:
            return made, True
        alone = self._one_device and made.num_workers == 1
        if alone and not made.type.startswith("dist"):
            return None, False
        return made, Config.from_env().update_on_kvstore and made.is_capable("optimizer")
