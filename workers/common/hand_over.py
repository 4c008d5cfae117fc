"""What a worker that comes back takes over from one that is in: what the servers do not have.

Between two steps, a worker that is in hands over its buffers, and where workers have the weights also these and the
states of its optimizer. The other one goes on with the same bits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from weakref import WeakMethod, finalize

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from kvstore import KVStore, UsageError
from workers.common.tensors import PLAIN, overwrite, pack, unpack
from workers.common.values import describe

log = logging.getLogger(__name__)


class HandOver:
    """Hands the state of one object, as ``give`` returns it, to the same one of a worker that comes back: to ``take``.

    The worker that gives does so before its first push of a step, because its program has counted the step before and
    moved its schedules by then. The worker that takes does so before its first forward pass in training, or in
    ``come_back``.

    Args:
        owner: the name of the object's class.

    Attributes:
        waits: whether this worker was started again, and has not taken over the state.
    """

    def __init__(self, store: KVStore, owner: str) -> None:
        self._store, self._owner = store, owner
        self._elastic = store.min_workers > 0
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []  # buffers, with what they must have before a push
        self.waits = store.newcomer

    def attach(
        self,
        name: str,
        give: Callable[[], Mapping[str, Any]],
        take: Callable[[Mapping[str, Any]], None],
        weights: Iterable[torch.Tensor],
        buffers: Callable[[], Iterable[torch.Tensor]],
    ) -> None:
        """Take part. ``give``, ``take`` and ``buffers`` are methods. ``weights`` must not be in a forward pass before.

        ``buffers`` returns what forward passes in training may change: running statistics.
        """
        # Weak: what is attached lives as long as the job, and an optimizer that its program drops is to go at once.
        self._give, self._take, self._buffers = WeakMethod(give), WeakMethod(take), WeakMethod(buffers)
        if self.waits:  # before it is attached, for that may end the wait
            self._unhook = finalize(self, _before_forward(weights, WeakMethod(self.come_back)).remove)
        if self._elastic:
            self._store.attach(f"{self._owner} of {name}", self, shared=True, saved=False)

    def state_dict(self) -> dict[str, Any]:
        give = self._give()
        # One that has just come back may let in the next one, at the place where it was let in itself.
        return {} if give is None else {**give(), "begun": self._store.step_ended or bool(self._kept)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        take, buffers = self._take(), self._buffers()
        if take is not None and buffers is not None and state:
            take(state)
            if state["begun"]:
                # The other worker's forward passes of this step have changed its buffers already. So this worker's own
                # forward passes must not change them once more.
                self._kept = [(buffer, buffer.clone()) for buffer in buffers()]
            if self.waits:  # not if this worker was let in before it made this object
                self.waits = False
                self._unhook()

    def come_back(self) -> bool:
        """Be let in, and take over the state; return whether this worker was started again and was not in yet."""
        if not self._store.newcomer:
            return False
        self._store.boundary()
        if self.waits:
            raise UsageError(
                f"no other worker has handed over its {self._owner}: all must make the same ones, before the first "
                "step; or the state cannot be sent, as the log of that worker says"
            )
        return True

    def begin_step(self) -> None:
        """Let workers in, before the first push of a step.

        Raises:
            UsageError: this worker would push gradients of weights that the others do not have.
        """
        if self.waits:
            raise UsageError(
                f"this worker was started again, and has not the others' weights yet: call come_back() of its "
                f"{self._owner} before the first batch"
            )
        for buffer, value in self._kept:
            # Not counted as a write: autograd refuses a backward pass, which this may be in, after one.
            overwrite(buffer.data, value)
        self._kept = []
        self._store.begin_step()


def _before_forward(weights: Iterable[torch.Tensor], call: WeakMethod[Callable[[], object]]) -> RemovableHandle:
    """Call ``call`` before each forward pass, in training, of a module that has one of ``weights``."""
    # The hook is on all modules of the process, because an optimizer knows its weights and not the modules of these.
    wanted = set(map(id, weights))

    def hook(module: nn.Module, _: Any) -> None:
        begins = module.training and torch.is_grad_enabled() and any(id(each) in wanted for each in module.parameters())
        if begins and (method := call()) is not None:
            method()

    return register_module_forward_pre_hook(hook)


def values_state(values: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return ``values`` of any dtype and layout as a state that can be attached to a store."""
    tensors, forms = pack(values, PLAIN)
    return {"about": describe(values), "tensors": tensors, "forms": forms}


def take_buffers(buffers: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> None:
    """``take_values`` of the buffers around an optimizer's weights, which may be in other modules on each worker."""
    if describe(buffers) == state["about"]:
        take_values(buffers, state)
    else:
        log.warning("the modules that hold the parameters differ from another worker's: this one keeps its buffers")


def take_values(values: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> None:
    """Overwrite ``values`` with those of which ``values_state`` has returned ``state``."""
    if describe(values) != state["about"]:
        raise UsageError(
            "the others train other parameters than this worker, which was started again, or have other buffers: "
            "make the same model before it comes back, frozen and unfrozen as theirs is now"
        )
    for name, value in unpack(state["tensors"], state["forms"]).items():
        overwrite(values[name], value)
