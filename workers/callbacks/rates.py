"""Learning rates in ``fit``: by epoch, or by one of torch's schedulers."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from kvstore import UsageError, WireError
from workers.callbacks.param import BatchEndParam
from workers.common import bundle
from workers.common.torch_internals import set_in_group


class Rated(Protocol):
    """What a schedule of learning rates needs of a run of ``fit``."""

    epoch: int

    @property
    def trainer(self) -> Any:
        """The ``Trainer``."""


class LearningRateScheduler:
    """Sets the learning rate of each epoch; an ``epoch_end_callback``, on every worker.

    For a rate by the number of updates, use ``lr_scheduler`` in ``optimizer_params``.

    Args:
        schedule: a function from the epoch, counted from 0, to its learning rate.
    """

    def __init__(self, schedule: Callable[[int], float]) -> None:
        self._schedule = schedule
        self._run: Rated | None = None

    def begin(self, run: Rated) -> None:
        """Set the rate of the first epoch of ``run``."""
        self._run = run
        run.trainer.set_learning_rate(self._schedule(run.epoch))

    def __call__(self, epoch: int, *_: Any) -> None:
        """Set the rate of the next epoch."""
        if self._run is not None:
            self._run.trainer.set_learning_rate(self._schedule(epoch + 1))


class TorchScheduler:
    """Steps one of torch's learning-rate schedulers whenever it is called; on every worker.

        fit(..., epoch_end_callback=TorchScheduler(lambda optimizer: StepLR(optimizer, step_size=30)))
        fit(..., batch_end_callback=TorchScheduler(lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=10_000)))
        fit(..., eval_end_callback=TorchScheduler(lambda optimizer: ReduceLROnPlateau(optimizer, "max")))

    The argument that it is passed as decides when it steps: after each epoch, batch or evaluation. As a
    ``batch_end_callback`` it also catches up, at the end of an epoch, with workers that had more batches. Its state is
    in checkpoints, so that a resumed run has the same rates to the bit.

    Args:
        make: a function from an optimizer to the scheduler.
        monitor: the metric for ``ReduceLROnPlateau``, by name; None for the first metric.

    Raises:
        UsageError: ``make`` is not a function, or does not make a scheduler.
    """

    def __init__(self, make: Callable[[torch.optim.Optimizer], Any], monitor: str | None = None) -> None:
        if not callable(make) or hasattr(make, "step"):
            raise UsageError(
                "TorchScheduler takes a function from an optimizer to a scheduler, such as "
                f"lambda optimizer: StepLR(optimizer, 30), not {type(make).__name__}"
            )
        self._make, self._monitor = make, monitor
        self._scheduler: Any = None
        self._groups: list[dict[str, Any]] = []
        self._loaded: tuple[Any, list[dict[str, Any]]] | None = None

    def begin(self, run: Rated) -> None:
        """Make the scheduler, which sets the first rates of ``run``."""
        optimizer = run.trainer.optimizer
        self._scheduler, self._groups = self._make(optimizer), optimizer.param_groups
        if not all(callable(getattr(self._scheduler, name, None)) for name in ("step", "state_dict")):
            raise UsageError(
                f"TorchScheduler's function must return a scheduler, not a {type(self._scheduler).__name__}"
            )
        if self._loaded is not None:
            state, groups = self._loaded
            try:
                self._scheduler.load_state_dict(state)
                for group, saved in zip(self._groups, groups, strict=True):
                    for name, value in saved.items():  # the new scheduler has set its first rates
                        set_in_group(group, name, value)
            except (AttributeError, LookupError, TypeError, ValueError) as exc:
                kind = type(self._scheduler).__name__
                raise UsageError(
                    f"the checkpoint's state does not fit this {kind}: {exc!r}; make the scheduler as in the run "
                    "that saved it"
                ) from exc
            self._loaded = None

    @property
    def scheduler(self) -> Any:
        """The scheduler; None before ``begin``."""
        return self._scheduler

    def __call__(self, when: int | BatchEndParam, *_: Any) -> None:
        """Step the scheduler."""
        if isinstance(self._scheduler, ReduceLROnPlateau):
            if not isinstance(when, BatchEndParam):
                raise UsageError("ReduceLROnPlateau needs a metric: pass it as eval_end_callback")
            self._scheduler.step(when.value(self._monitor)[1])
        else:
            self._scheduler.step()

    def missed(self, batches: int) -> None:
        """Make ``batches`` steps, one for each batch that this worker had less than others."""
        for _ in range(batches):
            self._scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's state and the hyper-parameters that it has set, as JSON values."""
        groups = [{name: value for name, value in group.items() if name != "params"} for group in self._groups]
        packed, tensors = bundle.pack([self._scheduler.state_dict(), groups])
        if any(tensor.numel() != 1 for tensor in tensors):
            raise UsageError(
                "the scheduler's state has tensors of several elements, which a checkpoint cannot hold; create it "
                "with numbers"
            )
        # A rate that is a tensor is rounded to its dtype at each step, so it comes back as one.
        numbers = [tensor.item() for tensor in tensors]
        return {"bundle": base64.b64encode(packed).decode(), "tensors": numbers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``, which ``state_dict`` returned; before ``begin``.

        Raises:
            UsageError: the state is damaged.
        """
        try:
            packed = base64.b64decode(state["bundle"])
            numbers, forms = state.get("tensors", []), bundle.forms(packed)
            tensors = [
                torch.tensor(number, dtype=form.dtype, device="cpu").reshape(form.shape)
                for number, form in zip(numbers, forms, strict=True)
            ]
            scheduler, groups = bundle.unpack(packed, tensors)
        except (WireError, LookupError, RuntimeError, TypeError, ValueError) as exc:
            raise UsageError(f"the scheduler's state is damaged: {exc!r}") from exc
        self._loaded = scheduler, groups
