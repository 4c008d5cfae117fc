"""A Trainer as torch's schedulers and GradScaler know an optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from kvstore import UsageError


class Trains(Protocol):
    """What a Trainer does for its optimizer."""

    def step(self, batch_size: int | None = None, ignore_stale_grad: bool = False) -> None:
        """Make a step."""

    def zero_grad(self) -> None:
        """Drop all gradients."""

    def overflows(self, here: bool) -> bool:
        """Whether gradients have overflowed on any worker."""


class TrainerOptimizer(torch.optim.Optimizer):
    """The optimizer of a Trainer, wherever it runs, for what wants one of torch's::

        scheduler = torch.optim.lr_scheduler.OneCycleLR(trainer.optimizer, max_lr=0.1, total_steps=1000)
        scaler.step(trainer.optimizer)

    What is written into ``param_groups`` is used from the next step on, on the servers too. Its state is
    ``Trainer.save_states``'s to write.

    Args:
        trainer: whose steps it makes.
        groups: the param_groups.
    """

    _opt_called = False  # torch's schedulers ask whether a step was made before their first one
    # GradScaler then leaves it to ``step`` to skip, which all workers must do together.
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
        """Make the Trainer's step; after ``GradScaler.step``, if no worker's gradients have overflowed.

        Args:
            closure: computes the loss and its gradients, before the step.
            batch_size, ignore_stale_grad: see ``Trainer.step``.

        Returns:
            What ``closure`` returns.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found = getattr(self, "found_inf", None)
        if found is not None:
            if self._trainer.overflows(bool(found.item())):
                return loss
            scale = getattr(self, "grad_scale", None)
            if scale is not None:
                self._unscale(scale)
        self._trainer.step(batch_size, ignore_stale_grad)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients; see ``Trainer.zero_grad``."""
        self._trainer.zero_grad()

    def state_dict(self) -> Any:
        """Not here: the state may be on servers."""
        raise UsageError("the optimizer's state is where updates are made; trainer.save_states(path) writes it")

    def load_state_dict(self, state_dict: Any) -> None:
        """Not here: the state may be on servers."""
        raise UsageError("the optimizer's state is where updates are made; trainer.load_states(path) reads it")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not here after construction: a Trainer's parameters are all in its store."""
        if hasattr(self, "_trainer"):
            raise UsageError("a Trainer's parameters are given when it is made; make another Trainer for others")
        super().add_param_group(param_group)

    def _unscale(self, scale: torch.Tensor) -> None:
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for grad in grads:
            by_device.setdefault(grad.device, []).append(grad)
        for device, its in by_device.items():
            torch._foreach_mul_(its, scale.double().reciprocal().float().to(device))
