"""``DistributedOptimizer``: any torch optimizer, with gradients that are averaged over workers.

Name and arguments are as in Horovod (Sergeev and Del Balso, arXiv:1802.05799) and of Needle's ``ddp``. Unlike
there, gradients are averages when ``backward`` returns (``averager.py``), not only in ``step``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from kvstore import AlreadyInitialized, KVStore, Mismatch, UnknownName, Unsupported, UsageError
from kvstore.store.maker import UNNAMED
from workers import group
from workers.alike import BETWEEN, STEP, Alike
from workers.broadcast import load_optimizer_state, optimizer_state
from workers.common.checks import at_least, require_optimizer
from workers.common.gather import Gather, digest
from workers.common.hand_over import HandOver, take_buffers, take_values, values_state
from workers.common.tensors import require_own_memory
from workers.common.values import buffers_around, describe, module_of
from workers.ddp.averager import GradientAverager, counts_of

Average = "average"
"""``DistributedOptimizer(op=workers.Average)``: gradients are averaged over the workers. The default."""

Sum = "sum"
"""``DistributedOptimizer(op=workers.Sum)``: gradients are summed over the workers."""


class DistributedOptimizer(torch.optim.Optimizer):
    """Takes the place of a torch optimizer; the training loop stays as it is.

        workers.init()
        optimizer = workers.DistributedOptimizer(torch.optim.Adam(model.parameters()), model)
        for images, labels in my_part_of_the_data:
            optimizer.zero_grad()
            loss_function(model(images), labels).backward()
            optimizer.step()

    When ``backward`` returns, gradients are averages: clip them, unscale them with a ``GradScaler``, inspect them;
    every worker sees the same. All workers make the same number of backward passes and steps. What their losses depend
    on may differ: a parameter with a gradient on some workers counts as zeros on the others, and a parameter without a
    gradient anywhere keeps none. Without a backward pass, ``step`` averages whatever gradients there are.

    On construction every worker gets rank 0's parameters and buffers, and the states and hyper-parameters of its
    optimizer. Buffers are those of the model, or else of all modules that hold the optimizer's parameters. Workers
    whose hyper-parameters differ in a step get ``Mismatch``, before they make it. Those with fewer batches ``join``. A
    parameter that is unfrozen, or added, on all workers at the same point is averaged from its first gradient on.

    In a job that goes on without workers that die (``launch.py --min-workers``), one that is started again comes back
    before its first forward pass in training, or in ``come_back``. It takes over the parameters, buffers, states and
    hyper-parameters of another worker, whose first backward after a ``step`` waits for that.

    Parameter groups, state, and all attributes that this class lacks are those of ``optimizer``.

    Args:
        optimizer: any instance of ``torch.optim.Optimizer``.
        named_parameters: the model, or its ``named_parameters()``, for names in messages, and because parameters that
            the optimizer does not have, as frozen ones, become rank 0's, too. If given, it has all of the optimizer's.
        compression: how to compress what is sent: the type, or options for ``KVStore.set_gradient_compression``. It has
            no effect in a group of one.
        backward_passes_per_step: how many backward passes add up before gradients are averaged. A step may come sooner.
        op: ``average`` (``workers.Average``) or ``sum`` (``workers.Sum``) over the workers. Of half precision, both are
            made in float32 and rounded once.
        sparse_as_dense: make sparse gradients dense. Otherwise the rows that they have are averaged, and the optimizer
            gets sparse gradients, with the rows of all workers: it must take such, as ``SparseAdam`` and ``SGD`` do.
        overlap: send while backward runs. Pass False if hooks change gradients after they have been accumulated: a
            gradient that is not what was sent when backward ends raises ``UsageError``.
        kvstore: a synchronous store without optimizer, for this alone, or the type of one to make. ``auto`` makes one
            in the group of ``init``.

    Raises:
        UsageError: an argument is invalid, or there are no parameters; or before ``init``.
        UnknownName: there is no such ``op`` or ``compression``.
        Mismatch: another worker has different parameters, arguments or compression.
    """

    _step_supports_amp_scaling = False  # GradScaler would pass its scale to this object, not to the inner optimizer

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Any = None,
        compression: Mapping[str, object] | str | None = None,
        backward_passes_per_step: int = 1,
        op: str = Average,
        *,
        sparse_as_dense: bool = False,
        overlap: bool = True,
        kvstore: KVStore | str | None = "auto",
    ) -> None:
        require_optimizer(optimizer)
        if op not in (Average, Sum):
            raise UnknownName(f"unknown op={op!r}; choose from {Average}, {Sum}")
        self.optimizer = optimizer
        module = module_of(named_parameters)  # before its parameters are read
        values = _values(optimizer, named_parameters, module)
        require_own_memory(values)
        self._names = {tensor: name for name, tensor in values.items()}
        self._how: dict[str, Any] = {
            "average": op == Average,
            "passes": at_least("backward_passes_per_step", backward_passes_per_step, 1),
            "sparse_as_dense": sparse_as_dense,
            "overlap": overlap,
        }
        self._skip = False
        self._module = module
        self.marks_steps = True  # whether the program's step ends after ``step``; see ``KVStore.end_step``
        self._store = group.store_for(kvstore, "DistributedOptimizer", UNNAMED)
        self._known: set[str] = set()
        self._watched: set[int] = set()
        self._gradients: GradientAverager | None = None
        self._handed = HandOver(self._store, "DistributedOptimizer")
        if self._store.num_workers > 1:
            wanted = {"type": compression} if isinstance(compression, str) else compression
            if wanted is not None:
                self._store.set_gradient_compression(wanted)
            self._agreement = Gather(self._store, "/agreement", 5)
            self._losses = Gather(self._store, "/loss", 2)
            self._how["compression"] = str(wanted)
            self._alike = Alike(optimizer, self._store, "DistributedOptimizer")
            self._gradients = self._watch()
            if not self._handed.waits:
                self._alike.give(values)
                if module is None:
                    self._alike.give_buffers()
            self._handed.attach(next(iter(values)), self._state, self._take_over, self._all(), self._buffers)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step of the optimizer with averaged gradients; return the result of the optimizer's ``step``.

        Args:
            closure: evaluates the model again and returns the loss. The optimizer gets the loss averaged over workers,
                so that a search along the loss (LBFGS) takes the same way on all of them.

        Raises:
            Mismatch: workers disagree on hyper-parameters. The weights have not changed.
            KVStoreError: an error of the store. The weights have not changed.
        """
        if closure is None:
            if not self._skip:
                self.synchronize()
            if self._gradients is not None and self._alike.changed:
                self._gradients.meet(STEP)  # since they were compared, in backward
            result = self.optimizer.step()
        else:
            result = self.optimizer.step(lambda: self._evaluate(closure))
        if self._gradients is not None:
            self._gradients.step_over()
            if self.marks_steps:
                self._store.end_step()
        return result

    def come_back(self) -> bool:
        """Let this worker into a job that has gone on without it, if it was started again; return whether it was.

        The first forward pass in training does it, too. A program that calls this before its first batch reads that
        batch for the right step, by what it has attached to a store as shared:

            store = kvstore.create("dist_sync")
            optimizer = workers.DistributedOptimizer(torch.optim.Adam(model.parameters()), model, kvstore=store)
            store.attach("scheduler", scheduler, shared=True)
            store.attach("progress", progress, shared=True)
            optimizer.come_back()
            while progress.step < 10_000:
                ...

        Of several optimizers, all but the last one to step have ``marks_steps = False``.

        Raises:
            UsageError: the others train other parameters.
            KVStoreError: as for ``KVStore.boundary``.
        """
        return self._handed.come_back()

    def synchronize(self) -> None:
        """Average the gradients that are not averages yet: those of ``no_sync``, or of too few backward passes.

        All workers call this. After an ordinary backward pass it does nothing.
        """
        if self._gradients is None:
            return
        if new := self._unwatched():
            averaged = self._gradients.final
            self._rewatch(new)
            if averaged:  # all but theirs
                late = self._averager({self._name(tensor): tensor for tensor in new})
                late.exchange()
                late.close()
                self._gradients.note_final()
        if not self._gradients.final:
            self._gradients.exchange()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """``step`` in this block averages nothing; for programs that call ``synchronize`` first, as in Horovod."""
        before, self._skip = self._skip, True
        try:
            yield
        finally:
            self._skip = before

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Average nothing in this block; the next backward pass after it, or ``step``, averages instead."""
        if self._gradients is None:
            yield
            return
        with self._gradients.paused():
            yield

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, or with ``set_to_none=False`` set them to zero."""
        self.optimizer.zero_grad(set_to_none)
        if self._gradients is not None:
            self._gradients.step_over()
            if new := self._unwatched():
                self._rewatch(new)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add ``param_group``, as torch's optimizers take it. Every worker calls this, between two steps."""
        if self._gradients is not None:
            self._gradients.require_between("add_param_group()")
        self.optimizer.add_param_group(param_group)
        self._rewatch(self.optimizer.param_groups[-1]["params"])

    def join(self, timeout: float | None = None) -> int:
        """Say that this worker has run out of batches; return when all have, with weights and states of the last.

            for epoch in range(epochs):
                for images, labels in my_batches:  # as many as this worker has
                    ...
                    optimizer.step()
                last = optimizer.join()

        The others go on without this worker: its gradients count as zeros, and averages are over all workers as before,
        so every sample weighs the same. See ``KVStore.join``. Afterwards all workers have the parameters, states and
        hyper-parameters of the worker that has made most steps. What the program has beside the optimizer, and steps by
        batch, it brings along by itself, as a scheduler or a ``GradScaler``:

            scheduler.load_state_dict(workers.broadcast_object(scheduler.state_dict(), last))

        Args:
            timeout: how long to wait, in seconds; None for the store's deadline, which the others' remaining batches
                may exceed.

        Returns:
            The rank that joined last; 0 in a group of one.

        Raises:
            UsageError: called during ``backward``.
            DeadlineExceeded: other workers still have batches; the message names them. Call again to wait on.
            NodeLost: a worker has died, or left without joining.
        """
        if self._gradients is None:
            return 0
        self.begin_join()
        last, uneven = self._alike.join(timeout, self._gradients.rounds)
        self._gradients.step_over()
        self._gradients.rounds = 0
        if uneven:
            self._alike.give({self._name(tensor): tensor for tensor in self._all()}, last)
        return last

    def begin_join(self) -> None:
        """Say that this worker has run out of batches, and return at once; ``join`` waits for the others."""
        if self._gradients is not None:
            self._gradients.require_between("join()")
            self._alike.begin_join()

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state, the same on all workers; the bare optimizer can load it."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load ``state_dict`` into the optimizer; the same on all workers, or before ``broadcast_optimizer_state``."""
        self.optimizer.load_state_dict(state_dict)

    def reset_grad(self) -> None:
        """Drop all gradients, as in Needle."""
        self.zero_grad()

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The optimizer's parameter groups."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The optimizer's state."""
        return self.optimizer.state

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __reduce__(self) -> Any:
        raise Unsupported(
            "a DistributedOptimizer cannot be copied or pickled: it belongs to this process. Copy its state_dict(), or "
            "make another one"
        )

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self.optimizer!r})"

    # ---- helpers

    def _unwatched(self) -> list[torch.Tensor]:
        """Return the parameters that require a gradient, and whose gradients are not averaged yet."""
        return [t for t in self._all() if t.requires_grad and id(t) not in self._watched and t.numel()]

    def _rewatch(self, new: list[torch.Tensor]) -> None:
        """Watch also the ``new`` parameters, which were unfrozen or added, if they were on all workers."""
        before = self._gradients
        if before is None:
            return
        before.meet(BETWEEN, sorted(self._name(tensor) for tensor in new))
        before.close()
        self._gradients = self._watch()
        self._gradients.rounds = before.rounds
        if not self._handed.waits:
            self._alike.give({self._name(tensor): tensor for tensor in new})

    def _watch(self) -> GradientAverager:
        params = {self._name(tensor): tensor for tensor in self._all() if tensor.requires_grad and tensor.numel()}
        if not params:
            raise UsageError(
                "no parameter of the optimizer requires a gradient; make DistributedOptimizer of one that is trained"
            )
        self._watched = {id(tensor) for tensor in params.values()}
        how = self._how
        mine = [digest("DistributedOptimizer"), digest(describe(params)), how["passes"], how["average"] + 1]
        mine.append(digest(how["compression"]))
        for rank, (_, theirs, passes, average, compression) in self._agreement.exchange(mine).items():
            if theirs != mine[1]:
                raise Mismatch(
                    f"worker {rank}'s optimizer has different parameters: names, shapes, dtypes, their order and which "
                    "of them require a gradient must be the same on all workers"
                )
            if [passes, average] != mine[2:4]:
                raise Mismatch(f"worker {rank} has a different op, or backward_passes_per_step={passes}")
            if compression != mine[4]:
                raise Mismatch(
                    f"worker {rank} has another compression than this one's, {how['compression']}: all workers must "
                    "pass the same"
                )
        return self._averager(params)

    def _averager(self, params: dict[str, torch.Tensor]) -> GradientAverager:
        used = f"/used/{len(params)}"
        values = {name: tensor.detach() for name, tensor in params.items()}
        values[used] = counts_of(len(params))
        new = {key: value for key, value in values.items() if key not in self._known}
        try:
            if new:
                self._store.init(list(new), list(new.values()))
        except AlreadyInitialized:
            raise UsageError("this store has another model's keys; make a second one with kvstore.create") from None
        self._known.update(new)
        how = {name: value for name, value in self._how.items() if name != "compression"}
        return GradientAverager(params, self._store, used, self._alike, self._known, handed=self._handed, **how)

    def _state(self) -> dict[str, Any]:
        """Return what a worker that comes back takes over, between two steps."""
        gradients = {} if self._gradients is None else self._gradients.state()
        values, around = map(values_state, self._everything())
        return {**gradients, "values": values, "around": around, "optimizer": optimizer_state(self.optimizer)}

    def _take_over(self, state: Mapping[str, Any]) -> None:
        if self._gradients is not None:
            self._gradients.take_over(state)
        values, around = self._everything()
        take_values(values, state["values"])
        take_buffers(around, state["around"])
        load_optimizer_state(self.optimizer, state["optimizer"])

    def _everything(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Return all parameters, with the buffers of the module; and the buffers around them if it is not known."""
        values = {name: tensor for tensor, name in self._names.items()}
        if self._module is None:
            return values, buffers_around(self._all())
        return values | dict(self._module.named_buffers()), {}

    def _buffers(self) -> list[torch.Tensor]:
        return list(buffers_around(self._all()).values() if self._module is None else self._module.buffers())

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        """Call ``closure``; return its loss averaged over workers, when the gradients are averages too."""
        loss = closure()
        if self._gradients is None or self._skip:
            return loss
        self.synchronize()
        if loss is None:
            return None
        mean = self._losses.mean(loss.item() if isinstance(loss, torch.Tensor) else float(loss))
        return torch.full_like(loss.detach(), mean) if isinstance(loss, torch.Tensor) else mean

    def _all(self) -> list[torch.Tensor]:
        return [tensor for param_group in self.optimizer.param_groups for tensor in param_group["params"]]

    def _name(self, tensor: torch.Tensor) -> str:
        """Return the name that was given, or a number that stays the same."""
        return self._names.setdefault(tensor, f"parameter {len(self._names)}")


def _values(optimizer: torch.optim.Optimizer, named: Any, module: nn.Module | None) -> dict[str, torch.Tensor]:
    """Return what all workers are to begin with, by name: the optimizer's parameters, and what is named beside them."""
    tensors = [tensor for param_group in optimizer.param_groups for tensor in param_group["params"]]
    if named is None:
        return {f"parameter {number}": tensor for number, tensor in enumerate(tensors)}
    buffers = [] if module is None else list(module.named_buffers())
    if isinstance(named, nn.Module):
        named = named.named_parameters()
    pairs = list(named.items() if isinstance(named, Mapping) else named)
    if not all(isinstance(item, tuple) and len(item) == 2 for item in pairs):
        raise UsageError("named_parameters must be pairs of a name and a parameter, as model.named_parameters() gives")
    if len({name for name, _ in pairs}) < len(pairs):
        raise UsageError("named_parameters has a name twice; every parameter needs a name of its own")
    names = {tensor: str(name) for name, tensor in pairs}
    missing = sum(tensor not in names for tensor in tensors)
    if missing:
        raise UsageError(f"named_parameters lacks {missing} of the optimizer's {len(tensors)} parameters")
    return {name: tensor for tensor, name in names.items()} | {str(name): buffer for name, buffer in buffers}
