"""DistributedOptimizer: any torch optimizer, made to step with gradients that are averaged over workers.

The name and the arguments are Horovod's (Sergeev and Del Balso, arXiv:1802.05799) and those of Needle's ``ddp``. Unlike
theirs, gradients are averaged when ``backward`` returns (``gradients.py``), not in ``step``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from kvstore import AlreadyInitialized, KVStore, Mismatch, UnknownName, UsageError
from workers import group
from workers.common.checks import at_least
from workers.common.gather import Gather, digest
from workers.common.values import describe
from workers.ddp.gradients import Gradients

Average, Sum = "average", "sum"


class DistributedOptimizer(torch.optim.Optimizer):
    """Stands where the torch optimizer stood; the training loop stays as it is.

        workers.init()
        workers.broadcast_parameters(model)
        optimizer = workers.DistributedOptimizer(torch.optim.Adam(model.parameters()))
        for images, labels in my_part_of_the_data:
            optimizer.zero_grad()
            loss_function(model(images), labels).backward()
            optimizer.step()

    When ``backward`` returns, gradients are averages: clip them, unscale them with a ``GradScaler``, look at them;
    every worker sees the same. Workers make the same number of backwards and steps; what a loss depends on may differ.
    A parameter that got a gradient on some workers counts as zeros on the others; one that got none anywhere has none.
    Where there was no backward, ``step`` averages whatever gradients there are.

    Parameter groups and state are those of ``optimizer``, and so is everything else this does not have.

    Args:
        optimizer: any instance of ``torch.optim.Optimizer``.
        named_parameters: ``model.named_parameters()``, for names in messages; all of the optimizer's, if any.
        compression: how to compress what is sent, as for ``KVStore.set_gradient_compression``, or just its type; in a
            group of one it does nothing.
        backward_passes_per_step: gradients of so many backwards add up before they are averaged; a step may come
            sooner.
        op: ``average`` (``workers.Average``) or ``sum`` (``workers.Sum``) over the workers.
        sparse_as_dense: send sparse gradients as dense ones, which they then are; else they are an error.
        overlap: send while backward runs. False for programs with hooks that change gradients after they have been
            accumulated.
        kvstore: a synchronous store without optimizer, for this alone. None makes one in the group of ``init``.

    Raises:
        UsageError: no optimizer, no parameters, a wrong argument; or before ``init``.
        UnknownName: no such ``op`` or ``compression``.
        Mismatch: another worker has other parameters or arguments.
    """

    _step_supports_amp_scaling = False  # GradScaler would tell this one, and not the one inside

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
        kvstore: KVStore | None = None,
    ) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(f"optimizer is an instance of one in torch.optim, not {type(optimizer).__name__}")
        if op not in (Average, Sum):
            raise UnknownName(f"no op={op!r}; choose from {Average}, {Sum}")
        self.optimizer = optimizer
        self._names = _names(optimizer, named_parameters)
        self._how: dict[str, Any] = {
            "average": op == Average,
            "passes": at_least("backward_passes_per_step", backward_passes_per_step, 1),
            "sparse_as_dense": sparse_as_dense,
            "overlap": overlap,
        }
        self._skip = False
        self._store = group.new_store() if kvstore is None else kvstore
        self._known: set[str] = set()
        self._gradients: Gradients | None = None
        if self._store.num_workers > 1:
            if compression is not None:
                wanted = {"type": compression} if isinstance(compression, str) else compression
                self._store.set_gradient_compression(wanted)
            self._agreement = Gather(self._store, "/agreement", 4)
            self._losses = Gather(self._store, "/loss", 2)
            self._gradients = self._watch()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step of the optimizer, with averaged gradients; returns what the optimizer's ``step`` does.

        Args:
            closure: evaluates the model anew and returns the loss. The optimizer gets the loss averaged over workers,
                so that one that searches with it (LBFGS) goes the same way on all.

        Raises:
            UsageError: a parameter got a gradient that did not require one before; or as for ``synchronize``.
            KVStoreError: what the store raises; the weights are as they were.
        """
        if closure is None:
            if not self._skip:
                self.synchronize()
            result = self.optimizer.step()
        else:
            result = self.optimizer.step(lambda: self._evaluate(closure))
        if self._gradients is not None:
            self._gradients.step_over()
        return result

    def synchronize(self) -> None:
        """Average what has not been: gradients that were made in ``no_sync``, or by fewer backwards than a step has.

        All workers call it. After an ordinary backward there is nothing left to do.
        """
        if self._gradients is None:
            return
        for tensor in self._all():
            if tensor.grad is not None and tensor.numel() and id(tensor) not in self._watched:
                raise UsageError(
                    f"{self._name(tensor)!r} has a gradient now and did not require one when this optimizer was made: "
                    "make it anew when parameters are unfrozen, on all workers"
                )
        if not self._gradients.final:
            self._gradients.exchange()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """``step`` in this block averages nothing; for programs that call ``synchronize`` before, as Horovod's do."""
        before, self._skip = self._skip, True
        try:
            yield
        finally:
            self._skip = before

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Average nothing for backwards in this block; the next one after it does, or ``step``."""
        if self._gradients is None:
            yield
            return
        with self._gradients.paused():
            yield

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, or set them to zero, as the optimizer does."""
        self.optimizer.zero_grad(set_to_none)
        if self._gradients is not None:
            self._gradients.step_over()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train more parameters; every worker calls it, between two steps."""
        if self._gradients is not None:
            self._gradients.require_between("add_param_group()")
        self.optimizer.add_param_group(param_group)
        if self._gradients is not None:
            self._gradients.close()
            self._gradients = self._watch()

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's; it is the same on all workers, and one without this class can load it."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the optimizer's; on all workers alike, or before ``broadcast_optimizer_state``."""
        self.optimizer.load_state_dict(state_dict)

    def reset_grad(self) -> None:
        """Drop all gradients, as in Needle."""
        self.zero_grad()

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The optimizer's."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The optimizer's."""
        return self.optimizer.state

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self.optimizer!r})"

    # ---- helpers

    def _watch(self) -> Gradients:
        """Agree with the other workers on what there is to average, and begin to."""
        params = {self._name(its): its for its in self._all() if its.requires_grad and its.numel()}
        if not params:
            raise UsageError("no parameter of the optimizer requires a gradient")
        self._watched = {id(its) for its in params.values()}
        mine = [digest("DistributedOptimizer"), digest(describe(params)), self._how["passes"], self._how["average"] + 1]
        for rank, (_, theirs, passes, average) in enumerate(self._agreement.exchange(mine)):
            if theirs != mine[1]:
                raise Mismatch(
                    f"worker {rank}'s optimizer has other parameters: names, shapes, dtypes, their order and which "
                    "of them require a gradient must be the same on all workers"
                )
            if [passes, average] != mine[2:]:
                raise Mismatch(f"worker {rank} has another op, or backward_passes_per_step={passes}")
        used = f"/used/{len(params)}"
        values = {name: its.detach() for name, its in params.items()}
        values[used] = torch.zeros(len(params), dtype=torch.int32)
        new = {key: value for key, value in values.items() if key not in self._known}
        try:
            self._store.init(list(new), list(new.values()))
        except AlreadyInitialized:
            raise UsageError("this store has another model's keys; make one more with kvstore.create") from None
        self._known.update(new)
        return Gradients(params, self._store, used, **self._how)

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        """Call ``closure``; return its loss, averaged, when the gradients are."""
        loss = closure()
        if self._gradients is None or self._skip:
            return loss
        self.synchronize()
        if loss is None:
            return None
        mean = self._losses.mean(loss.item() if isinstance(loss, torch.Tensor) else float(loss))
        return torch.full_like(loss.detach(), mean) if isinstance(loss, torch.Tensor) else mean

    def _all(self) -> list[torch.Tensor]:
        return [tensor for its in self.optimizer.param_groups for tensor in its["params"]]

    def _name(self, tensor: torch.Tensor) -> str:
        """The name that was given, or a number that stays."""
        return self._names.setdefault(tensor, f"parameter {len(self._names)}")


def _names(optimizer: torch.optim.Optimizer, named: Any) -> dict[torch.Tensor, str]:
    """Return the names of an optimizer's parameters; numbers, if none are given."""
    tensors = [tensor for its in optimizer.param_groups for tensor in its["params"]]
    if named is None:
        return {tensor: f"parameter {number}" for number, tensor in enumerate(tensors)}
    pairs = list(named.items() if isinstance(named, Mapping) else named)
    if not all(isinstance(item, tuple) and len(item) == 2 for item in pairs):
        raise UsageError("named_parameters is what model.named_parameters() gives: pairs of a name and a parameter")
    names = {tensor: str(name) for name, tensor in pairs}
    if len({name for name, _ in pairs}) < len(pairs):
        raise UsageError("named_parameters has a name twice")
    missing = sum(tensor not in names for tensor in tensors)
    if missing:
        raise UsageError(f"named_parameters lacks {missing} of the optimizer's {len(tensors)} parameters")
    return names
