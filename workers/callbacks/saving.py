"""Checkpoints after epochs and batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from workers.callbacks.param import BatchEndParam


class Saving(Protocol):
    """What these callbacks need of a run of ``fit``."""

    def save(self, prefix: str, epoch: int, batch: int = 0) -> bool:
        """Write a checkpoint; return whether it is there."""


class do_checkpoint:  # noqa: N801 - MXNet's name
    """Saves a ``Checkpoint`` after every ``period`` epochs; an ``epoch_end_callback``, on every worker.

    After epoch 0 that is ``prefix-0001.safetensors`` and its companions; see ``workers.Checkpoint``. If a worker cannot
    write its part, because a disk is full, all remove theirs, a line names the file, and training goes on.

    Args:
        prefix: the beginning of the files' names. Folders in it are made when needed.
        period: the number of epochs from one checkpoint to the next.
    """

    def __init__(self, prefix: str, period: int = 1) -> None:
        self._prefix, self.period = str(prefix), max(1, int(period))
        self._run: Saving | None = None

    def begin(self, run: Saving) -> None:
        """Remember ``run``, which saves."""
        self._run = run

    def __call__(
        self, epoch: int, model: Any, arg_params: Mapping[str, torch.Tensor], aux_params: Mapping[str, torch.Tensor]
    ) -> None:
        """Save, if it is time."""
        if self._run is not None and (epoch + 1) % self.period == 0:
            self._run.save(self._prefix, epoch + 1)


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
        self._run: Saving | None = None

    def begin(self, run: Saving) -> None:
        """Remember ``run``, which saves."""
        self._run = run

    def __call__(self, param: BatchEndParam) -> None:
        """Save, if it is time."""
        if self._run is not None and (param.nbatch + 1) % self.period == 0:
            self._run.save(self._prefix, param.epoch, param.nbatch + 1)
