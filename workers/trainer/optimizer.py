"""A trainer in the form of a torch optimizer, for torch's schedulers and GradScaler."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from kvstore import UsageError
from kvstore.dynamo import outside_graphs
from kvstore.optim.algorithms.tensorwise import evaluated
from workers.common.torch_internals import multiply

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

    Args:
        trainer: the trainer whose ``step`` is called.
        groups: the ``param_groups``.
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
        """Make the trainer's step. Called by ``GradScaler.step``, skip it if any worker's gradients have overflowed.

        Args:
            closure: computes the loss and its gradients; called before the step.
            batch_size, ignore_stale_grad: see ``Trainer.step``.

        Returns:
            The result of ``closure``.
        """
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
        """Drop all gradients; see ``Trainer.zero_grad``."""
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
