"""Checkpoints after epochs and batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kvstore import UnknownName, UsageError
from workers.callbacks.param import MODES, BatchEndParam, Run, improves


class do_checkpoint:  # noqa: N801 - MXNet's name
    """Saves a ``Checkpoint`` after every ``period`` epochs; an ``epoch_end_callback``, on every worker.

    After epoch 0 that is ``prefix-0001.safetensors`` and its companions; see ``workers.Checkpoint``. If a worker cannot
    write its part, because a disk is full, all remove theirs, a line names the file, and training goes on.

    Args:
        prefix: the beginning of the files' names. Folders in it are made when needed.
        period: the number of epochs from one checkpoint to the next.
        best: a metric of the evaluation, by name, such as ``accuracy``. Of the checkpoints that this callback has
            saved, the best one and the newest one are kept then, and the others removed. A checkpoint is saved before
            the evaluation of its epoch, and what is removed is decided after it. None keeps all.
        mode: ``max`` if larger is better, ``min`` if smaller is. ``auto``: ``max`` for accuracies and AUC, ``min``
            otherwise.

    Attributes:
        best_value: the metric of the best checkpoint; None before the first.
        best_epoch: its number of finished epochs, as in ``Checkpoint(prefix, best_epoch)``; None before the first.
    """

    def __init__(self, prefix: str, period: int = 1, best: str | None = None, mode: str = "auto") -> None:
        if mode not in MODES:
            raise UnknownName(f"mode={mode!r} must be one of {', '.join(MODES)}")
        self._prefix, self.period = str(prefix), max(1, int(period))
        self._monitor, self._mode = best, mode
        self.best_value: float | None = None
        self.best_epoch: int | None = None
        self._kept: list[int] = []
        self._run: Run | None = None

    def begin(self, run: Run) -> None:
        """Remember ``run``, which saves.

        Raises:
            UsageError: with ``best``, the run has no evaluation data.
        """
        if self._monitor is not None and not run.evaluates:
            raise UsageError(f"do_checkpoint(best={self._monitor!r}) looks at the evaluation: pass eval_data")
        self._run = run

    def __call__(
        self, epoch: int, model: Any, arg_params: Mapping[str, torch.Tensor], aux_params: Mapping[str, torch.Tensor]
    ) -> None:
        if self._run is None or (epoch + 1) % self.period:
            return
        self._kept.append(epoch + 1)  # before: the checkpoint has the state of this callback
        if not self._run.save(self._prefix, epoch + 1):
            self._kept.remove(epoch + 1)

    def evaluated(self, param: BatchEndParam) -> None:
        """Remove what is neither the best checkpoint nor the newest, now that the last epoch has been evaluated.

        Args:
            param: of the evaluation.

        Raises:
            UnknownName: there is no such metric.
        """
        if self._monitor is None or self._run is None:
            return
        name, value = param.value(self._monitor)
        newest = param.epoch + 1
        if newest not in self._kept:
            return
        if improves(name, value, self.best_value, self._mode):
            self.best_value, self.best_epoch = float(value), newest
        for epoch in [each for each in self._kept if each not in (newest, self.best_epoch)]:
            self._run.remove(self._prefix, epoch)
            self._kept.remove(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return what is kept, and what is best, as JSON values."""
        return {"best_value": self.best_value, "best_epoch": self.best_epoch, "kept": list(self._kept)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``, which ``state_dict`` returned."""
        value, epoch = state["best_value"], state["best_epoch"]
        self.best_value = None if value is None else float(value)
        self.best_epoch = None if epoch is None else int(epoch)
        self._kept = [int(each) for each in state["kept"]]


class do_batch_checkpoint:  # noqa: N801 - beside MXNet's do_checkpoint
    """Saves a ``Checkpoint`` after every ``period`` batches of an epoch; a ``batch_end_callback``, on every worker.

    After batch 99 of epoch 2 that is ``prefix-0002-000100.safetensors`` and its companions. Old ones stay.
    The training data needs a sampler that can continue within an epoch, such as ``SplitSampler``.

    Args:
        prefix: the beginning of the files' names. Folders in it are made when needed.
        period: the number of batches from one checkpoint to the next.
    """

    def __init__(self, prefix: str, period: int) -> None:
        self._prefix, self.period = str(prefix), max(1, int(period))
        self._run: Run | None = None

    def begin(self, run: Run) -> None:
        """Remember ``run``, which saves."""
        self._run = run

    def __call__(self, param: BatchEndParam) -> None:
        if self._run is not None and (param.nbatch + 1) % self.period == 0:
            self._run.save(self._prefix, param.epoch, param.nbatch + 1)
