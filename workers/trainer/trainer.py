"""Trainer: steps of an optimizer over all workers and devices, after MXNet's ``gluon.Trainer``, for torch models."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kvstore import KVStore, Unsupported, UsageError
from kvstore.optim import states_file
from kvstore.optim.optimizer import describe
from workers.trainer.arrays import Arrays
from workers.trainer.clipping import Summed, clip
from workers.trainer.decision import decide, opened, overlapping, require_free, take
from workers.trainer.optimizer import TrainerOptimizer
from workers.trainer.parameters import collect, grouped, stale
from workers.trainer.peers import Peers
from workers.trainer.rates import Rates, param_groups, settings
from workers.trainer.updates import LocalUpdates


class Trainer:
    """Sums gradients over devices and workers, and updates the parameters with the result.

    On construction every worker and device gets rank 0's parameters. Where the store updates, it has the weights from
    then on, and a step overwrites what else is written into the parameters; load a checkpoint before.

    With a dist store, gradients are pushed while backward still runs (overlap), if the first ten steps have shown that
    they are final then: one backward a step, nobody changes its gradients (clipping), and ``step`` is given no batch
    size, which could vary. The weights are the same to the bit as without. A later step that differs raises
    ``UsageError``; it needs ``no_sync``, or ``overlap=False``. What had been pushed when a step raised stays pushed.

    Args:
        params: ``model.named_parameters()``, ``model.parameters()``, a dict from name to parameter, or torch's list of
            groups, ``[{"params": ..., "lr": 0.01}, ...]``, whose dicts may have ``lr_mult`` and ``wd_mult``; or a list
            with one of these for each device of this process. What requires no gradient is left out; tied weights are
            one parameter, under the first of their names.
        optimizer: an optimizer by name, class or unused instance; see ``KVStore.set_optimizer``.
        optimizer_params: its hyper-parameters, by torch's names or MXNet's; ``lr_mult`` and ``wd_mult`` by name of the
            parameter; ``lr_scheduler``, a function of the number of the update (``workers.schedules``), and
            ``begin_num_update``, updates made before.
        kvstore: a store, or the name of one; None to update alone.
        update_on_kvstore: update where the store is (on the servers, for a dist one) and pull weights, or pull summed
            gradients and update here. None decides as Gluon does: on the store, if ``MXNET_UPDATE_ON_KVSTORE`` is not 0
            and the store can; always for ``dist_async`` and ``dist_ssp``; here, if there is one device and no other
            worker.
        compression_params: how to compress what is sent; see ``KVStore.set_gradient_compression``.
        overlap: push during backward. None decides by the first steps, for dist stores and models of more than one
            bucket (``workers/common/buckets.py``); True does it from the second step on, whatever the first was like,
            also with ``step(batch_size)``, which must then always be given the same.
        share_gradients: keep the gradients of parameters on the CPU in memory from ``KVStore.empty``, whose push copies
            nothing. ``zero_grad`` then sets them to zero, where it otherwise drops them, so a parameter that the loss
            does not depend on has a gradient of zeros; a gradient that something else has replaced is copied as usual.
        share_weights: let the ``data`` of parameters on the CPU become the values that a dist store brings, where it
            updates: that saves copying them. It is then new memory after each step, to be read only: nobody may write
            into the parameters in place, nor keep views of them. See ``copy`` of ``KVStore.pull``.
        wait_in_forward: the model that the parameters are of, for a dist store that updates: ``step`` does not wait for
            their new values then; each module does, before its next forward pass, and the first modules' come first.
            Everything is as without, to the bit, as long as parameters are read where their module is called; what
            else reads or copies them after ``step`` calls ``synchronize`` first, but for ``state_dict``, which does.
        check_finite: raise ``NotFinite``, which names worker, parameter and push, where a gradient is NaN or infinite;
            nothing is updated then. A store that is passed has its own setting.

    Raises:
        UsageError: no parameters; ``update_on_kvstore`` is False for an async store; or ``overlap`` is True for several
            devices, or without a store; or ``compression_params`` without a store; or ``wait_in_forward`` where the
            store does not update, or with ``overlap=False`` or ``share_gradients``; or the store updates for another
            Trainer, or has values under these names.
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
        wait_in_forward: nn.Module | None = None,
        check_finite: bool = False,
    ) -> None:
        store = opened(kvstore, check_finite)
        if store is not None and check_finite and not store.check_finite:
            raise UsageError(
                f"check_finite=True, but this {store.type!r} store does not check; make it with "
                "kvstore.create(..., check_finite=True)"
            )
        check_finite = check_finite or (store is not None and store.check_finite)
        collected = collect(params)
        if isinstance(optimizer, torch.optim.Optimizer) and len(optimizer.param_groups) > 1:
            collected = grouped(collected, optimizer)
        self._params = collected.params
        self._share = {"copy": False} if share_weights else {}
        self._store, on_store = decide(store, update_on_kvstore, one_device=len(self._params[0].tensors) == 1)
        if compression_params is not None:
            if self._store is None:
                raise UsageError("compression_params without a store, which is what compresses; leave them out")
            self._store.set_gradient_compression(compression_params)
        options, schedule, begun = settings(collected, optimizer_params or {})
        described = describe(optimizer, options)
        self._local: LocalUpdates | None = None
        self._where: LocalUpdates | KVStore
        if self._store is None or not on_store:
            self._where = self._local = LocalUpdates(self._params, described, check_finite and self._store is None)
        else:
            self._where = self._store
            require_free(self._store)
            self._store.set_optimizer(optimizer, **options)
        self._rates = Rates(param_groups(described, self._params), described, self._where, schedule, begun)
        self._optimizer: TrainerOptimizer | None = None
        self._peers, self._summed = Peers(self._store), Summed()
        self._arrays = Arrays(self._params, self._store if share_gradients else None)
        if self._store is not None:
            take(self._store, self._arrays.keys(), self._arrays.weights(), updates=on_store)
        self._overlap = overlapping(
            self._params,
            self._store,
            self._rates if on_store else None,
            wanted=overlap,
            share_weights=share_weights,
            share_gradients=share_gradients,
            forward=wait_in_forward,
        )
        if share_gradients and self._store is not None:
            self.zero_grad()

    def step(self, batch_size: int | None = None, ignore_stale_grad: bool = False) -> None:
        """Make one step: sum the gradients of all devices and workers, and update all parameters.

        Args:
            batch_size: gradients are divided by it; as in Gluon it counts the samples of all workers and devices, and
                goes with a loss that is a sum. None, for a loss that is a mean, divides by the number of workers and
                devices, so that n workers with batches of b do as one with n·b.
            ignore_stale_grad: on all workers alike: leave out parameters that have no gradient on any worker; where
                some have one, the others count as zeros. Workers ask each other for that, at every such step.

        Raises:
            UsageError: a parameter has no gradient; or one that was pushed during backward was not final.
        """
        if self._local is not None or self._store is None:
            self.allreduce_grads(ignore_stale_grad)
            self.update(batch_size, ignore_stale_grad)
            return
        scale, left_out = self._scale(batch_size), self._left_out(ignore_stale_grad)
        if self._overlap is not None:
            self._overlap.finish(scale, lasting=batch_size is None, left_out=left_out)
        else:
            grads = self._arrays.gradients(left_out)
            self._rates.apply()
            self._store.set_hyperparameters(rescale_grad=scale)
            if grads:
                keys, weights = self._arrays.keys(left_out), self._arrays.weights(left_out)
                self._store.pushpull(keys, grads, weights, **self._share)
        if left_out and self._peers.alone:  # others may have changed them
            keys, weights = self._arrays.keys(), self._arrays.weights()
            self._store.pull([keys[i] for i in left_out], [weights[i] for i in left_out])
        self._updated()

    def allreduce_grads(self, ignore_stale_grad: bool = False) -> None:
        """Replace every gradient by the sum over devices and workers; for clipping and the like before ``update``.

        Raises:
            UsageError: updates happen on the store, in ``step``; otherwise as for ``step``.
        """
        if self._local is None:
            raise UsageError(
                "allreduce_grads() is for update_on_kvstore=False; here step() does both, and clip_grad_norm_() clips"
            )
        left_out = self._left_out(ignore_stale_grad)
        if self._overlap is not None:
            self._overlap.finish(left_out=left_out)
        elif self._store is not None:
            grads = self._arrays.gradients(left_out)
            if grads:
                self._store.pushpull(self._arrays.keys(left_out), grads, grads)
        self._summed.note(self._params)

    def update(self, batch_size: int | None = None, ignore_stale_grad: bool = False) -> None:
        """Update with the gradients that ``allreduce_grads`` has summed; see ``step`` for the arguments.

        Raises:
            UsageError: updates happen on the store; or a parameter has no gradient.
        """
        if self._local is None:
            raise UsageError("update() is for update_on_kvstore=False; here step() does both")
        scale = self._scale(batch_size)
        self._rates.apply()
        self._local.update(scale, stale(self._params) if ignore_stale_grad else ())
        self._summed.clear()
        self._updated()

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, batch_size: int | None = None
    ) -> torch.Tensor:
        """Scale the gradients so that the one that ``step`` updates with has at most the norm ``max_norm``.

        That is the gradient of all workers together, as if one had computed it: ``torch.nn.utils.clip_grad_norm_`` on
        the joined batch gives the same. Every worker calls it, after its last backward, which runs under ``no_sync`` if
        gradients are pushed during it. The workers' gradients are summed for it once more than for the step alone;
        with ``update_on_kvstore=False`` it costs nothing after ``allreduce_grads``. Where every push is an update
        (``dist_async``, ``dist_ssp``) the norm is that of this worker's own gradient.

        Args:
            max_norm, norm_type: as torch has them.
            batch_size: what ``step`` will be given.

        Returns:
            The norm before, a tensor of no dimension.

        Raises:
            UsageError: some gradients have been pushed already, or were changed after ``allreduce_grads``.
        """
        self._between_steps("clip_grad_norm_()")
        return clip(self._params, self._peers, self._summed, self._scale(batch_size), max_norm, norm_type)

    def overflows(self, here: bool) -> bool:
        """Return whether any worker says ``here``; each says whether its gradients have overflowed.

        ``GradScaler.step(trainer.optimizer)`` asks this, so that all workers skip a step or none; each keeps a scale of
        its own. Where every push is an update, a worker skips alone.
        """
        self._between_steps("GradScaler.step()")
        return self._peers.count("overflow", [here])[0] > 0

    def zero_grad(self) -> None:
        """Drop all gradients; set those that are in the store's memory to zero."""
        self._arrays.zero_grad()

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

    def join(self, timeout: float | None = None) -> int:
        """Say that this worker has run out of batches; return when all have, with the weights that the last has left.

            for epoch in range(epochs):
                for inputs, labels in my_batches:  # as many as this worker has
                    ...
                    trainer.step()
                trainer.join()

        The others go on without it: its gradients count as zeros, and sums are divided as before, so every sample
        weighs the same. See ``KVStore.join``. Afterwards all workers have made as many updates as the one that has made
        most, so an ``lr_scheduler`` gives all the same rate; one of torch's that steps by batch is stepped by the
        program, as often as ``num_update`` has grown. What else workers ask each other for (``ignore_stale_grad``,
        ``clip_grad_norm_``, ``GradScaler``) goes on without it too, if it has taken part in it before; otherwise it is
        an error on the others.

        Args:
            timeout: in seconds; by default the store's deadline, which others' remaining batches may need longer than.

        Returns:
            The rank that joined last; 0 without a store.

        Raises:
            Unsupported: updates are made here, not on the store, and there are other workers.
            UsageError: some of a step's gradients have been pushed, and others not.
            DeadlineExceeded: others have more to do; the message names them. Another call waits on.
            NodeLost: a worker has died, or left without joining.
        """
        if self._store is None:
            return 0
        if self._local is not None and self._store.num_workers > 1:
            raise Unsupported("join() needs update_on_kvstore=True: updates here would miss the others' last batches")
        self._between_steps("join()")
        self._peers.announce_join()
        last = self._store.join(timeout)
        self._peers.join(timeout)
        self._rates.num_update = self._peers.most(self._rates.num_update)
        if self._local is None:
            self._store.pull(self._arrays.keys(), self._arrays.weights(), **self._share)
        return last

    @property
    def num_update(self) -> int:
        """How many updates have been made, ``begin_num_update`` included; after ``join``, by whoever has made most."""
        return self._rates.num_update

    @property
    def update_on_kvstore(self) -> bool:
        """Whether the store updates; else this process does."""
        return self._local is None

    @property
    def optimizer(self) -> TrainerOptimizer:
        """What torch's schedulers and GradScaler take: what they write into its ``param_groups`` is used at once."""
        if self._optimizer is None:
            self._optimizer = TrainerOptimizer(self, self._rates.groups)
        return self._optimizer

    @property
    def learning_rate(self) -> float:
        """The learning rate now, of the parameters whose group has none of its own."""
        return self._rates.learning_rate

    def set_learning_rate(self, lr: float) -> None:
        """Use ``lr`` from the next step on, wherever the update happens; momentum stays, and groups' own rates.

        Raises:
            UsageError: every group has its own, or an ``lr_scheduler`` decides.
        """
        self._rates.set_learning_rate(lr)

    def save_states(self, path: str | os.PathLike[str]) -> None:
        """Write the optimizer's state to ``path``; one worker's call suffices. Not between backward and step.

        Learning rates and other hyper-parameters are in it, and how many updates have been made.
        """
        self._between_steps("save_states()")
        self._where.save_optimizer_states(path, note=self._rates.save())

    def load_states(self, path: str | os.PathLike[str]) -> None:
        """Take the optimizer's state from ``path``. Not between backward and step.

        Every worker calls it. Where the store updates, rank 0's file has the state; all take the hyper-parameters from
        theirs, which may be the same, and one without a file must set them as the others have them.
        """
        self._between_steps("load_states()")
        note = states_file.read_note(path) if self._local is not None or Path(path).exists() else None
        rates = None if note is None else self._rates.read(note, str(path))
        self._where.load_optimizer_states(path)
        if rates is not None:
            self._rates.take(rates)

    def synchronize(self) -> None:
        """Return when the parameters have the values of the last step; only with ``wait_in_forward`` may they not yet.

        Raises:
            KVStoreError: what has gone wrong with them.
        """
        if self._overlap is not None:
            self._overlap.synchronize()

    def close(self) -> None:
        """Let go of the parameters: backward pushes nothing more. The store stays open; ``step`` still works."""
        if self._overlap is not None:
            self._overlap.close()
        self._peers.close()

    def _between_steps(self, what: str) -> None:
        if self._overlap is not None:
            self._overlap.require_between_steps(what)
            self._overlap.synchronize()

    def _updated(self) -> None:
        self._rates.num_update += 1
        if self._optimizer is not None:
            self._optimizer._opt_called = True

    def _left_out(self, ignore_stale_grad: bool) -> list[int]:
        return self._peers.left_out(self._params) if ignore_stale_grad else []

    def _scale(self, batch_size: int | None) -> float:
        workers = 1 if self._store is None else self._store.num_workers
        return self._rates.rescale(batch_size, workers * len(self._params[0].tensors))
