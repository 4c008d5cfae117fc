"""Trainer: steps of an optimizer over all workers and devices, after MXNet's ``gluon.Trainer``, for torch models."""

from __future__ import annotations

import os
import secrets
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kvstore import KVStore, Unsupported, UsageError
from kvstore.errors import warn_renamed
from kvstore.optim import states_file
from kvstore.optim.optimizer import describe
from workers.common.checks import at_least, on_off_auto
from workers.common.hand_over import HandOver
from workers.common.row_steps import row_steps
from workers.common.stores import join_refusal, open_store
from workers.common.torch_internals import note_step
from workers.trainer.arrivals import require_waiting, unshare_for_state_dict
from workers.trainer.gradient_sync import GradientSync, decide, give_first, require_free
from workers.trainer.local_updates import LocalUpdates, TrainerWeights, require_states
from workers.trainer.parameters import (
    Parameter,
    buffers_beside,
    clear,
    collect,
    grouped,
    modules_beside,
    not_trained,
    order_of,
    stale,
)
from workers.trainer.peers import Likeness, Peers, SummedGradients, clip
from workers.trainer.rates import TrainerOptimizer, TrainerRates, param_groups, rates_given, settings


class Trainer:
    """Sums gradients over devices and workers, and updates the parameters with the result.

    On construction every worker and device gets rank 0's parameters, frozen ones too, and rank 0's buffers. A trainer
    knows the buffers of a module whose ``named_parameters()`` or ``parameters()`` it is given as they are, not in a
    list or dict, and the buffers of ``wait_in_forward``; ``Reducer.broadcast`` sends others. Buffers are not trained:
    each worker has its own running statistics, until ``Reducer.average_buffers``.

    A store that updates holds the weights from then on. So load a checkpoint before.

    With a dist store, gradients are pushed while backward still runs (overlap). That begins after ten steps, and only
    if these have shown that gradients are final then: one backward a step, nobody changes its gradients (clipping), and
    ``step`` is given no batch size, which could vary. Either outcome is logged once, at INFO, and ``overlaps`` tells
    it. The weights are the same to the bit as without. A later step that differs raises ``UsageError``; it needs
    ``no_sync``, or ``overlap=False``. So does one after which a gradient is not what was pushed, whatever wrote to it:
    ``.grad.data``, numpy, a hook that was registered later. What had been pushed when a step raised stays pushed.

    Of a parameter with a sparse gradient, as ``nn.Embedding(sparse=True)`` has, only the rows that some worker has
    touched are sent and updated. That needs rounds of all workers, and an optimizer with a rule for rows: ``sgd``,
    ``adam``, ``adagrad`` and others. What is said of the parameter holds for its rows.

    A learning rate may be a tensor, as torch's own optimizers take it: what it holds at a step is used, and schedulers
    fill it.

    Args:
        params: ``model.named_parameters()``, ``model.parameters()``, a dict from name to parameter, or torch's list of
            groups, ``[{"params": ..., "lr": 0.01}, ...]``, whose dicts may have ``lr_mult`` and ``wd_mult``, which may
            change between steps in ``optimizer.param_groups``; or a list with one of these for each device of this
            process. Parameters that require no gradient are trained from the
            step on at which they do, on all workers. Tied weights are one parameter, under the first of their names.
        optimizer: an optimizer by name, class or unused instance; see ``KVStore.set_optimizer``.
        optimizer_params: hyper-parameters by torch's names or MXNet's; ``lr_mult`` and ``wd_mult``, dicts by the name
            of a parameter; ``lr_scheduler``, a function of the number of the update (``workers.schedules``); and
            ``begin_num_update``, the number of updates made before.
        kvstore: a store, or the type of one to make. ``auto``: ``dist_sync`` in a job, ``device`` outside of one.
            None: update alone.
        update_on_kvstore: True: update where the store is (on the servers, for a dist store) and pull weights. False:
            pull summed gradients, in their own dtype, and update here. ``auto``, or Gluon's None, decides as Gluon
            does: on the store, if ``MXNET_UPDATE_ON_KVSTORE`` is not 0 and the store can; always for ``dist_async`` and
            ``dist_ssp``; here, if there is one device and no other worker.
        compression_params: how to compress what is sent; see ``KVStore.set_gradient_compression``.
        overlap: push during backward. ``auto`` decides by the first ten steps, for dist stores and models of more than
            one bucket of 8 MiB. True does it from the second step on, whatever the first was
            like, also with ``step(batch_size)``, which must then always be given the same. False never does.
        share_gradients: keep the gradients of CPU parameters in memory from ``KVStore.empty``, so that a push copies
            nothing. ``zero_grad`` then sets gradients to zero instead of dropping them, so a parameter that the loss
            does not depend on has a gradient of zeros. A gradient that something else has replaced is copied as usual.
        share_weights: replace the ``data`` of CPU parameters by the values that a dist store brings, instead of copying
            them; only where the store updates. The ``data`` is then new memory after each step, for reading only: do
            not write into the parameters in place, and keep no views of them. See ``copy`` of ``KVStore.pull``.
        wait_in_forward: the model that the parameters belong to; for a dist store that updates. ``step`` then does not
            wait for new values. Each module waits before its next forward pass, and the first modules' values come
            first. The results are the same to the bit, as long as parameters are read only where their module is
            called. Other code that reads or copies them after ``step`` calls ``synchronize`` first; ``state_dict`` does
            that itself.
        check_finite: raise ``NotFinite``, which names worker, parameter and push, if a gradient has NaN or infinite
            elements. Nothing is updated then. A store that is passed has its own setting.
        publish_every: publish a version of the parameters after so many steps; see ``KVStore.publish``. It needs a dist
            store that updates. The label is ``step`` and the number of the update. 0 publishes nothing.

    Raises:
        UsageError: there are no parameters; ``update_on_kvstore`` is False for an async store; ``overlap`` is True
            without a store or for several devices; ``compression_params`` is given without a store; ``wait_in_forward``
            is given for a store that does not update, with ``overlap=False`` or with ``share_gradients``;
            ``publish_every`` without a dist store that updates; the store updates for another Trainer, or has values
            under these names.
        Unsupported: ``compression_params`` has ``pull`` for a store in one process, which sends nothing back.
        UnknownName: no such optimizer or hyper-parameter.
    """

    def __init__(
        self,
        params: Any,
        optimizer: Any = "sgd",
        optimizer_params: Mapping[str, Any] | None = None,
        kvstore: KVStore | str | None = "auto",
        update_on_kvstore: bool | str | None = "auto",
        compression_params: Mapping[str, object] | None = None,
        overlap: bool | str | None = "auto",
        share_gradients: bool = False,
        share_weights: bool = False,
        wait_in_forward: nn.Module | None = None,
        check_finite: bool = False,
        publish_every: int = 0,
    ) -> None:
        if overlap is None:
            warn_renamed("overlap=None", 'overlap="auto"')
        store = None if kvstore is None else open_store(kvstore, "Trainer", check_finite=check_finite)
        self._tables = None if store is None else row_steps(store)  # of modules whose tables this store has
        if store is not None and check_finite and not store.check_finite:
            raise UsageError(
                f"check_finite=True, but this {store.type!r} store does not check; make it with "
                "kvstore.create(..., check_finite=True)"
            )
        check_finite = check_finite or (store is not None and store.check_finite)
        at_least("publish_every", publish_every, 0)
        self._publish_every = publish_every
        self.marks_steps = True  # whether the program's step ends after ``step``; see ``KVStore.end_step``
        # Before ``collect``, which reads the iterators: afterwards they do not know their module any more.
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
        if publish_every and (self._store is None or not on_store or type(self._store).publish is KVStore.publish):
            raise UsageError(
                f"publish_every={publish_every} needs a dist store that updates (update_on_kvstore=True). What is "
                "updated elsewhere is published by publish_state() of a store of its own"
            )
        if self._store is not None:
            require_free(self._store, updates=on_store)
        if self._store is None or not on_store:
            check_finite = check_finite and self._store is None
            self._where = self._local = LocalUpdates(self._params, described, check_finite, self._frozen)
        else:
            self._where = self._store
            self._store.set_optimizer(optimizer, **options)
        # A schedule of MXNet's writes its own numbers, so no tensor of anybody's is kept beside it.
        rates = rates_given(optimizer, options) if schedule is None else ()
        self._rates = TrainerRates(
            param_groups(described, self._params, rates, options.get("groups", ())),
            described,
            self._where.set_hyperparameters,
            schedule,
            begun,
            [param.key for param in self._params],
            self._frozen,
        )
        overlap_wanted = on_off_auto("overlap", overlap)
        self._handed: HandOver | None = None
        self._sync: GradientSync | None = None
        if self._store is None:
            if overlap_wanted:
                raise UsageError("overlap=True needs a store, and one device per process")
            if wait_in_forward is not None:
                require_waiting(wait_in_forward, list(wait_in_forward.parameters()), updates_there=False)
        else:
            self._handed = HandOver(self._store, "Trainer")
            self._sync = GradientSync(
                self._params,
                self._store,
                self._rates if on_store else None,
                share_weights=share_weights,
                share_gradients=share_gradients,
                overlap=overlap_wanted,
                forward=wait_in_forward,
                frozen=self._frozen,
                handed=self._handed,
            )
            others = not_trained(self._params, self._frozen, buffers)
            give_first(self._store, others, wanted=not self._handed.waits)

        if self._tables is not None:
            self._tables.begin(self.has_gradients)
        if share_weights:
            tensors = [tensor for param in self._params for tensor in param.tensors]
            for model in {id(model): model for model in models}.values():
                unshare_for_state_dict(model, tensors)
        self._optimizer: TrainerOptimizer | None = None
        self._peers, self._summed = Peers(self._store), SummedGradients()
        self._likeness = Likeness(self._store, self._params, self._frozen)
        # After the store's own join a worker keeps weights from before the others' last rounds.
        self.joining = None if self._store is None else self._store.reserve_join(_join_advice(self._local is None))
        if self._handed is not None and self._sync is not None:
            # Kept: ``HandOver`` holds its methods weakly.
            self._weights = mine = TrainerWeights(
                self._params, self._frozen, buffers, self._rates, self._likeness, self._sync, self._local
            )
            tensors = [tensor for param in self._params for tensor in param.tensors]
            self._handed.attach(f"{self._params[0].key}", mine.state, mine.take_over, tensors, mine.buffers)

    def step(self, batch_size: int | None = None, ignore_stale_grad: bool = False) -> None:
        """Make one step: sum the gradients of all devices and workers, and update all parameters.

        Args:
            batch_size: the divisor of the gradients, of ``workers.Embedding`` in the same store, too. As in Gluon it
                counts the samples of all workers and devices, and belongs to a loss that is a sum. None, for a loss
                that is a mean, divides by the number of workers and devices, so that n workers with batches of b do the
                same as one with n·b.
            ignore_stale_grad: leave out parameters that have no gradient on any worker; the same on all workers. Where
                some workers have a gradient, the others count as zeros. Workers ask each other at every such step.

        Raises:
            UsageError: a parameter has no gradient, or a gradient has changed after its push during backward.
        """
        with nullcontext() if self._store is None else self._store.traced("step"):
            self._step(batch_size, ignore_stale_grad)

    def come_back(self) -> bool:
        """Let this worker into a job that has gone on without it, if it was started again; return whether it was.

        ``fit`` calls it before the first batch; the first forward pass in training, and ``step``, call it, too. See
        ``KVStore.boundary``. This worker takes over another one's hyper-parameters, frozen weights and the buffers that
        the trainer knows; also the weights and states, where workers update. The other worker is at the beginning of a
        ``step``.

        Raises:
            UsageError: the others train other parameters.
            KVStoreError: as for ``KVStore.boundary``.
        """
        return self._handed is not None and self._handed.come_back()

    def attach_rates(self, store: KVStore, name: str) -> None:
        """Let workers that come back through ``store`` take over the learning rate and its schedule.

        Args:
            store: lets workers in; it need not be the trainer's.
            name: see ``KVStore.attach``.
        """
        store.attach(name, self._rates, shared=True)

    def _step(self, batch_size: int | None, ignore_stale_grad: bool) -> None:
        self._begin_step()
        if self._frozen:
            self._thaw()
        if self._local is not None or self._sync is None:
            self.allreduce_grads(ignore_stale_grad)
            self.update(batch_size, ignore_stale_grad)
            return
        scale, left_out = self._scale(batch_size), self._left_out(ignore_stale_grad)
        self._sync.step(scale, lasting=batch_size is None, left_out=left_out)
        # In a round a parameter is left out on all workers or on none.
        if left_out and self._peers.alone:  # other workers' updates may have changed them
            self._sync.pull(left_out)
        self._updated()
        self._likeness.say(self._rates.num_update)

    def allreduce_grads(self, ignore_stale_grad: bool = False) -> None:
        """Replace every gradient by its sum over devices and workers, for example to clip it before ``update``.

        Args:
            ignore_stale_grad: as for ``step``.

        Raises:
            UsageError: updates happen on the store, in ``step``; see also ``step``.
        """
        if self._local is None:
            raise UsageError(
                "allreduce_grads() is for update_on_kvstore=False; this store updates in step(), and "
                "clip_grad_norm_() clips"
            )
        self._begin_step()
        if self._frozen:
            self._thaw()
        left_out = self._left_out(ignore_stale_grad)
        if self._sync is not None:
            self._sync.sum(left_out)
        self._summed.note(self._params)

    def update(self, batch_size: int | None = None, ignore_stale_grad: bool = False) -> None:
        """Update with the gradients that ``allreduce_grads`` has summed.

        Args:
            batch_size: as for ``step``.
            ignore_stale_grad: as for ``step``.

        Raises:
            UsageError: updates happen on the store; or a parameter has no gradient.
        """
        if self._local is None:
            raise UsageError("update() is for update_on_kvstore=False; this store updates in step()")
        scale = self._scale(batch_size)
        rates = self._rates.apply()
        if self._tables is not None:
            self._tables.scale = 1.0 / (self._parts if batch_size is None else batch_size)
            self._tables.pushes.step_over()
        self._local.update(scale, stale(self._params) if ignore_stale_grad else ())
        self._summed.clear()
        self._updated()
        self._likeness.say(self._rates.num_update, rates)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, batch_size: int | None = None
    ) -> torch.Tensor:
        """Scale the gradients so that the gradient that ``step`` updates with has at most the norm ``max_norm``.

        That is the gradient of all workers together: ``torch.nn.utils.clip_grad_norm_`` on the joined batch gives the
        same. Every worker calls this after its last backward. That backward runs under ``no_sync`` if gradients are
        pushed during backward. The gradients are summed once more than for the step alone; with
        ``update_on_kvstore=False``, after ``allreduce_grads``, it costs nothing. Where every push is an update
        (``dist_async``, ``dist_ssp``), the norm is that of this worker's own gradient.

        Args:
            max_norm: the largest norm that the gradient may have.
            norm_type: the order of the norm, as for ``torch.nn.utils.clip_grad_norm_``; 2 is the Euclidean one.
            batch_size: the one that ``step`` will be given.

        Returns:
            The norm before, a tensor without dimensions.

        Raises:
            UsageError: some gradients have already been pushed, or have changed after ``allreduce_grads``.
            Unsupported: a gradient is sparse.
        """
        self._between_steps("clip_grad_norm_()")
        self._begin_step()
        if self._frozen:
            self._thaw()
        return clip(self._trained(), self._peers, self._summed, self._scale(batch_size), max_norm, norm_type)

    def overflows(self, overflowed: bool) -> bool:
        """Return whether the gradients of any worker have overflowed. All workers call this.

        ``GradScaler.step(trainer.optimizer)`` calls it, so that all workers skip a step or none does. Each worker keeps
        its own scale. Where every push is an update, a worker skips alone.

        Args:
            overflowed: whether this worker's gradients have overflowed.
        """
        self._between_steps("GradScaler.step()")
        self._begin_step()
        return self._peers.count("overflow", [overflowed])[0] > 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients; set gradients in the store's memory to zero.

        Args:
            set_to_none: False sets all to zero, as in torch. Then momentum and decay also update a parameter that the
                loss does not depend on, or that has been frozen.
        """
        if self._tables is not None:
            self._tables.pushes.drop()
        if self._sync is not None:
            self._sync.zero_grad(set_to_none)
            return
        for param in self._params:
            clear(param.tensors[0], set_to_none)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Push nothing during the backward passes in this block; ``step``, or the next backward, pushes instead.

        For gradients that are not final: in all but the last of several backward passes that add up, before clipping,
        or for a batch whose size differs from the others':

            with trainer.no_sync():
                loss_of(first_half).backward()
            loss_of(second_half).backward()
            trainer.step()
        """
        with nullcontext() if self._sync is None else self._sync.paused():
            yield

    def join(self, timeout: float | None = None) -> int:
        """Say that this worker has run out of batches; return when all have, with the weights of the last.

            for epoch in range(epochs):
                for inputs, labels in my_batches:  # as many as this worker has
                    ...
                    trainer.step()
                trainer.join()

        The others go on without this worker: its gradients count as zeros, and sums are divided as before, so every
        sample weighs the same. See ``KVStore.join``. Afterwards ``num_update`` is the same on all workers, so an
        ``lr_scheduler`` gives all the same rate. A scheduler of torch's that steps by batch must be stepped by the
        program, as often as ``num_update`` has grown. Other questions between workers (``ignore_stale_grad``,
        ``clip_grad_norm_``, ``GradScaler``) also go on without this worker, if it has taken part in them before;
        otherwise they raise an error on the others.

        Args:
            timeout: how long to wait, in seconds; None for the store's deadline, which the others' remaining batches
                may exceed.

        Returns:
            The rank that joined last; 0 without a store.

        Raises:
            Unsupported: there are other workers, and updates are made in the workers.
            UsageError: some of a step's gradients have been pushed and others have not.
            DeadlineExceeded: other workers still have batches; the message names them. Call again to wait on.
            NodeLost: a worker has died, or left without joining.
        """
        if self._store is None or self._sync is None or self.joining is None:
            return 0
        if self._local is not None and self._store.num_workers > 1:
            raise Unsupported(
                "join() needs update_on_kvstore=True: updates in this worker would miss the others' last batches"
            )
        self.begin_join()
        last = self.joining.join(timeout)
        # After the store: questions of workers that still have batches are answered by zeros until then.
        self._peers.join(timeout)
        self._rates.num_update = self._peers.most(self._rates.num_update)
        if self._local is None:
            self._sync.pull()
        self._likeness.say()
        return last

    def begin_join(self) -> None:
        """Say that this worker has run out of batches, and return at once; ``join`` waits for the others."""
        if self.joining is not None and self._sync is not None and self._local is None:
            self._between_steps("join()")
            self._peers.announce_join()
            self.joining.begin()

    @property
    def optimizer(self) -> TrainerOptimizer:
        """The trainer as a torch optimizer, for schedulers and GradScaler; changes of ``param_groups`` take effect."""
        if self._optimizer is None:
            self._optimizer = TrainerOptimizer(self, self._rates.groups)
        return self._optimizer

    def close(self) -> None:
        """Remove the hooks: backward pushes nothing more. ``step`` still works, and the store stays open."""
        if self._sync is not None:
            self._sync.close()
        self._peers.close()

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
        several are of one shape, their values must be as at ``save_states``, which shows that their
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
            # Of this trainer itself the order of parameters is known, whatever their values are now.
            more = {} if rates is None else rates.more
            order = None if more.get("trainer") == self._token else more.get("unnamed", ())
            require_states(known, states_file.read_keys(path), order, path)
        if rates is not None and self._sync is not None:
            self._sync.thaw(rates.trained)
            self._sync.make_tables(rates.tables)
        self._where.load_optimizer_states(path)
        if rates is not None:
            self._rates.take(rates)

    def synchronize(self) -> None:
        """Return when the parameters have the values of the last step. Only needed with ``wait_in_forward``.

        Raises:
            KVStoreError: the push or pull of a parameter failed.
        """
        if self._sync is not None:
            self._sync.synchronize()

    def __reduce__(self) -> Any:
        raise Unsupported(
            "a Trainer and its optimizer cannot be copied or pickled: they belong to this process and its store. Copy "
            "the model and save_states(path) or trainer.optimizer.state_dict(), or make another Trainer"
        )

    # ---- helpers

    def _begin_step(self) -> None:
        """Come back, or let workers in that do, before the first push of a step."""
        came = self.come_back()
        if self._handed is None:
            return
        if came and self._local is not None:
            # These gradients are of weights that only this worker has had, so they count as zeros.
            for grad in [tensor.grad for param in self._params for tensor in param.tensors if tensor.grad is not None]:
                grad.zero_()
        self._handed.begin_step()

    def _updated(self) -> None:
        self._rates.num_update += 1
        if self._publish_every and self._store is not None and self._rates.num_update % self._publish_every == 0:
            self._store.publish(label=f"step {self._rates.num_update}")
        if self._optimizer is not None:
            note_step(self._optimizer)
        if self._store is not None and self.marks_steps:
            self._store.end_step()

    def _left_out(self, ignore_stale_grad: bool) -> list[int]:
        return self._peers.left_out(self._params) if ignore_stale_grad else []

    @property
    def _parts(self) -> int:
        """How many gradients are summed."""
        workers = 1 if self._store is None else self._store.num_workers
        return workers * len(self._params[0].tensors)

    def _scale(self, batch_size: int | None) -> float:
        return self._rates.rescale(batch_size, self._parts)

    def _trained(self, more: Collection[int] = ()) -> list[Parameter]:
        """Return the parameters that are trained so far, and the ones at the positions ``more``."""
        out = self._frozen.difference(more)
        return [param for position, param in enumerate(self._params) if position not in out]

    def _thaw(self) -> None:
        """Train the frozen parameters that require a gradient now."""
        new = [position for position in sorted(self._frozen) if self._params[position].trains]
        if not new:
            return
        if self._local is not None:
            self._local.require_shapes(new)
        if self._sync is None:
            self._frozen.difference_update(new)
        else:
            self._sync.thaw(new)
            self._sync.meet(new)

    def _between_steps(self, what: str) -> None:
        if self._sync is not None:
            self._sync.require_between_steps(what)


def _join_advice(stored: bool) -> str:
    """What a program is told that calls ``join`` of the store; ``stored``: whether the store updates."""
    if stored:
        return join_refusal("Trainer")
    return (
        "this store is that of a Trainer: store.join() would leave its workers with different weights. Its workers "
        "update by themselves, so give all of them as many batches (even_size=True of SplitSampler), or pass "
        "update_on_kvstore=True and call its own join()"
    )
