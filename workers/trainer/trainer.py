"""Trainer: steps of an optimizer over all workers and devices, after MXNet's ``gluon.Trainer``, for torch models."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from kvstore import KVStore, Unsupported, UsageError
from kvstore.dynamo import outside_graphs
from kvstore.errors import warn_renamed
from kvstore.optim.algorithms.tensorwise import evaluated
from workers.common.sparse_gradients import is_sparse
from workers.common.stores import join_refusal
from workers.common.torch_internals import multiply, note_step, write_count
from workers.trainer.parameters import Parameter, stale
from workers.trainer.peers import Peers
from workers.trainer.trained_parameters import TrainedParameters

STATE = "trainer"  # the only item of the ``state`` of a ``state_dict``


class Trains(Protocol):
    """What ``TrainerOptimizer`` needs of a trainer."""

    def step(self, batch_size: int | None = None, ignore_stale_grad: bool = False) -> None:
        """Make a step."""

    def zero_grad(self) -> None:
        """Drop all gradients."""

    def save_states(self, path: str | os.PathLike[str]) -> None:
        """Write the optimizer's state."""

    def load_states(self, path: str | os.PathLike[str]) -> None:
        """Read the optimizer's state."""

    def overflows(self, overflowed: bool) -> bool:
        """Whether gradients have overflowed on any worker."""


@outside_graphs
class TrainerOptimizer(torch.optim.Optimizer):
    """A trainer's optimizer, for code that expects a torch optimizer:

        scheduler = torch.optim.lr_scheduler.OneCycleLR(trainer.optimizer, max_lr=0.1, total_steps=1000)
        scaler.step(trainer.optimizer)

    What is written into ``param_groups`` takes effect with the next step, on the servers too. ``Trainer.save_states``
    writes its state.
    """

    # With this, GradScaler leaves skipping to ``step``, where all workers decide together.
    _step_supports_amp_scaling = True

    def __init__(self, trainer: Trains, groups: list[dict[str, Any]]) -> None:
        first = {name: value for name, value in groups[0].items() if name != "params"}
        super().__init__(groups, first)
        self.param_groups = groups
        self._trainer = trainer

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        batch_size: int | None = None,
        ignore_stale_grad: bool = False,
    ) -> Any:
        """Make the trainer's step. Called by ``GradScaler.step``, skip it if any worker's gradients have overflowed."""
        loss = evaluated(closure)
        found_inf = getattr(self, "found_inf", None)
        if found_inf is not None:
            if self._trainer.overflows(bool(found_inf.item())):
                return loss
            scale = getattr(self, "grad_scale", None)
            if scale is not None:
                self._unscale(scale)
        self._trainer.step(batch_size, ignore_stale_grad)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._trainer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """Return what ``Trainer.save_states`` writes, as ``{"state": {"trainer": bytes}, "param_groups": [...]}``.

        One worker's call suffices, not between backward and step. The state may be on the servers, so it is one tensor
        of bytes, and only a Trainer's optimizer can load it. ``param_groups`` are to look at.
        """
        state = super().state_dict()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "states")
            self._trainer.save_states(path)
            state["state"] = {STATE: torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)}
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take what ``state_dict`` returned; see ``Trainer.load_states``. Every worker calls this.

        Raises:
            UsageError: it is the state of another kind of optimizer, or of other parameters.
        """
        saved = state_dict.get("state", {}).get(STATE)
        if not isinstance(saved, torch.Tensor) or saved.dtype != torch.uint8:
            raise UsageError(
                "this is no state of a Trainer's optimizer: pass what trainer.optimizer.state_dict() returned. The "
                "states of torch's own optimizers cannot be loaded here"
            )
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "states")
            path.write_bytes(saved.cpu().contiguous().numpy().tobytes())
            self._trainer.load_states(path)

    def __reduce__(self) -> Any:
        return self._trainer.__reduce__()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise ``UsageError`` after construction: all parameters of a trainer are in its store."""
        if hasattr(self, "_trainer"):
            raise UsageError(
                "a Trainer's parameters are fixed when it is made; make another Trainer for more parameters"
            )
        super().add_param_group(param_group)

    def _unscale(self, scale: torch.Tensor) -> None:
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for grad in grads:
            by_device.setdefault(grad.device, []).append(grad)
        for device, on_device in by_device.items():
            multiply(on_device, scale.double().reciprocal().float().to(device))


class SummedGradients:
    """Knows whether gradients are already sums over all workers, which ``allreduce_grads`` leaves behind."""

    def __init__(self) -> None:
        self._left: list[tuple[torch.Tensor, int]] = []

    def note(self, params: Sequence[Parameter]) -> None:
        self._left = [
            (grad, write_count(grad)) for param in params for t in param.tensors if (grad := t.grad) is not None
        ]

    def clear(self) -> None:
        self._left = []

    def hold(self, params: Sequence[Parameter]) -> bool:
        """Whether the gradients are these sums; an error if they have been changed since."""
        versions = {id(grad): version for grad, version in self._left}
        now = [grad for param in params for tensor in param.tensors if (grad := tensor.grad) is not None]
        kept = [grad for grad in now if id(grad) in versions]
        if not kept:
            self.clear()
            return False
        if len(kept) < len(now) or any(write_count(grad) != versions[id(grad)] for grad in kept):
            raise UsageError(
                "gradients have changed since allreduce_grads(): call clip_grad_norm_() right after it, or before it"
            )
        return True


def clip(
    params: Sequence[Parameter], peers: Peers, summed: SummedGradients, scale: float, max_norm: float, norm_type: float
) -> torch.Tensor:
    """Scale gradients so that their sum times ``scale`` has at most the norm ``max_norm``. Returns the norm before."""
    for param in params:
        if any(map(is_sparse, param.tensors)):
            raise Unsupported(
                f"clip_grad_norm_() needs dense gradients, and that of {param.key!r} is sparse: make the layer with "
                "sparse=False, or do not clip"
            )
    grads = {
        param.key: [torch.zeros_like(t) if t.grad is None else t.grad.detach() for t in param.tensors]
        for param in params
    }
    held = summed.hold(params)
    firsts = {key: per_device[:1] for key, per_device in grads.items()}
    total = Peers(None).norm(firsts, norm_type) if held else peers.norm(grads, norm_type)
    total = total * abs(scale)
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for per_device in grads.values():
        for grad in per_device:
            by_device.setdefault(grad.device, []).append(grad)
    for device, on_device in by_device.items():
        multiply(on_device, factor.to(device))
    if held:
        summed.note(params)
    return total


class Trainer(TrainedParameters):
    """Sums gradients over devices and workers, and updates the parameters with the result.

    On construction every worker and device gets rank 0's parameters, also of those that require no gradient, and rank
    0's buffers. A trainer knows the buffers of a module whose ``named_parameters()`` or ``parameters()`` it is given as
    they are, not in a list or dict, and those of ``wait_in_forward``; ``Reducer.broadcast`` sends others. Buffers are
    not trained: each worker has its own running statistics, until ``Reducer.average_buffers``.

    A store that updates holds the weights from then on. So load a checkpoint before.

    With a dist store, gradients are pushed while backward still runs (overlap). That begins after ten steps, and only
    if these have shown that gradients are final then: one backward a step, nobody changes its gradients (clipping), and
    ``step`` is given no batch size, which could vary. Either outcome is logged once, at INFO, and ``overlaps`` tells
    it. The weights are the same to the bit as without. A later step that differs raises ``UsageError``; it needs
    ``no_sync``, or ``overlap=False``. So does one after which a gradient is not what was pushed, whoever wrote to it:
    ``.grad.data``, numpy, a hook that was registered later. What had been pushed when a step raised stays pushed.

    Of a parameter with a sparse gradient, as ``nn.Embedding(sparse=True)`` has, only the rows that some worker has
    touched are sent and updated. That needs rounds of all workers, and an optimizer with a rule for rows: ``sgd``,
    ``adam``, ``adagrad`` and others. What is said of the parameter holds for its rows.

    A learning rate may be a tensor, as torch's own optimizers take it: what it holds at a step is used, and schedulers
    fill it.

    Args:
        params: ``model.named_parameters()``, ``model.parameters()``, a dict from name to parameter, or torch's list of
            groups, ``[{"params": ..., "lr": 0.01}, ...]``, whose dicts may have ``lr_mult`` and ``wd_mult``; or a list
            with one of these for each device of this process. Parameters that require no gradient are trained from the
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

    Raises:
        UsageError: there are no parameters; ``update_on_kvstore`` is False for an async store; ``overlap`` is True
            without a store or for several devices; ``compression_params`` is given without a store; ``wait_in_forward``
            is given for a store that does not update, with ``overlap=False`` or with ``share_gradients``; the store
            updates for another Trainer, or has values under these names.
        Unsupported: ``compression_params`` is given for a store in one process, which sends nothing.
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
    ) -> None:
        if overlap is None:
            warn_renamed("overlap=None", 'overlap="auto"')
        super().__init__(
            params,
            optimizer,
            optimizer_params,
            kvstore=kvstore,
            update_on_kvstore=update_on_kvstore,
            compression_params=compression_params,
            overlap=overlap,
            share_gradients=share_gradients,
            share_weights=share_weights,
            wait_in_forward=wait_in_forward,
            check_finite=check_finite,
        )
        self._optimizer: TrainerOptimizer | None = None
        self._peers, self._summed = Peers(self._store), SummedGradients()
        # After the store's own join a worker keeps weights from before the others' last rounds.
        self.joining = None if self._store is None else self._store.reserve_join(_join_advice(self._local is None))

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

    def _step(self, batch_size: int | None, ignore_stale_grad: bool) -> None:
        if self._frozen:
            self._thaw()
        if self._local is not None or self._sync is None:
            self.allreduce_grads(ignore_stale_grad)
            self.update(batch_size, ignore_stale_grad)
            return
        scale, left_out = self._scale(batch_size), self._left_out(ignore_stale_grad)
        self._sync.step(scale, lasting=batch_size is None, left_out=left_out)
        if left_out and self._peers.alone:  # other workers' updates may have changed them
            self._sync.pull(left_out)
        self._updated()

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
        self._rates.apply()
        if self._tables is not None:
            self._tables.scale = 1.0 / (self._parts if batch_size is None else batch_size)
            self._tables.step_over()
        self._local.update(scale, stale(self._params) if ignore_stale_grad else ())
        self._summed.clear()
        self._updated()

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
        return self._peers.count("overflow", [overflowed])[0] > 0

    def zero_grad(self) -> None:
        """Drop all gradients; set those that are in the store's memory to zero."""
        if self._tables is not None:
            self._tables.drop()
        if self._sync is not None:
            self._sync.zero_grad()
            return
        for param in self._params:
            param.tensors[0].grad = None

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
        self._peers.join(timeout)
        self._rates.num_update = self._peers.most(self._rates.num_update)
        if self._local is None:
            self._sync.pull()
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
        super().close()
        self._peers.close()

    def _updated(self) -> None:
        self._rates.num_update += 1
        if self._optimizer is not None:
            note_step(self._optimizer)

    def _left_out(self, ignore_stale_grad: bool) -> list[int]:
        return self._peers.left_out(self._params) if ignore_stale_grad else []

    @property
    def _parts(self) -> int:
        """How many gradients are summed."""
        workers = 1 if self._store is None else self._store.num_workers
        return workers * len(self._params[0].tensors)

    def _scale(self, batch_size: int | None) -> float:
        return self._rates.rescale(batch_size, self._parts)


def _join_advice(stored: bool) -> str:
    """What a program is told that calls ``join`` of the store; ``stored``: whether the store updates."""
    if stored:
        return join_refusal("Trainer")
    return (
        "this store is that of a Trainer: store.join() would leave its workers with different weights. Its workers "
        "update by themselves, so give all of them as many batches (even_size=True of SplitSampler), or pass "
        "update_on_kvstore=True and call its own join()"
    )
